"""Where the time of a step goes on the GPU: kernels by time, and how busy it is over many overlapped steps.

    python benchmarks/h200/trace.py [--batch 64] [--context 320] [--steps 50] [--prefill 0] [-- flags of `diptych serve`]

Drives a worker as the executor does: a step is launched while the one before runs. Busy is the union of kernel times
over the time from the first kernel's start to the last one's end. Writes a Chrome trace with --trace FILE.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from diptych.cli.flags import EngineFlags, parse_engine_flags
from diptych.core.batch import Admission, Batch, SequenceStep
from diptych.core.request import SamplingParams
from diptych.worker.runner import PendingStep
from diptych.worker.worker import Worker, create_worker

MODEL = Path(__file__).parent / "llama-3.1-8b"
IN_FLIGHT = 2


class Driver:
    """Sequences of one length, decoded together."""

    def __init__(self, worker: Worker, batch: int, context: int, steps: int) -> None:
        self.worker = worker
        self.page_size = worker.info.page_size
        self.step_id = 0
        self.position = context
        pages = -(-(context + steps) // self.page_size)
        sampling = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True, seed=0)
        prompt = [7] * context
        admissions = [Admission(slot, str(slot), prompt, context, sampling, (), steps + 8) for slot in range(batch)]
        # No prompt is computed: attention reads zeros, which cost what keys and values cost.
        rows = [
            SequenceStep(slot, context - 1, 1, list(range(slot * pages, (slot + 1) * pages)), True)
            for slot in range(batch)
        ]
        self.batch = batch
        self.finish(self.launch(rows, admissions))

    def launch(self, rows: list[SequenceStep], admissions: list[Admission] | None = None) -> PendingStep:
        self.step_id += 1
        return self.worker.launch(Batch(self.step_id, [], admissions or [], rows))

    def finish(self, step: PendingStep) -> None:
        step.wait()
        step.collect()

    def decode(self, count: int) -> float:
        """Seconds of `count` steps."""
        began = time.perf_counter()
        pending: deque[PendingStep] = deque()
        for _ in range(count):
            rows = [SequenceStep(slot, self.position, 1, [], True) for slot in range(self.batch)]
            self.position += 1
            pending.append(self.launch(rows))
            if len(pending) >= IN_FLIGHT:
                self.finish(pending.popleft())
        while pending:
            self.finish(pending.popleft())
        return time.perf_counter() - began

    def prefill(self, num_tokens: int, count: int) -> float:
        """Seconds of `count` steps of one whole prompt each, in the pages of slot 0 and those after it."""
        pages = list(range(-(-num_tokens // self.page_size)))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
        began = time.perf_counter()
        for _ in range(count):
            self.step_id += 1
            admission = Admission(self.batch, "p", [11] * num_tokens, num_tokens, sampling, (), 1)
            rows = [SequenceStep(self.batch, 0, num_tokens, pages, True)]
            self.finish(self.worker.launch(Batch(self.step_id, [], [admission], rows)))
            self.worker.launch(Batch(self.step_id, [self.batch], [], []))
        return time.perf_counter() - began


def report(what: str, seconds: float, count: int, profiler: profile) -> None:
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    busy, end = 0.0, spans[0][0]
    for start, stop, _ in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - spans[0][0]
    print(f"{what}: {1000 * seconds / count:.3f} ms a step, GPU busy {100 * busy / span:.1f}% of {span / 1000:.1f} ms")
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for start, stop, name in spans:
        times[name] += stop - start
        calls[name] += 1
    for name, total in times.most_common(14):
        each = total / calls[name]
        print(f"  {total / count:9.1f} us a step {calls[name] / count:6.1f} x {each:8.2f} us  {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--context", type=int, default=320)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prefill", type=int, default=0, help="also steps of one prompt of so many tokens")
    parser.add_argument("--trace", type=Path, help="write the last case's Chrome trace here")
    arguments, flags = parser.parse_known_args()
    given = ["--model-path", str(MODEL), "--load-format", "dummy", "--max-model-len", "16384"]
    given += [flag for flag in flags if flag != "--"]
    config = parse_engine_flags(EngineFlags, given, prog="trace.py", description="").engine
    worker = create_worker(config, lambda what, done, total: None)
    for batch in arguments.batch:
        driver = Driver(worker, batch, arguments.context, 3 * arguments.steps)
        driver.decode(arguments.steps)
        plain = driver.decode(arguments.steps)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            driver.decode(arguments.steps)
        report(f"decode, batch {batch}, context {arguments.context}", plain, arguments.steps, profiler)
        worker.launch(Batch(0, list(range(batch)), [], []))
    if arguments.prefill:
        driver = Driver(worker, 1, 16, 8)
        driver.prefill(arguments.prefill, 2)
        plain = driver.prefill(arguments.prefill, 6)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            driver.prefill(arguments.prefill, 3)
        report(f"prefill, {arguments.prefill} tokens", plain, 6, profiler)
    if arguments.trace is not None:
        profiler.export_chrome_trace(str(arguments.trace))


if __name__ == "__main__":
    main()
