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

from diptych.errors import Unsupported
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
        ("addend", ctypes.c_void_p),
        ("addend_stride", ctypes.c_int64),
        ("block_step", ctypes.c_int64),
    )


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight has a kernel here: bfloat16, on the CPU, with the library loaded."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and kernels() is not None


class LinearKernel:
    """`x @ weight.T + bias` for bfloat16 x [T, I], whatever form the weight is kept in.

    Args: weight: the memory that holds it. layer: the same for the library, without an epilogue; what it points to
    must live as long as this object. bias: in the order of `block_bias`. in_features: I, which the layer's own may
    exceed. gated: the weight's first half is gate, the second up, and the result is activation(gate) * up.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        layer: LayerStructure,
        *,
        bias: torch.Tensor | None,
        in_features: int,
        gated: Activation | None,
    ) -> None:
        library = kernels()
        assert library is not None, "the kernel library is not loaded; ask can_pack first"
        self._library = library
        self.weight = weight
        self.bias = bias
        self.is_gated = gated is not None
        self.out_features: int = layer.out_features
        self.in_features = in_features
        self.padded_inputs: int = layer.in_features
        self.num_outputs: int = layer.num_outputs
        self._layer, self._logits_layer = layer, LayerStructure.from_buffer_copy(layer)
        self._layer.epilogue = _BFLOAT16 if gated is None else _GATED[gated]
        self._logits_layer.epilogue = _FLOAT32
        self._argmax_layer = LayerStructure.from_buffer_copy(layer)
        self._argmax_layer.epilogue = _ARGMAX
        self.address, self._logits_address = ctypes.addressof(self._layer), ctypes.addressof(self._logits_layer)

    def __call__(self, x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        """bfloat16 [T, O], or [T, O / 2] when gated.

        Args: addend: bfloat16 [T, out_features], contiguous, in packed order: added to the sums before all else.
        """
        x = self.padded(x)
        out = empty_rows(x.shape[0], self.num_outputs, torch.bfloat16)
        layer = self._layer
        if addend is not None:
            layer = LayerStructure.from_buffer_copy(layer)
            layer.addend, layer.addend_stride = addend.data_ptr(), addend.stride(0)
        self._library.linear(
            ctypes.addressof(layer), x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), out.stride(0)
        )
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, O], of values rounded to bfloat16."""
        x = self.padded(x)
        out = empty((x.shape[0], self.num_outputs), torch.float32)
        self._library.linear(self._logits_address, x.data_ptr(), out.data_ptr(), x.shape[0], x.stride(0), out.stride(0))
        return out

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest index of each row's largest logit, int64 [T], and that logit, float32 [T]. NaN is the largest."""
        x = self.padded(x)
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
        return self._rows_of(self.address, token_ids, scale)

    def _rows_of(self, address: int, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
        """`rows` of the layer at `address`."""
        rows = rows.contiguous()
        num_rows, size = rows.shape[0], self.in_features
        out = empty((num_rows, size), torch.bfloat16)
        self._library.embed_packed(
            out.data_ptr(), rows.data_ptr(), address, num_rows, size, size, scale or 0.0, scale is not None
        )
        return out

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Outputs start:stop of the weight as it was before it was packed, bfloat16 [stop - start, I], copied."""
        return self.rows(self._packed_order(torch.arange(start, stop)), None)

    def write_rows(self, start: int, values: torch.Tensor) -> None:
        """Replace outputs from `start` on, [rows, I], where they lie. Raises Unsupported if this form cannot be."""
        raise Unsupported(
            "weights that are computed in a GGUF file's own blocks cannot be replaced one by one; load the model from "
            "a Hugging Face folder, or with --quantization none"
        )

    def set_bias(self, bias: torch.Tensor) -> None:
        """Replace the bias, [O]; only of a layer that has one."""
        assert self.bias is not None, "a layer without a bias cannot be given one"
        self.bias.copy_(block_bias(bias, is_interleaved=self.is_gated))

    def _packed_order(self, outputs: torch.Tensor) -> torch.Tensor:
        """Where these outputs lie, int64, counted in packed outputs."""
        return outputs

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """x as the kernel reads it: rows of `padded_inputs` adjacent elements."""
        if x.shape[1] != self.padded_inputs:
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
        self._out_features = out_features
        blocks = None if bias is None else block_bias(bias, is_interleaved=gated is not None)
        layer = LayerStructure(
            weight=packed.data_ptr(),
            bias=None if blocks is None else blocks.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            out_features=packed.shape[0] * BLOCK_OUTPUTS,
            in_features=padded_inputs,
            num_outputs=out_features if gated is None else out_features // 2,
        )
        super().__init__(packed, layer, bias=blocks, in_features=in_features, gated=gated)

    def write_rows(self, start: int, values: torch.Tensor) -> None:
        """Replace outputs from `start` on, in place; an 8-bit weight rounds them and takes their scales."""
        order = self._packed_order(torch.arange(start, start + len(values)))
        for begin in range(0, len(values), _ROWS_QUANTIZED_AT_ONCE):
            part = slice(begin, begin + _ROWS_QUANTIZED_AT_ONCE)
            self._write(order[part], values[part])

    def _write(self, order: torch.Tensor, values: torch.Tensor) -> None:
        """Rows to packed outputs `order`: whole blocks where there are any, the others one by one, which is slower."""
        head = min(int(-order[0] % BLOCK_OUTPUTS), len(order))
        tail = head + (len(order) - head) // BLOCK_OUTPUTS * BLOCK_OUTPUTS
        blocks = order[head:tail].view(-1, BLOCK_OUTPUTS)
        if (
            not (blocks[:, 0] % BLOCK_OUTPUTS == 0).all()
            or not (blocks[:, -1] - blocks[:, 0] == BLOCK_OUTPUTS - 1).all()
        ):
            head = tail = len(order)
        if head < tail:
            self._write_blocks(order[head:tail:BLOCK_OUTPUTS] // BLOCK_OUTPUTS, values[head:tail])
        for some in (slice(0, head), slice(tail, len(order))):
            if some.start < some.stop:
                self._write_outputs(order[some], values[some])

    def _write_blocks(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        if self.scales is None:
            pairs = self._padded(values.to(torch.bfloat16)).view(torch.int32)
            ordered = pairs.view(len(blocks), BLOCK_OUTPUTS, -1).transpose(1, 2)
            self.weight.view(torch.int32).squeeze(-1)[blocks] = ordered
            return
        integers, scale = _rounded(values.to(torch.bfloat16).float())  # as a weight that is packed has been rounded
        self.weight[blocks] = _in_blocks(self._padded(integers).to(torch.int8))
        self.scales.view(-1, BLOCK_OUTPUTS)[blocks] = scale.view(-1, BLOCK_OUTPUTS)

    def _write_outputs(self, order: torch.Tensor, values: torch.Tensor) -> None:
        block, row = order // BLOCK_OUTPUTS, order % BLOCK_OUTPUTS
        if self.scales is None:
            pairs = self._padded(values.to(torch.bfloat16)).view(torch.int32)
            self.weight.view(torch.int32).squeeze(-1)[block, :, row] = pairs
            return
        integers, scale = _rounded(values.to(torch.bfloat16).float())
        quads = self._padded(integers).to(torch.int8).view(len(values), -1, 2, 2)
        # [blocks, inputs / 4, four outputs, pair, output, input]: of one output, [inputs / 4, pair, input].
        self.weight[block, :, row // 4, :, row % 4] = quads
        self.scales[order] = scale

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows, (0, self.padded_inputs - self.in_features)).contiguous()

    def _packed_order(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return outputs
        half = self._out_features // 2
        part, output = outputs // half, outputs % half
        return (output // BLOCK_OUTPUTS * 2 + part) * BLOCK_OUTPUTS + output % BLOCK_OUTPUTS


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight of whole blocks, bfloat16 [O, I], reordered where it lies: [O / 16, I / 2, 16, 2]."""
    return _pack(weight, weight.shape[1], is_interleaved=False)


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
            rows, scale = _rounded(rows)
            blocks = slice(start // BLOCK_OUTPUTS, start // BLOCK_OUTPUTS + rows.shape[0] // BLOCK_OUTPUTS)
            packed[blocks, index] = _in_blocks(rows).to(torch.int8)
            scales[blocks, index] = scale.view(-1, BLOCK_OUTPUTS)
    return packed.flatten(0, 1), scales.view(-1)


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Whole blocks of rows, [16 * blocks, padded inputs], in the order in which bytes are packed."""
    return rows.view(-1, 4, 4, rows.shape[1] // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [rows, I] as whole numbers between -127 and 127, in place, and the scale of each row."""
    scale = rows.abs().amax(dim=1).div_(127.0)
    return rows.div_(scale.clamp(min=1e-30).unsqueeze(1)).round_(), scale


def block_bias(bias: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """float32, in the order of the packed outputs, zeros where these are padded."""
    parts = bias.float().chunk(2) if is_interleaved else (bias.float(),)
    blocks = [F.pad(part, (0, -len(part) % BLOCK_OUTPUTS)).view(-1, BLOCK_OUTPUTS) for part in parts]
    return torch.stack(blocks, dim=1).reshape(-1).contiguous()
