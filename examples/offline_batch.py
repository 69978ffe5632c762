"""Many prompts at once in this process: no server.

python examples/offline_batch.py [MODEL]
"""

from __future__ import annotations

import sys

from diptych import LLM, SamplingParams

PROMPTS = ["The capital of France is", "1, 1, 2, 3, 5, 8,", "def add(a, b):\n"]


def main(model: str = "demo") -> None:
    with LLM(model, kv_cache_memory="256MiB") as llm:
        for completion in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12)):
            print(repr(completion.text), completion.finish_reason)


if __name__ == "__main__":
    main(*sys.argv[1:])
