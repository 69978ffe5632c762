"""PEFT adapters for tests: made by peft itself on a transformers model, random or trained for some steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.peft_model import PeftModel
from transformers import PreTrainedModel


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    std: float = 0.1,
    train_on: Sequence[list[int]] = (),
    num_steps: int = 0,
    **config: Any,
) -> PeftModel:
    """Write an adapter over `model` to `folder`, and return the model with it. The model itself stays as it is.

    Args: std: of random weights, both halves. train_on: sequences of token ids on which it is trained after that.
    config: more of LoraConfig; default is all linear layers, alpha twice the rank.
    """
    torch.manual_seed(seed)
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for what transformers has renamed
        adapted = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=std)
    optimizer = torch.optim.AdamW([weight for weight in adapted.parameters() if weight.requires_grad], lr=1e-2)
    for step in range(num_steps):
        ids = torch.tensor([train_on[step % len(train_on)]])
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(str(folder))
    return adapted.eval()
