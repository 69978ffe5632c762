"""The cases of one large GPU, beside vLLM's figures: one engine process, prompts as token ids, greedy, no EOS.

    python benchmarks/h200/run.py [--cases batch1_decode,...] [--json results.json] [-- any flags of `diptych serve`]

Weights are random, in the shapes of Llama-3.1-8B. Time counts from the first request sent to the last answer; the start
from the engine's process to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from diptych.bench.presets import choose_cases, h200_cases
from diptych.bench.workload import BenchRequest, Case
from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.core.messages import EngineInfo
from diptych.core.request import Request, SamplingParams
from diptych.resolve import validate
from diptych.server.process import EngineProcess

MODEL = Path(__file__).parent / "llama-3.1-8b"

BESIDE = {
    "batch1_decode": ("ms/token", 5.06, 4.2),
    "prefill_8k": ("input tok/s", 38157, 42000),
    "tput_1024_256": ("s", 21.15, 17.0),
    "decode_bs256": ("output tok/s", 20531, 28000),
    "mixed_1000": ("s", 23.26, 18.5),
    "shared_prefix": ("s", 2.44, 1.8),
    "start": ("s", 222.0, 20.0),
}
"""Case: unit, vLLM 0.24.0 on the same machine, and what we aim at."""


@dataclass(frozen=True)
class Measured:
    """A case's wall time, its tokens, and what the engine says of its steps."""

    seconds: float
    num_input: int
    num_output: int
    num_steps: int = 0
    host_s: float = 0.0

    def value(self, unit: str) -> float:
        match unit:
            case "ms/token":
                return 1000 * self.seconds / self.num_output
            case "input tok/s":
                return self.num_input / self.seconds
            case "output tok/s":
                return self.num_output / self.seconds
        return self.seconds


async def answer(engine: EngineProcess, request_id: str, request: BenchRequest) -> int:
    """Output tokens of one request."""
    assert isinstance(request.prompt, list)
    sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, seed=0)
    sent = Request(request_id=request_id, prompt_token_ids=request.prompt, sampling=sampling, arrival_time=time.time())
    count = 0
    async for output in engine.client.generate(sent):
        count += len(output.token_ids)
    return count


async def measure(engine: EngineProcess, case: Case) -> Measured:
    requests = case.requests
    # The first prompts again, a little: whatever is compiled or paged in at first use must not be in the figure.
    await asyncio.gather(
        *(answer(engine, f"warm-{i}", BenchRequest(item.prompt, 4)) for i, item in enumerate(requests[:2]))
    )
    while not (await engine.client.flush_cache()).ok:
        await asyncio.sleep(0.01)
    before = await engine.client.load()
    began = time.perf_counter()
    counts = await asyncio.gather(*(answer(engine, f"{case.name}-{i}", item) for i, item in enumerate(requests)))
    seconds = time.perf_counter() - began
    after = await engine.client.load()
    return Measured(
        seconds,
        sum(len(item.prompt) for item in requests if isinstance(item.prompt, list)),
        sum(counts),
        after.steps_total - before.steps_total,
        after.host_s_total - before.host_s_total,
    )


def report(name: str, measured: Measured) -> dict[str, object]:
    unit, vllm, target = BESIDE[name]
    value = measured.value(unit)
    is_rate = unit.endswith("tok/s")
    ratio = value / vllm if is_rate else vllm / value
    verdict = "met" if (value >= target) is is_rate or value == target else "missed"
    steps = f"{measured.num_steps} steps, {1000 * measured.seconds / max(1, measured.num_steps):.2f} ms each"
    host = f"host {1000 * measured.host_s / max(1, measured.num_steps):.2f} ms"
    print(
        f"{name:15} {value:10,.2f} {unit:12} vLLM {vllm:10,.2f}  x{ratio:4.2f}  target {target:,g} {verdict:7} {steps}, {host}"
    )
    return {"case": name, "unit": unit, "value": value, "vllm": vllm, "target": target, "seconds": measured.seconds}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="some of the cases, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments, flags = parser.parse_known_args()
    defaults = ["--model-path", str(MODEL), "--load-format", "dummy", "--max-model-len", "16384"]
    given = [*defaults, *(flag for flag in flags if flag != "--")]
    config = parse_engine_flags(EngineFlags, given, prog="run.py", description="").engine
    validate(config)
    cases = choose_cases(h200_cases(), arguments.cases)
    began = time.perf_counter()
    engine = EngineProcess(config)
    try:
        info: EngineInfo = await engine.client.start()
        await answer(engine, "first", BenchRequest([1] * 16, 1))
        rows = [report("start", Measured(time.perf_counter() - began, 16, 1))]
        print(
            f"{info.num_kv_tokens:,} tokens of KV, {info.max_num_seqs} sequences, {info.attention_backend}", flush=True
        )
        for case in cases:
            rows.append(report(case.name, await measure(engine, case)))
    finally:
        await engine.stop()
    if arguments.json is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        result = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "flags": flags, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
