"""How a token chooses its experts, as data: what a model's configuration says of its router. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choice of `num_chosen` of `num_experts` experts, and their weights.

    scoring: of the router's logits. has_bias: a learned bias counts for the choice, and not for the weights (DeepSeek
    V3). num_groups, num_groups_kept: experts are dealt to groups, and chosen from a token's best groups alone, which
    `group_score` finds: by a group's best expert (V2), or by the sum of its best two (V3). renormalizes: the weights of
    the chosen add up to one. scaling: a factor on the weights. is_float32: the logits are computed in float32, instead
    of the model's dtype. rounds_weights: the weights are rounded to the model's dtype.
    Raises ConfigError for numbers that do not fit together.
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_groups_kept: int = 1
    group_score: Literal["best", "best_two"] = "best"
    renormalizes: bool = False
    scaling: float = 1.0
    is_float32: bool = False
    rounds_weights: bool = False

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups or not 1 <= self.num_groups_kept <= self.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts cannot be dealt to {self.num_groups} groups, of which "
                f"{self.num_groups_kept} are kept; check n_group and topk_group in config.json"
            )
        if not 1 <= self.num_chosen <= self.num_groups_kept * self.group_size:
            raise ConfigError(
                f"a token cannot choose {self.num_chosen} experts of {self.num_groups_kept * self.group_size}; check "
                "num_experts_per_tok in config.json"
            )
        if self.group_score == "best_two" and self.group_size < 2:
            raise ConfigError(f"a group of {self.group_size} has no best two experts; check n_group in config.json")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups
