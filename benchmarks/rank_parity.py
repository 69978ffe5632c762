"""The golden law over ranks: greedy output of every shape equals that of one rank.

    python benchmarks/rank_parity.py MODEL --shapes tp2,pp2,tp2pp2,tp2dp2 [any flags of `diptych serve`]

A shape names sizes of tp, pp, dp and ep. In float32, unless --dtype says otherwise: sums then round differently, and
ties may fall otherwise. Prints one line a shape; exits with 1 if any differs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time

from diptych import LLM, SamplingParams
from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.config import EngineConfig
from diptych.config_tree import section_fields

NUM_PROMPTS = 8
OUTPUT_LEN = 64


def prompts(vocab_size: int) -> list[list[int]]:
    """Of unlike lengths, two with a common beginning; the same for every shape."""
    lengths = [1, 7, 33, 64, 100, 200, 350, 351]
    return [[(5 + 31 * i * i + 7 * min(n, 300)) % vocab_size for i in range(n)] for n in lengths[:NUM_PROMPTS]]


def options(config: EngineConfig, shape: str) -> dict[str, object]:
    """The engine's settings as keywords of LLM, with the sizes that a shape such as "tp4dp2" names."""
    values = {name: vars(vars(config)[section])[name] for section, names in section_fields().items() for name in names}
    sizes = {f"{axis}_size": int(size) for axis, size in re.findall(r"(tp|pp|dp|ep)(\d+)", shape)}
    return values | sizes


def outputs(config: EngineConfig, shape: str) -> tuple[list[list[int]], float]:
    """Greedy tokens of all prompts, and seconds for them without loading."""
    keywords = options(config, shape)
    with LLM(str(keywords.pop("model_path")), **keywords) as llm:
        asked = prompts(llm.info.vocab_size)
        llm.generate(asked[:1], SamplingParams(temperature=0.0, max_tokens=2))
        llm.flush_cache()
        started = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        found = [completion.token_ids for completion in llm.generate(asked, sampling)]
        return found, time.perf_counter() - started


def main(arguments: list[str]) -> int:
    """Compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", required=True)
    own, rest = parser.parse_known_args(arguments)
    config = parse_engine_flags(
        EngineFlags, ["--dtype", "float32", *rest], prog="rank_parity", description="See the top of the file."
    ).engine
    expected, seconds = outputs(config, "tp1")
    num_tokens = sum(map(len, expected))
    print(f"{'tp1':<8} reference    {num_tokens / seconds:8.1f} tokens/s", flush=True)
    num_wrong = 0
    for text in own.shapes.split(","):
        found, seconds = outputs(config, text)
        wrong = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
        num_wrong += wrong
        verdict = "equal" if not wrong else f"{wrong} of {NUM_PROMPTS} differ"
        print(f"{text:<8} {verdict:<12} {num_tokens / seconds:8.1f} tokens/s", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
