"""The tensor that holds every page of a rank, and its views by layer. Device side; knows nothing of who owns a page.

    [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]
    [num_pages, num_layers, 1, page_size, 1, kv_lora_rank + rope_dim]    where attention is latent (MLA)

T = tokens in a step, G = KV heads, D = head_dim.
"""

from __future__ import annotations

import mmap

import torch

from diptych.errors import ConfigError
from diptych.kv.layout import KEY, KVLayout

HUGE_PAGES_FROM_NBYTES = 1 << 26


class KVPool:
    """`num_pages` pages of `layout`, zero at first: attention multiplies what is undefined by 0, so it must not be NaN.

    On a CPU memory is taken page by page as it is first written, and begins at a memory page's border. tensor: a view
    of another pool's memory to be used instead, pages with any stride.
    Raises ConfigError if `dtype` is not the layout's.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tensor: torch.Tensor | None = None,
    ) -> None:
        if str(dtype) != f"torch.{layout.dtype}":
            raise ConfigError(f"the KV pool was asked for in {dtype}, its layout says {layout.dtype}; use one of them")
        if num_pages < 1:
            raise ConfigError(f"a KV pool needs at least one page, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, *layout.page_shape)
        if tensor is not None:
            self.tensor = tensor
        elif device.type == "cpu":
            self.tensor = _zeros_untouched(num_pages * layout.page_nbytes).view(dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        last = layout.parts[-1]
        self._layers = [(self.tensor[:, index, KEY], self.tensor[:, index, last]) for index in range(layout.num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.layout.page_nbytes

    @property
    def data_ptr(self) -> int:
        """Address of page 0; page p is at `data_ptr + p * layout.page_nbytes`."""
        return self.tensor.data_ptr()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer (its global id), views [num_pages, page_size, G, D], contiguous within a page only.

        Both are the same view where the layout is latent: the values are the first elements of the keys.
        """
        return self._layers[index - self.layout.layers.start]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, kv_slots: torch.Tensor) -> None:
        """Store one layer's K and V, [T, G, D]. kv_slots: int64 [T], page * page_size + offset, all different.

        A latent layout keeps the keys alone; `value` is then not looked at.

        Two indices into the strided view: on a CPU as fast as one index into a flat view, or faster (14 against 17 us
        for 32 tokens), which would first have to be computed.
        """
        key_view, value_view = self.layer(layer)
        pages = kv_slots // self.layout.page_size
        offsets = kv_slots % self.layout.page_size
        key_view[pages, offsets] = key
        if not self.layout.is_latent:
            value_view[pages, offsets] = value


def _zeros_untouched(nbytes: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], whose memory is not taken before it is written; torch.zeros writes all of it at once."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGES_FROM_NBYTES and "MADV_HUGEPAGE" in vars(mmap):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a tenth off decode attention: a page's layers lie 16 KiB apart
    return torch.frombuffer(memory, dtype=torch.uint8)
