"""What speculation is worth: the same requests with and without it, in turns, in one process.

    python benchmarks/speculative.py [--algorithm NGRAM] [--draft-model PATH] [--model demo] [--quantization int8]

Prints for each text and batch size the ratio of output tokens a second, the mean of both, and what was accepted. Times are
CPU time of the whole process, so that what else runs on the machine matters little; "wall" is the ratio of wall times.
"""

from __future__ import annotations

import argparse
import statistics
import time

from diptych import LLM, SamplingParams
from diptych.offline import Completion

CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth

def perimeter(width, height):
    return 2 * (width + height)

"""
TEXTS = {
    "repeated code": CODE * 4 + "Write the functions above again.\n\ndef area",
    "a question": "Question: Why is the sky blue, and why is it red in the evening?\nAnswer:",
    "a story": "Once upon a time there was a small dragon who did not want to fly. One day",
}


def run(llm: LLM, text: str, batch: int, max_tokens: int) -> tuple[float, float, list[Completion]]:
    """CPU seconds, wall seconds and completions of `batch` requests at once."""
    prompts = [f"{text} " + "." * index for index in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    cpu, wall = time.process_time(), time.perf_counter()
    done = llm.generate(prompts, sampling)
    return time.process_time() - cpu, time.perf_counter() - wall, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--algorithm", default="NGRAM")
    parser.add_argument("--draft-model")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--num-drafts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batches", default="1,8")
    given = parser.parse_args()
    options = {"kv_cache_memory": "256MiB", "quantization": given.quantization}
    speculation = {
        "speculative_algorithm": given.algorithm,
        "speculative_draft_model_path": given.draft_model,
        "speculative_num_draft_tokens": given.num_drafts,
    }
    with LLM(given.model, **options) as plain, LLM(given.model, **options, **speculation) as eager:
        for name, text in TEXTS.items():
            for batch in map(int, given.batches.split(",")):
                measure(plain, eager, f"{name} x{batch}", text, batch, given)


def measure(plain: LLM, eager: LLM, name: str, text: str, batch: int, given: argparse.Namespace) -> None:
    """Rounds of both in turns, the first of which warms up."""
    ratios, wall_ratios, differing, before = [], [], 0, eager.load()
    for turn in range(given.rounds + 1):
        cpu, wall, expected = run(plain, text, batch, given.max_tokens)
        fast_cpu, fast_wall, found = run(eager, text, batch, given.max_tokens)
        differing += sum(a.token_ids != b.token_ids for a, b in zip(expected, found, strict=True))
        if turn:
            ratios.append(cpu / fast_cpu)
            wall_ratios.append(wall / fast_wall)
    after = eager.load()
    verifications = after.verifications_total - before.verifications_total
    drafts = after.drafts_total - before.drafts_total
    accepted = after.accepted_drafts_total - before.accepted_drafts_total
    print(
        f"{name}: {statistics.median(ratios):.2f}x (wall {statistics.median(wall_ratios):.2f}x), "
        f"accept length {1 + accepted / max(1, verifications):.2f}, rate {accepted / max(1, drafts):.2f}, "
        f"{drafts} drafts; {differing} outputs differ",
        flush=True,
    )


if __name__ == "__main__":
    main()
