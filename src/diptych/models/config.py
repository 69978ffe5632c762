"""What a decoder-only transformer is made of, whichever file format said so. Pure data: never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.layers.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequency scaling; fields as in Hugging Face's `rope_scaling` (rope_type linear, llama3, yarn).

    magnitude_all_dims: DeepSeek's mscale_all_dim, which scales q.k of latent attention.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    magnitude_all_dims: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts in some of a model's layers.

    intermediate_size: of one expert. shared_size: inner size of the network that all tokens use, 0 without one.
    has_shared_gate: that one's output is scaled by a sigmoid (Qwen2-MoE). layers: per layer, whether it has experts.
    """

    routing: Routing
    intermediate_size: int
    shared_size: int = 0
    has_shared_gate: bool = False
    layers: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA): sizes of what a token keeps, and of its heads.

    query_rank: of the query's own bottleneck, None without one. kv_rank: elements of the latent that keys and values
    are made of. nope_dim, rope_dim: of a head's query and key, without and with rotation. value_dim: of a head's value.
    is_interleaved: rotated dimensions are paired with their neighbours.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool = True

    @property
    def row_dim(self) -> int:
        """Elements that a token's row in a page has."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shapes and constants of one model, normalised from config.json or GGUF metadata.

    layer_windows: per layer, tokens a query sees including itself, None for full attention. rope_local_theta: rotary
    base of windowed layers where it differs (Gemma 3; those layers are not scaled). attention_scale: factor on q.k.
    embedding_scale: factor on embeddings (Gemma). eos_token_ids: union of config and generation_config.
    num_draft_layers: layers beyond num_layers in the checkpoint, which predict further tokens (DeepSeek's MTP).
    experts, latent: None where a model has none. With latent attention head_dim is what rotates, num_kv_heads is 1.
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
    num_draft_layers: int = 0
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    @property
    def kv_head_dim(self) -> int:
        """Elements of a head's row in a page."""
        return self.head_dim if self.latent is None else self.latent.row_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a mixture of experts stands in place of this layer's MLP."""
        return self.experts is not None and self.experts.layers[layer]
