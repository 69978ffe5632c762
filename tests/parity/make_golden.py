"""Writes golden.json: what transformers says to a set of prompts, token by token, greedily, in float32.

Run it when a prompt is added, or transformers changes: `.venv/bin/python tests/parity/make_golden.py`. It takes
minutes, which is why the tests read its result. That the result is right is itself tested, see test_golden.py.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.utils import logging

from diptych.demo import DEMO_SHA256, demo_model_path
from diptych.tokenizer import load_tokenizer

TARGET = Path(__file__).with_name("golden.json")
NUM_NEW_TOKENS = 48

STORY = (
    "The ferry left at dawn, as it had for sixty years, with four passengers and a crate of lemons. Old Marta "
    "sat at the stern and counted the gulls; she had a theory that there was one fewer every winter. The "
    "engineer, who did not believe in theories, believed in oil, and put more of it wherever something "
    "squeaked. Half way across, the fog came down. It was not a grey fog but a white one, so thick that the "
    'bell on the bow seemed to ring in another country. "We should turn back," said the schoolteacher. "Back '
    'is as far as forward," said the captain, who had once been a teacher himself, and he let the engine run '
    "slowly while the boy with the lantern called out the depth. Twelve. Eleven. Eleven. Nine. Nobody spoke. "
    "Then, from the left, where no land should have been, they heard a dog. It barked three times, waited, "
    "and barked three times again, like a lighthouse made of noise. The captain laughed for the first time "
    "that year. He turned the wheel towards the barking, and the depth went from nine to ten, from ten to "
    "fourteen, and the fog opened like a curtain. On the pier stood a brown dog, wet to the bone, and beside "
    "it nobody at all. Marta counted the gulls on the roof of the customs house. There were eleven, one more "
    "than last winter, and she decided not to tell anyone. The lemons were unloaded, weighed, and found to be "
    "two short. The engineer said that fog eats lemons. The schoolteacher wrote this down in a small green "
    "book, under the heading of things that cannot be proved, which was already the longest chapter. In the "
    "evening the captain bought a bone at the butcher's and walked along the harbour, whistling, but the dog "
    "had gone, and the people he asked had never seen one there. He left the bone on the last post of the "
    "pier. In the morning it was gone too, and on the planks there were prints, either of a large dog or of a "
    "small bear, leading straight into the water. Years later, when the bridge was built and the ferry was "
    "sold to a museum, a child asked the captain how he had found his way without instruments. He thought "
    "about it for a long time. Then he said that he had only ever listened. There is always something on a "
    "shore that wants you to arrive, he said: a dog, a bell, a woman beating carpets, a boy who throws stones "
    "at a tin. You only have to be slow enough to hear it, and not so proud that you think it is an echo. The "
    "child, who had hoped for a compass or at least a secret map, was not satisfied, and asked the "
    "schoolteacher instead. She opened the green book, turned to the longest chapter, and read out the line "
    "about the lemons. Then she added a new line below it, in ink, with the date, and it said that"
)
CODE = '''def fibonacci(n: int) -> int:
    """The n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def is_prime(n: int) -> bool:
'''
TEXTS = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village at the foot of a mountain,",
    "code": CODE,
    "unicode": "春はあけぼの。Привет, мир! سلام 🎻🌊 naïve façade —",
    "chat": "You are kind.\n\nUser:\nName three colours of the rainbow.\n\nAssistant:\n",
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "address": {"city":',
    "digits": "1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "spaces": "name      age      city\nAda       36       London\nAlan      41      ",
    "mid-word": "The quick brown fox jumps over the la",
    "question": "Q: How many legs does a spider have?\nA:",
    "repetition": "tick tock " * 40,
    "html": "<html>\n<head><title>Ferry times</title></head>\n<body>\n<h1>",
}
# Lengths of the story's beginning: around the edges of pages of 16 and 32 tokens, and of the window of 512.
STORY_LENGTHS = (2, 15, 16, 17, 31, 33, 100, 480, 512, 513)


def prompts() -> dict[str, list[int]]:
    """Name -> token ids."""
    path = str(demo_model_path())
    tokenizer = load_tokenizer(path, None)
    story = tokenizer.encode(STORY)
    if len(story) <= max(STORY_LENGTHS):
        raise ValueError(f"the story has only {len(story)} tokens")
    found = {"bos": story[:1], "whole-story": story}
    found |= {f"story-{length}": story[:length] for length in STORY_LENGTHS}
    return found | {name: tokenizer.encode(text) for name, text in TEXTS.items()}


def load_reference(dtype: torch.dtype) -> PreTrainedModel:
    """The demo model in transformers."""
    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),  # else each step unpacks every weight again
        dtype=dtype,
    )
    return model.eval().requires_grad_(False)


def main() -> None:
    logging.disable_progress_bar()
    cases, questions = [], prompts()
    model = load_reference(torch.float32)
    for name, token_ids in questions.items():
        output = model.generate(torch.tensor([token_ids]), do_sample=False, max_new_tokens=NUM_NEW_TOKENS)
        cases.append({"name": name, "prompt": token_ids, "output": output[0, len(token_ids) :].tolist()})
        print(f"{name}: {len(token_ids)} + {len(cases[-1]['output'])}", flush=True)
    provenance = {
        "made_by": "tests/parity/make_golden.py",
        "model_sha256": DEMO_SHA256,
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
        "dtype": "float32",
        "num_new_tokens": NUM_NEW_TOKENS,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    TARGET.write_text(f'{{"provenance": {json.dumps(provenance)},\n"cases": [\n{lines}\n]}}\n', encoding="ascii")


if __name__ == "__main__":
    main()
