"""What config.json says about mixtures of experts and latent attention, by family. Never imports torch."""

from __future__ import annotations

import math

from diptych.layers.routing import Routing
from diptych.models.config import ExpertsConfig, LatentConfig, RopeScaling
from diptych.models.json_fields import Fields

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
LATENT = ("deepseek_v2", "deepseek_v3")


def experts_config(text: Fields, model_type: str) -> ExpertsConfig | None:
    """The mixture of experts of a model type that has one.

    Raises ConfigError for a way to choose experts that the model type's own code does not have either.
    """
    if model_type not in MIXTURES:
        return None
    if model_type == "mixtral":
        routing = Routing(
            num_experts=text.size("num_local_experts", 8),
            num_chosen=text.size("num_experts_per_tok", 2),
            renormalizes=True,
        )
        num_layers = text.size("num_hidden_layers")
        return ExpertsConfig(
            routing=routing, intermediate_size=text.size("intermediate_size"), layers=(True,) * num_layers
        )
    if model_type in LATENT:
        return _deepseek(text, is_third=model_type == "deepseek_v3")
    return _qwen(text, is_second=model_type == "qwen2_moe")


def _qwen(text: Fields, *, is_second: bool) -> ExpertsConfig:
    step, dense = text.size("decoder_sparse_step", 1), set(text.token_ids("mlp_only_layers"))
    return ExpertsConfig(
        routing=Routing(
            num_experts=text.size("num_experts", text.size("num_local_experts", 60 if is_second else 128)),
            num_chosen=text.size("num_experts_per_tok", 4 if is_second else 8),
            renormalizes=text.flag("norm_topk_prob", False),
            rounds_weights=True,
        ),
        intermediate_size=text.size("moe_intermediate_size", 1408 if is_second else 768),
        shared_size=text.size("shared_expert_intermediate_size", 5632) if is_second else 0,
        has_shared_gate=is_second,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(text.size("num_hidden_layers"))),
    )


def _deepseek(text: Fields, *, is_third: bool) -> ExpertsConfig:
    _expect(text, "moe_layer_freq", text.size("moe_layer_freq", 1), 1)
    _expect(text, "scoring_func", text.text("scoring_func"), "sigmoid" if is_third else "softmax")
    method = text.text("topk_method", "noaux_tc" if is_third else "greedy")
    if method not in (("noaux_tc",) if is_third else ("greedy", "group_limited_greedy")):
        raise text.wrong("topk_method", method, "noaux_tc" if is_third else "greedy or group_limited_greedy")
    if not is_third:
        _expect(text, "norm_topk_prob", text.flag("norm_topk_prob", False), False)
    has_groups = is_third or method == "group_limited_greedy"
    inner = text.size("moe_intermediate_size", 2048 if is_third else 1407)
    num_dense = text.count("first_k_dense_replace", 3 if is_third else 0)
    return ExpertsConfig(
        routing=Routing(
            num_experts=text.size("n_routed_experts", 256 if is_third else 64),
            num_chosen=text.size("num_experts_per_tok", 8 if is_third else None),
            scoring="sigmoid" if is_third else "softmax",
            has_bias=is_third,
            num_groups=text.size("n_group", 8 if is_third else 1) if has_groups else 1,
            num_groups_kept=text.size("topk_group", 4 if is_third else 1) if has_groups else 1,
            group_score="best_two" if is_third else "best",
            renormalizes=is_third and text.flag("norm_topk_prob", True),
            scaling=text.number("routed_scaling_factor", 2.5 if is_third else 1.0),
            is_float32=True,
        ),
        intermediate_size=inner,
        shared_size=inner * text.count("n_shared_experts", 1 if is_third else 2),
        layers=tuple(layer >= num_dense for layer in range(text.size("num_hidden_layers"))),
    )


def _expect(text: Fields, key: str, value: object, expected: object) -> None:
    if value not in (None, expected):
        raise text.wrong(key, value, repr(expected))


def latent_config(text: Fields, model_type: str) -> LatentConfig | None:
    """The sizes of latent attention, of a model type that has it."""
    if model_type not in LATENT:
        return None
    return LatentConfig(
        query_rank=text.optional_size("q_lora_rank", 1536),
        kv_rank=text.size("kv_lora_rank", 512),
        nope_dim=text.size("qk_nope_head_dim", 128),
        rope_dim=text.size("qk_rope_head_dim", 64),
        value_dim=text.size("v_head_dim", 128),
        is_interleaved=text.flag("rope_interleave", True),
    )


def latent_scale(latent: LatentConfig, scaling: RopeScaling | None) -> float:
    """The factor on q.k of latent attention: YaRN's magnitude for all dimensions, squared, where there is one."""
    factor = (latent.nope_dim + latent.rope_dim) ** -0.5
    if scaling is None or scaling.magnitude_all_dims is None:
        return factor
    return factor * yarn_magnitude(scaling.factor, scaling.magnitude_all_dims) ** 2


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of attention for a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
