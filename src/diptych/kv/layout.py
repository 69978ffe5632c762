"""Where one rank keeps its KV: pure arithmetic over shapes, shared by the pool, its sizing and transfers.

Page-major: a pool is `[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`, so that one page is one
contiguous region over all layers, K and V, and a run of adjacent pages is one descriptor of a transfer. Where attention
is latent (MLA) one row a token and layer stands for K and V of all heads: the pool is `[num_pages, num_layers, 1,
page_size, 1, kv_lora_rank + rope_dim]`, and every rank of a tensor group holds the same bytes. Knows no device and no
page numbers. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.errors import ConfigError

ITEMSIZES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KEY = 0
VALUE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one rank's pages hold. Ids are global, so that two ranks' layouts can be compared.

    layers: layer ids on this rank (pipeline parallel). kv_heads: KV head ids on this rank (tensor parallel). page_size:
    tokens in a page. dtype: "float32", "bfloat16" or "float16". is_latent: a token's row is one vector of `head_dim` =
    kv_lora_rank + rope_dim elements instead of keys and values of heads; kv_heads is then range(1) on every rank.
    Raises ConfigError for an empty or unknown value.
    """

    layers: range
    kv_heads: range
    head_dim: int
    page_size: int
    dtype: str
    is_latent: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not supported; use one of {', '.join(ITEMSIZES)}")
        if self.layers.step != 1 or self.kv_heads.step != 1:
            raise ConfigError(f"a rank holds adjacent layers and heads, got {self.layers} and {self.kv_heads}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size) < 1:
            raise ConfigError(f"every size of a KV layout must be at least 1, got {self}")
        if self.is_latent and self.kv_heads != range(1):
            raise ConfigError(f"a latent layout has one row a token and no heads to deal out, got {self.kv_heads}")

    @classmethod
    def single_rank(
        cls,
        num_layers: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        page_size: int,
        dtype: str,
        is_latent: bool = False,
    ) -> KVLayout:
        """The layout of a rank that holds every layer and every KV head."""
        return cls(
            layers=range(num_layers),
            kv_heads=range(num_kv_heads),
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            is_latent=is_latent,
        )

    @property
    def num_layers(self) -> int:
        """Layers on this rank."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return len(self.kv_heads)

    @property
    def parts(self) -> tuple[int, ...]:
        """What a layer keeps of a token: KEY and VALUE, or the latent row alone, as KEY."""
        return (KEY,) if self.is_latent else (KEY, VALUE)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: layer, part, token, head, dim."""
        return (self.num_layers, len(self.parts), self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one token in one layer, K or V."""
        return self.head_dim * self.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token in one part of a layer: its heads lie side by side."""
        return self.num_kv_heads * self.head_nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token costs over all layers and parts; not contiguous."""
        return self.num_layers * len(self.parts) * self.row_nbytes

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page, contiguous."""
        return self.page_size * self.token_nbytes

    def offset(self, layer: int, kv: int, token: int, head: int) -> int:
        """Byte offset inside a page. layer, head: global ids; kv: one of `parts`; token: position in the page."""
        cell = (layer - self.layers.start) * len(self.parts) + kv
        row = cell * self.page_size + token
        return row * self.row_nbytes + (head - self.kv_heads.start) * self.head_nbytes


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Layers of a pipeline stage: as equal as can be, one more on the first ones, since the last computes logits.

    Raises ConfigError if a stage would have none.
    """
    if num_stages > num_layers:
        raise ConfigError(f"{num_layers} layers are too few for {num_stages} stages; lower pp_size to {num_layers}")
    count, rest = divmod(num_layers, num_stages)
    start = stage * count + min(stage, rest)
    return range(start, start + count + (stage < rest))
