"""What a decoder-only transformer is made of, whichever file format said so. Pure data: never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequency scaling; fields as in Hugging Face's `rope_scaling` (rope_type linear, llama3, yarn)."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shapes and constants of one model, normalised from config.json or GGUF metadata.

    layer_windows: per layer, tokens a query sees including itself, None for full attention. rope_local_theta: rotary
    base of windowed layers where it differs (Gemma 3; those layers are not scaled). attention_scale: factor on q.k.
    embedding_scale: factor on embeddings (Gemma). eos_token_ids: union of config and generation_config.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_local_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float | None = None
    tie_word_embeddings: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
