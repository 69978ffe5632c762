"""bfloat16 linear layers over weights packed once: plain, gated, to float32 logits, and as an embedding.

A weight is packed where it lies when its shape is whole blocks (16 outputs, 32 inputs): it never exists twice. Sums are
float32, rounded once; a row's result is the same bits whatever rows are beside it.

T = tokens, I = in features, O = out features.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
import torch.nn.functional as F

from diptych.kernels.library import kernels
from diptych.kernels.memory import empty, empty_rows, empty_weight

BLOCK_OUTPUTS = 16
TILE_INPUTS = 32

_BFLOAT16, _FLOAT32, _ARGMAX = 0, 1, 4
_GATED = {"gelu_tanh": 2, "silu": 3}

_ROWS_QUANTIZED_AT_ONCE = 1024

Activation = Literal["gelu_tanh", "silu"]
Quantization = Literal["none", "int8", "gguf"]


class LayerStructure(ctypes.Structure):
    """PackedLinear of csrc/abi.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("epilogue", ctypes.c_int32),
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
    )


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight has a kernel here: bfloat16, on the CPU, with the library loaded."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and kernels() is not None


class LinearKernel:
    """`x @ weight.T + bias` for bfloat16 x [T, I], whatever form the weight is kept in.

    Args: weight: the memory that holds it. layer: the same for the library, without an epilogue; what it points to
    must live as long as this object. in_features: I, which the layer's own may exceed. gated: the weight's first half
    is gate, the second up, and the result is activation(gate) * up.
    """

    def __init__(
        self, weight: torch.Tensor, layer: LayerStructure, *, in_features: int, gated: Activation | None
    ) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded; ask can_pack first"
        self._library = library
        self.weight = weight
        self.in_features = in_features
        self.padded_inputs: int = layer.in_features
        self.num_outputs: int = layer.num_outputs
        self._layer, self._logits_layer = layer, LayerStructure.from_buffer_copy(layer)
        self._layer.epilogue = _BFLOAT16 if gated is None else _GATED[gated]
        self._logits_layer.epilogue = _FLOAT32
        self._argmax_layer = LayerStructure.from_buffer_copy(layer)
        self._argmax_layer.epilogue = _ARGMAX
        self.address, self._logits_address = ctypes.addressof(self._layer), ctypes.addressof(self._logits_layer)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, O], or [T, O / 2] when gated."""
        x = self._rows(x)
        out = empty_rows(x.shape[0], self.num_outputs, torch.bfloat16)
        self._library.linear(self.address, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), out.stride(0))
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, O], of values rounded to bfloat16."""
        x = self._rows(x)
        out = empty((x.shape[0], self.num_outputs), torch.float32)
        self._library.linear(self._logits_address, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), out.stride(0))
        return out

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest index of each row's largest logit, int64 [T], and that logit, float32 [T]. NaN is the largest."""
        x = self._rows(x)
        indices, values = torch.empty(x.shape[0], dtype=torch.int64), torch.empty(x.shape[0])
        self._library.linear_argmax(
            ctypes.addressof(self._argmax_layer),
            x.data_ptr(),
            indices.data_ptr(),
            values.data_ptr(),
            x.shape[0],
            x.stride(0),
        )
        return indices, values

    def rows(self, token_ids: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Rows of the weight, [T, I], times `scale`: the layer as an embedding. token_ids: int64 [T]."""
        token_ids = token_ids.contiguous()
        num_tokens, size = token_ids.shape[0], self.in_features
        out = empty((num_tokens, size), torch.bfloat16)
        self._library.embed_packed(
            out.data_ptr(), token_ids.data_ptr(), self.address, num_tokens, size, size, scale or 0.0, scale is not None
        )
        return out

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_features != self.padded_inputs:
            return F.pad(x, (0, self.padded_inputs - self.in_features))
        return x if x.stride(1) == 1 else x.contiguous()


class PackedLinear(LinearKernel):
    """`x @ weight.T + bias` for bfloat16 x [T, I].

    Args: weight: bfloat16 [O, I], contiguous, reordered in place if it is whole blocks and stays bfloat16. bias:
    bfloat16 [O]. gated: the weight's first half is gate, the second up, and the result is activation(gate) * up.
    quantization: "int8" rounds the weight to 8 bits, one scale an output; x stays as it is.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gated: Activation | None = None,
        quantization: Quantization = "none",
    ) -> None:
        out_features, in_features = weight.shape
        padded_inputs = -(-in_features // TILE_INPUTS) * TILE_INPUTS
        self.scales: torch.Tensor | None = None
        if quantization == "int8":
            packed, self.scales = _quantize(weight, padded_inputs, is_interleaved=gated is not None)
        else:
            packed = _pack(weight, padded_inputs, is_interleaved=gated is not None)
        self.bias = None if bias is None else block_bias(bias, is_interleaved=gated is not None)
        layer = LayerStructure(
            weight=packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            out_features=packed.shape[0] * BLOCK_OUTPUTS,
            in_features=padded_inputs,
            num_outputs=out_features if gated is None else out_features // 2,
        )
        super().__init__(packed, layer, in_features=in_features, gated=gated)


def _pack(weight: torch.Tensor, padded_inputs: int, *, is_interleaved: bool) -> torch.Tensor:
    """The weight as [blocks, inputs / 2, 16, 2]; of gate and up, blocks alternate."""
    library = kernels()
    assert library is not None, "the kernel library is not loaded; ask can_pack first"
    parts = weight.chunk(2) if is_interleaved else (weight,)
    num_blocks = -(-parts[0].shape[0] // BLOCK_OUTPUTS) * len(parts)
    shape = (num_blocks, padded_inputs // 2, BLOCK_OUTPUTS, 2)
    is_whole = weight.numel() == num_blocks * padded_inputs * BLOCK_OUTPUTS
    assert weight.is_contiguous(), "a weight is packed from adjacent rows"
    packed = weight if is_whole and not is_interleaved else empty_weight(shape, weight.dtype)
    block_nbytes = padded_inputs * BLOCK_OUTPUTS * weight.itemsize
    for index, part in enumerate(parts):
        target = packed.data_ptr() + index * block_nbytes
        library.pack(target, part.data_ptr(), part.shape[0], part.shape[1], padded_inputs, len(parts))
    if is_whole and is_interleaved:
        packed = weight.copy_(packed.view(weight.shape))
    return packed.view(shape)


def _quantize(weight: torch.Tensor, padded_inputs: int, *, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight as signed bytes, [blocks, inputs / 4, 4, 2, 4, 2], and the outputs' scales, float32 [blocks * 16].

    The order within a block, from outside: four inputs, four outputs, pair of inputs, output, input (csrc/weights.h).
    """
    parts = weight.chunk(2) if is_interleaved else (weight,)
    num_blocks = -(-parts[0].shape[0] // BLOCK_OUTPUTS)
    packed = empty_weight((num_blocks, len(parts), padded_inputs // 4, 4, 2, 4, 2), torch.int8)
    scales = torch.zeros(num_blocks, len(parts), BLOCK_OUTPUTS)
    for index, part in enumerate(parts):
        for start in range(0, part.shape[0], _ROWS_QUANTIZED_AT_ONCE):
            rows = part[start : start + _ROWS_QUANTIZED_AT_ONCE].float()
            rows = F.pad(rows, (0, padded_inputs - rows.shape[1], 0, -rows.shape[0] % BLOCK_OUTPUTS))
            scale = rows.abs().amax(dim=1).div_(127.0)
            rows.div_(scale.clamp(min=1e-30).unsqueeze(1)).round_()
            blocks = slice(start // BLOCK_OUTPUTS, start // BLOCK_OUTPUTS + rows.shape[0] // BLOCK_OUTPUTS)
            packed[blocks, index] = (
                rows.view(-1, 4, 4, padded_inputs // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).to(torch.int8)
            )
            scales[blocks, index] = scale.view(-1, BLOCK_OUTPUTS)
    return packed.flatten(0, 1), scales.view(-1)


def block_bias(bias: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """float32, in the order of the packed outputs, zeros where these are padded."""
    parts = bias.float().chunk(2) if is_interleaved else (bias.float(),)
    blocks = [F.pad(part, (0, -len(part) % BLOCK_OUTPUTS)).view(-1, BLOCK_OUTPUTS) for part in parts]
    return torch.stack(blocks, dim=1).reshape(-1).contiguous()
