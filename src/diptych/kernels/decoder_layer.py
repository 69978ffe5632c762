"""Whole decoder layers in one call: what their parts compute, without Python and fresh memory between them.

T = tokens of the step, D = head_dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.kernels.attention import PagedAttention, StepShape
from diptych.kernels.library import kernels
from diptych.kernels.linear import LinearKernel
from diptych.kernels.low_rank import AdaptedLayer, StackSegments
from diptych.kernels.norm import FusedHeads, FusedNorm


class _Layer(ctypes.Structure):
    """DecoderLayer of csrc/abi.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "input_norm",
            "query_key_value",
            "head_norm",
            "attention_output",
            "post_attention_norm",
            "mlp_norm",
            "gate_up",
            "down",
            "post_mlp_norm",
        )
    )


class _Rotation(ctypes.Structure):
    """Rotation of csrc/abi.h."""

    _fields_ = (("cos", ctypes.c_void_p), ("signed_sin", ctypes.c_void_p))


class _StackedLayer(ctypes.Structure):
    """StackedLayer of csrc/abi.h."""

    _fields_ = (
        ("layer", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("rotation", ctypes.c_int64),
        ("adapted", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer is made of, each part packed.

    post_attention_norm, post_mlp_norm: what a block's output is normalised with before it is added; None where it is
    added as it is.
    """

    input_norm: FusedNorm
    query_key_value: LinearKernel
    heads: FusedHeads
    attention_output: LinearKernel
    post_attention_norm: FusedNorm | None = None
    mlp_norm: FusedNorm
    gate_up: LinearKernel
    down: LinearKernel
    post_mlp_norm: FusedNorm | None = None

    @property
    def has_whole_tiles(self) -> bool:
        """Whether no GEMM's input needs padding, as a layer in one call must have it."""
        linears = (self.query_key_value, self.attention_output, self.gate_up, self.down)
        return all(linear.in_features == linear.padded_inputs for linear in linears)


class FusedLayer:
    """A decoder layer of `parts`, in bfloat16. `parts.has_whole_tiles` must hold."""

    def __init__(self, parts: LayerParts) -> None:
        assert parts.has_whole_tiles, "such a layer has no kernel"
        self._parts = parts
        after_attention, after_mlp = parts.post_attention_norm, parts.post_mlp_norm
        self._layer = _Layer(
            input_norm=parts.input_norm.address,
            query_key_value=parts.query_key_value.address,
            head_norm=parts.heads.address,
            attention_output=parts.attention_output.address,
            post_attention_norm=None if after_attention is None else after_attention.address,
            mlp_norm=parts.mlp_norm.address,
            gate_up=parts.gate_up.address,
            down=parts.down.address,
            post_mlp_norm=None if after_mlp is None else after_mlp.address,
        )
        self.address = ctypes.addressof(self._layer)


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A layer in its place. rotation: which of a step's rotations it uses. adapted: its GEMMs with adapters."""

    layer: FusedLayer
    attention: PagedAttention
    rotation: int
    adapted: AdaptedLayer | None = None


class FusedStack:
    """Adjacent layers, run in one call: between two of them is no Python, whose data the weights have flushed."""

    def __init__(self, layers: Sequence[StackedLayer]) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded"
        self._library = library
        self._held = tuple(layers)
        self._layers = (_StackedLayer * len(layers))(
            *(
                _StackedLayer(
                    each.layer.address,
                    each.attention.address,
                    each.rotation,
                    None if each.adapted is None else each.adapted.address,
                )
                for each in layers
            )
        )
        self._address = ctypes.addressof(self._layers)
        self._address_of_last = ctypes.addressof(self._layers[-1])

    def __call__(
        self,
        hidden: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        shape: StepShape,
        *,
        wanted: torch.Tensor | None = None,
        adapters: StackSegments | None = None,
    ) -> torch.Tensor:
        """The residual stream [T, hidden] after these layers, in place; with `wanted`, of these tokens alone.

        Args: rotations: cosines and sines with the first half negated, [T, 1, D] each, contiguous. wanted: int64 [R],
        ascending: the last layer does no more for other tokens than write their K and V. adapters: of all tokens and,
        after the last layer's attention, of the wanted ones.
        """
        packed = (_Rotation * len(rotations))(*(_Rotation(cos.data_ptr(), sin.data_ptr()) for cos, sin in rotations))
        operands = (ctypes.addressof(packed), hidden.data_ptr(), hidden.stride(0))
        segments = None if adapters is None else adapters.address
        run, count = self._library.decoder_layers, len(self._held)
        if wanted is None or len(wanted) == len(hidden):
            run(self._address, count, shape.address, *operands, segments)
            return hidden
        run(self._address, count - 1, shape.address, *operands, segments)
        last = shape.only(wanted)
        run(
            self._address_of_last,
            1,
            last.address,
            *operands,
            None if adapters is None else adapters.address_of_last,
        )
        return hidden[: len(wanted)]
