"""The same prompt with and without an adapter, in one batch.

python examples/lora.py [ADAPTER_FOLDER [MODEL]]

Without a folder (of PEFT's format), a random adapter for the demo model is made first: it only answers otherwise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from diptych import Engine

PROMPT = "The capital of France is"


def make_adapter(folder: Path, rank: int = 8) -> str:
    """A random adapter of the output projections of Gemma 3 270M, as `peft` would save it."""
    tensors, num_inputs, hidden = {}, 1024, 640
    for layer in range(18):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_inputs) / num_inputs**0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def main(adapter: str = "", model: str = "demo") -> None:
    with tempfile.TemporaryDirectory() as folder, Engine(model_path=model, kv_cache_memory="256MiB") as engine:
        engine.load_lora_adapter("mine", adapter or make_adapter(Path(folder)))
        sampling = {"max_new_tokens": 8, "temperature": 0}
        for name, result in zip(
            ("mine", "base"), engine.generate([PROMPT] * 2, sampling, lora_path=["mine", None]), strict=True
        ):
            print(f"{name}: {result['text']!r}")
        engine.unload_lora_adapter("mine")


if __name__ == "__main__":
    main(*sys.argv[1:])
