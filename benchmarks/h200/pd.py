"""Prefill and decode apart on one GPU, each engine with its share of the memory, against one engine that does both.

    python benchmarks/h200/pd.py [--input-lens 8192] [any other flag of `diptych bench pd`]

`diptych bench pd` with random weights in the shapes of Llama-3.1-8B, and a tokenizer made up for them, for the servers
that it starts want one. A prompt of 8,192 tokens has 1 GiB of KV.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from diptych.cli.bench_pd import run

MODEL = Path(__file__).parent / "llama-3.1-8b"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for every token id."""
    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "llama-3.1-8b"
        shutil.copytree(MODEL, folder)
        write_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
        defaults = ["--model-path", str(folder), "--load-format", "dummy", "--max-model-len", "16384"]
        lens = [] if "--input-lens" in sys.argv else ["--input-lens", "128,1024,8192"]
        return run([*defaults, *lens, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
