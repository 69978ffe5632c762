"""Attention on the CPU by our own kernels: pages are read where they lie, prefills and decodes in one call.

Knows the shape of a step; the arithmetic is in kernels/csrc. Worker's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.attention.backend import AttentionInputs, AttentionSpec
from diptych.errors import ConfigError
from diptych.kernels.attention import PagedAttention, StepShape
from diptych.kernels.decoder_layer import FusedLayer, FusedStack, StackedLayer
from diptych.kernels.library import kernels
from diptych.kernels.low_rank import AdaptedLayer, StackSegments
from diptych.kv.pool import KVPool


class CPUAttention:
    """An `AttentionBackend` over `pool`. An `AttentionInputs` must not change once a layer has seen it.

    Raises: ConfigError if the kernels cannot be had, or if the pool is not on the CPU.
    """

    def __init__(self, pool: KVPool) -> None:
        if kernels() is None or pool.tensor.device.type != "cpu":
            raise ConfigError("attention backend 'cpu' needs the CPU kernels and device cpu; use 'auto' or 'reference'")
        self.pool = pool
        self._layers: dict[tuple[int, int], tuple[AttentionSpec, PagedAttention]] = {}
        self._inputs: AttentionInputs | None = None
        self._shape: StepShape | None = None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: AttentionInputs, spec: AttentionSpec
    ) -> torch.Tensor:
        layer = self._layer(query.shape[1], spec)
        if self.pool.layout.is_latent:
            # The kernel knows values of the keys' width alone: a row is its own value, of which the end is not used.
            key = _heads_adjacent(key)
            return layer(_heads_adjacent(query), key, key, self._shape_of(inputs))[..., : spec.value_dim]
        return layer(_heads_adjacent(query), _heads_adjacent(key), _heads_adjacent(value), self._shape_of(inputs))

    def stacked(
        self,
        layer: FusedLayer,
        spec: AttentionSpec,
        *,
        num_heads: int,
        rotation: int,
        adapted: AdaptedLayer | None = None,
    ) -> StackedLayer:
        """A decoder layer with its attention over this pool."""
        return StackedLayer(layer, self._layer(num_heads, spec), rotation, adapted)

    def run_stack(
        self,
        stack: FusedStack,
        hidden: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        inputs: AttentionInputs,
        *,
        wanted: torch.Tensor | None = None,
        adapters: StackSegments | None = None,
    ) -> torch.Tensor:
        """Layers that `stacked` has made, as a whole: the residual stream [T, hidden], in place; see FusedStack."""
        return stack(hidden, rotations, self._shape_of(inputs), wanted=wanted, adapters=adapters)

    def _layer(self, num_heads: int, spec: AttentionSpec) -> PagedAttention:
        layer = self._layers.get((spec.layer, num_heads))
        if layer is None or layer[0] != spec:
            keys, values = self.pool.layer(spec.layer)
            kernel = PagedAttention(
                keys, values, num_heads=num_heads, scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap
            )
            layer = self._layers[spec.layer, num_heads] = (spec, kernel)
        return layer[1]

    def _shape_of(self, inputs: AttentionInputs) -> StepShape:
        if self._inputs is not inputs or self._shape is None:
            self._inputs = inputs
            self._shape = StepShape.of(
                query_starts=inputs.query_starts,
                kv_lens=inputs.kv_lens,
                page_table=inputs.page_table,
                kv_slots=inputs.kv_slots,
            )
        return self._shape


def _heads_adjacent(heads: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] as the kernels read it: any stride between tokens, none within one."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()
