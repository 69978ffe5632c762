"""Rows of a packed weight, to be read and written as if it were still a matrix. Knows nothing of names or files."""

from __future__ import annotations

import torch

from diptych.kernels.linear import LinearKernel


class PackedRows:
    """Outputs start:stop of a packed layer's weight, [stop - start, I], in place: like a view of the matrix.

    Values read are bfloat16, as the kernels compute with them; a quantised weight rounds what is written.
    """

    is_meta = False

    def __init__(self, linear: LinearKernel, start: int, stop: int) -> None:
        self._linear = linear
        self._start, self._stop = start, stop

    @property
    def shape(self) -> tuple[int, int]:
        return (self._stop - self._start, self._linear.in_features)

    @property
    def memory(self) -> torch.Tensor:
        """What holds the whole packed weight."""
        return self._linear.weight

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def __len__(self) -> int:
        return self._stop - self._start

    def numel(self) -> int:
        return len(self) * self._linear.in_features

    def __getitem__(self, rows: slice) -> PackedRows:
        start, stop, _ = rows.indices(len(self))
        return PackedRows(self._linear, self._start + start, self._start + max(start, stop))

    def copy_(self, values: torch.Tensor) -> PackedRows:
        """Write values [rows, I] of any dtype. Raises Unsupported where the weight is kept in a file's own blocks."""
        self._linear.write_rows(self._start, values)
        return self

    def add_(self, offset: float) -> PackedRows:
        """Add a number to every value."""
        return self.copy_(self.to_tensor().add_(offset))

    def to_tensor(self) -> torch.Tensor:
        """A copy, bfloat16 [rows, I]."""
        return self._linear.read_rows(self._start, self._stop)
