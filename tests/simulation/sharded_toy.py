"""The toy worker over ranks: every (layer, KV head) keeps every token, each in the memory of whoever holds it."""

from __future__ import annotations

import numpy as np

from diptych.engine.toy import ToyWorker
from diptych.kv.layout import KVLayout
from diptych.transfer.plan import shards

NUM_LAYERS = 3
NUM_KV_HEADS = 2


class ShardedToyWorker(ToyWorker):
    """One for all ranks of an engine. memories: int32, one a rank, `[num_pages, *layout.page_shape]`.

    A key is the token id, the layer and the head in one number, a value the position: a piece that comes from another
    layer, head or place spoils the output.
    """

    def __init__(self, num_pages: int, page_size: int, *, vocab_size: int, tp_size: int, pp_size: int) -> None:
        super().__init__(num_pages, page_size, vocab_size=vocab_size)
        full = KVLayout.single_rank(NUM_LAYERS, NUM_KV_HEADS, head_dim=1, page_size=page_size, dtype="float32")
        self.layouts = shards(full, tp_size=tp_size, pp_size=pp_size)
        self.memories = [np.full((num_pages, *layout.page_shape), -1, dtype=np.int32) for layout in self.layouts]

    def store(self, pages: list[int], start: int, token_ids: list[int]) -> None:
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            marks = _marks(layout)
            for position, token_id in enumerate(token_ids, start):
                page, offset = pages[position // self.page_size], position % self.page_size
                memory[page, :, 0, offset, :, 0] = token_id * 64 + marks
                memory[page, :, 1, offset, :, 0] = position

    def load(self, pages: list[int], num_tokens: int) -> list[int]:
        seen = np.zeros(0, dtype=np.int64)
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            # [pages, layer, part, token, head] -> [part, layer, head, pages * token]
            taken = memory[pages][..., 0].transpose(2, 1, 4, 0, 3)
            keys, values = taken.reshape(2, layout.num_layers, layout.num_kv_heads, -1)[..., :num_tokens]
            keys = keys - _marks(layout)[..., None]
            is_right = (values == np.arange(num_tokens)) & (keys % 64 == 0)
            tokens = np.where(is_right, keys // 64, -1).reshape(-1, num_tokens)
            if not len(seen):
                seen = tokens[0]
            seen = np.where((tokens == seen).all(axis=0), seen, -1)
        found: list[int] = seen.tolist()
        return found


def _marks(layout: KVLayout) -> np.ndarray:
    """Of each layer and head, [layers, heads]."""
    return np.array([[layer * 8 + head for head in layout.kv_heads] for layer in layout.layers])
