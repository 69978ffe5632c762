"""Tiny random models of every architecture, transformers' and ours, and steps of ours over a paged pool."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from diptych.attention.backend import AttentionInputs, ForwardInputs
from diptych.attention.registry import create_attention
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.huggingface import config_from_fields
from diptych.models.json_fields import Fields
from diptych.models.registry import MODELS
from diptych.models.transformer import Transformer

VOCAB = 96
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3 = {**TINY, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
GEMMA3_SCALED_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}
DEEPSEEK = {
    **TINY,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Mistral": (MistralConfig, MistralForCausalLM),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "Gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "Mixtral": (MixtralConfig, MixtralForCausalLM),
    "Qwen2Moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "Qwen3Moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "DeepseekV2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "DeepseekV3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", TINY),
    "llama-llama3-rope": ("Llama", {**TINY, "rope_parameters": LLAMA3_ROPE}),
    "llama-yarn-rope": ("Llama", {**TINY, "rope_parameters": YARN_ROPE}),
    "llama-head-dim-biases-tied": (
        "Llama",
        {**TINY, "head_dim": 20, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-multi-query": ("Llama", {**TINY, "num_key_value_heads": 1}),
    "llama-multi-head": ("Llama", {**TINY, "num_key_value_heads": 4}),
    "mistral-window": ("Mistral", {**TINY, "sliding_window": 7}),
    "mistral-full": ("Mistral", {**TINY, "sliding_window": None}),
    "qwen2": ("Qwen2", TINY),
    "qwen2-late-windows": (
        "Qwen2",
        {**TINY, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**TINY, "head_dim": 32}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-scaled-rope-multi-query": (
        "Gemma3",
        {**GEMMA3, "num_key_value_heads": 1, "rope_parameters": GEMMA3_SCALED_ROPE},
    ),
    "mixtral": ("Mixtral", {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**TINY, **EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    ),
    "qwen3-moe-some-layers-dense": (
        "Qwen3Moe",
        {**TINY, **EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-every-other-layer": (
        "Qwen3Moe",
        {**TINY, **EXPERTS, "head_dim": 16, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek-v3-halves-all-experts": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False},
    ),
}


class StateDictSource:
    """A WeightSource over a state dict. On device "meta" it knows names and shapes only."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: str = "cpu") -> None:
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.names_read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ConfigError(f"tensor {name} is missing")
        return tuple(self.tensors[name].shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        self.names_read.add(name)
        tensor = self.tensors[name]
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)


@cache
def reference_model(case: str) -> PreTrainedModel:
    """transformers' model, random weights; every norm and bias is random too, or a missing one would go unnoticed."""
    family, options = CASES[case]
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(sum(map(ord, case)))
    model = model_class(config_class(**options)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


@cache
def checkpoint(case: str) -> dict[str, torch.Tensor]:
    """The reference model's tensors as they are in files: experts one by one, under the names of published models."""
    with tempfile.TemporaryDirectory() as folder:
        reference_model(case).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def our_config(config: PreTrainedConfig, architecture: str) -> TransformerConfig:
    content = {**config.to_dict(), "architectures": [architecture]}
    return config_from_fields(Fields(content, "config.json"), Fields({}, "generation_config.json"))


@cache
def our_model(case: str, dtype: torch.dtype = torch.float32, backend: str = "reference") -> Transformer:
    """Our model in plain torch, or with its weights packed for the CPU kernels."""
    reference = reference_model(case)
    config = our_config(reference.config, type(reference).__name__)
    model = MODELS.resolve(config.architecture)(config, dtype=dtype, device="cpu")
    assert isinstance(model, Transformer)
    model.load(StateDictSource(checkpoint(case)))
    if backend == "cpu":
        model.pack()
    return model


@dataclass
class Runner:
    """Feeds ragged steps to a model; pages are handed out in a shuffled order, so that none happen to be adjacent."""

    model: Transformer
    page_size: int
    backend: str = "reference"
    num_pages: int = 160
    page_ids: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        dtype = self.model.embed_tokens.weight.dtype
        layout = KVLayout.single_rank(
            config.num_layers,
            config.num_kv_heads,
            head_dim=config.kv_head_dim,
            page_size=self.page_size,
            dtype=str(dtype).removeprefix("torch."),
            is_latent=config.latent is not None,
        )
        self.pool = KVPool(layout, self.num_pages, torch.device("cpu"), dtype)
        self.attention = create_attention(self.backend, self.pool)
        self.free = torch.randperm(self.num_pages).tolist()

    def step(self, rows: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some sequences; logits of every one of them, [tokens, vocab]."""
        positions: list[int] = []
        slots: list[int] = []
        for row, token_ids in rows.items():
            start = self.computed.get(row, 0)
            self.computed[row] = start + len(token_ids)
            pages = self.page_ids.setdefault(row, [])
            while len(pages) * self.page_size < self.computed[row]:
                pages.append(self.free.pop())
            for position in range(start, self.computed[row]):
                positions.append(position)
                slots.append(pages[position // self.page_size] * self.page_size + position % self.page_size)
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for token_ids in rows.values() for token in token_ids]),
            positions=torch.tensor(positions),
            logit_rows=torch.arange(len(positions)),
            attention=self._attention_inputs(rows, slots),
        )
        hidden = self.model.forward(inputs, self.attention)
        lengths = [len(token_ids) for token_ids in rows.values()]
        return dict(zip(rows, self.model.logits(hidden).split(lengths), strict=True))

    def _attention_inputs(self, rows: dict[int, Sequence[int]], slots: list[int]) -> AttentionInputs:
        lengths = [len(token_ids) for token_ids in rows.values()]
        kv_lens = [self.computed[row] for row in rows]
        width = max(len(self.page_ids[row]) for row in rows)
        table = [self.page_ids[row] + [2**30] * (width - len(self.page_ids[row])) for row in rows]
        return AttentionInputs(
            query_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=torch.tensor(table, dtype=torch.int32),
            kv_slots=torch.tensor(slots),
            query_lens_host=lengths,
            kv_lens_host=kv_lens,
        )


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def expected_logits(case: str, length: int, seed: int = 0) -> torch.Tensor:
    return reference_model(case)(torch.tensor([prompt(length, seed)])).logits[0]
