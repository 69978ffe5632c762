"""A step of paged attention with known numbers, and what it must give: the yardstick of every attention backend.

The expectation is a dense float32 computation, query by query, that knows nothing of pages.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import torch

from diptych.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool

LAYERS = 3
LAYER = 1


@dataclass(frozen=True)
class Shape:
    """One problem. rows: (tokens in this step, tokens with this step's) of every sequence. filler: what the pool holds
    where no token is; a backend that multiplies it by 0 cannot take NaN. value_dim: of latent rows (MLA), whose first
    elements are the values.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    filler: float = float("nan")
    value_dim: int | None = None


class Problem:
    """Random tokens of a shape, in a pool whose every other place holds the filler: reading NaN would show."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype).to(shape.device)

        self.keys = [random(kv_len, shape.num_kv_heads, shape.head_dim) for _, kv_len in shape.rows]
        if shape.value_dim is None:
            self.values = [random(kv_len, shape.num_kv_heads, shape.head_dim) for _, kv_len in shape.rows]
        else:
            self.values = [keys[..., : shape.value_dim] for keys in self.keys]
        self.query = random(sum(query_len for query_len, _ in shape.rows), shape.num_heads, shape.head_dim)
        num_pages = [-(-kv_len // shape.page_size) for _, kv_len in shape.rows]
        order = torch.randperm(sum(num_pages) + 3, generator=generator).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in num_pages]
        self.pool = self._filled_pool(sum(num_pages) + 3)
        self.inputs = self._inputs()
        self.spec = AttentionSpec(
            layer=LAYER,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            value_dim=shape.value_dim,
        )

    def slot(self, row: int, position: int) -> int:
        return self.pages[row][position // self.shape.page_size] * self.shape.page_size + (
            position % self.shape.page_size
        )

    def _filled_pool(self, num_pages: int) -> KVPool:
        shape = self.shape
        layout = KVLayout.single_rank(
            LAYERS,
            shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            dtype=str(shape.dtype).removeprefix("torch."),
            is_latent=shape.value_dim is not None,
        )
        pool = KVPool(layout, num_pages, torch.device(shape.device), shape.dtype)
        pool.tensor.fill_(shape.filler)
        for row, (query_len, kv_len) in enumerate(shape.rows):
            slots = torch.tensor(
                [self.slot(row, position) for position in range(kv_len - query_len)],
                dtype=torch.int64,
                device=shape.device,
            )
            cached = kv_len - query_len
            pool.write(LAYER, self.keys[row][:cached], self.values[row][:cached], slots)
        return pool

    def decode_step(self) -> Problem:
        """The same sequences in the same pool, a step in which only the last token of each is computed (again)."""
        step = copy.copy(self)
        step.shape = replace(self.shape, rows=tuple((1, kv_len) for _, kv_len in self.shape.rows))
        step.query = self.query[: len(step.shape.rows)] * 0.5
        step.inputs = step._inputs()
        return step

    def _inputs(self) -> AttentionInputs:
        max_pages = max(map(len, self.pages))
        query_lens = [query_len for query_len, _ in self.shape.rows]
        kv_lens = [kv_len for _, kv_len in self.shape.rows]
        undefined = 2**31 - 1
        table = [pages + [undefined] * (max_pages - len(pages)) for pages in self.pages]
        slots = [
            self.slot(row, position)
            for row, (query_len, kv_len) in enumerate(self.shape.rows)
            for position in range(kv_len - query_len, kv_len)
        ]

        def on_device(numbers: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(numbers, dtype=dtype, device=self.shape.device)

        return AttentionInputs(
            query_starts=on_device([0, *itertools.accumulate(query_lens)]),
            kv_lens=on_device(kv_lens),
            page_table=on_device(table),
            kv_slots=on_device(slots, torch.int64),
            query_lens_host=query_lens,
            kv_lens_host=kv_lens,
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """The backend's output; K and V are strided, as slices of a fused projection are."""
        new = [slice(kv_len - query_len, kv_len) for query_len, kv_len in self.shape.rows]
        key = torch.cat([keys[part] for keys, part in zip(self.keys, new, strict=True)])
        if self.shape.value_dim is not None:
            return backend.forward(self.query, key, key[..., : self.shape.value_dim], self.inputs, self.spec)
        value = torch.cat([values[part] for values, part in zip(self.values, new, strict=True)])
        fused = torch.cat((self.query, key, value), dim=1)
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        return backend.forward(*fused.split((heads, kv_heads, kv_heads), dim=1), self.inputs, self.spec)

    def expected(self) -> torch.Tensor:
        """Float32, one query and one head at a time."""
        outputs = []
        queries = iter(self.query.float())
        for row, (query_len, kv_len) in enumerate(self.shape.rows):
            for position in range(kv_len - query_len, kv_len):
                first = 0 if self.shape.window is None else max(0, position - self.shape.window + 1)
                outputs.append(self._attend(next(queries), row, slice(first, position + 1)))
        return torch.stack(outputs)

    def _attend(self, query: torch.Tensor, row: int, seen: slice) -> torch.Tensor:
        heads = []
        for head in range(self.shape.num_heads):
            kv_head = head * self.shape.num_kv_heads // self.shape.num_heads
            scores = self.keys[row][seen, kv_head].float() @ query[head] * self.spec.scale
            if self.shape.soft_cap is not None:
                scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
            heads.append(torch.softmax(scores, 0) @ self.values[row][seen, kv_head].float())
        return torch.stack(heads)
