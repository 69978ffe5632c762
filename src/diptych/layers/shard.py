"""How a layer's dimensions are dealt to the ranks of a group: heads, inner sizes and vocabulary.

Pure arithmetic over sizes; knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.errors import ConfigError
from diptych.parallel.groups import GroupCoordinator


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of a dimension of `size` elements: start:stop."""

    start: int
    stop: int
    size: int

    @classmethod
    def whole(cls, size: int) -> Share:
        """All of it."""
        return cls(0, size, size)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to other ranks."""
        return len(self) == self.size

    def times(self, count: int) -> Share:
        """The same where each element stands for `count` adjacent ones: heads, and their dimensions."""
        return Share(self.start * count, self.stop * count, self.size * count)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of a tensor: a share of its dimension `dim`."""

    share: Share
    dim: int = 0


def even_share(size: int, group: GroupCoordinator, what: str) -> Share:
    """An equal part for every rank. Raises ConfigError, naming `what`, if they cannot share it evenly."""
    if size % group.size:
        raise ConfigError(
            f"{group.size} ranks cannot share {size} {what} evenly; use a tp_size that divides {what} "
            f"(1, or another divisor of {size})"
        )
    count = size // group.size
    return Share(group.rank * count, (group.rank + 1) * count, size)


def kv_head_share(num_kv_heads: int, group: GroupCoordinator) -> Share:
    """KV heads of a rank: an equal part, or, with more ranks than heads, one head that several ranks hold alike.

    Raises ConfigError if neither comes out even.
    """
    if group.size <= num_kv_heads:
        return even_share(num_kv_heads, group, "KV heads")
    if group.size % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot be dealt to {group.size} ranks, each of which holds one; use a tp_size "
            f"that is a divisor or a multiple of {num_kv_heads}"
        )
    head = group.rank * num_kv_heads // group.size
    return Share(head, head + 1, num_kv_heads)


def vocabulary_share(vocab_size: int, group: GroupCoordinator) -> Share:
    """Rows of the vocabulary: as many on every rank but the last, which may have fewer.

    Raises ConfigError if a rank would have none.
    """
    count = -(-vocab_size // group.size)
    start = group.rank * count
    if start >= vocab_size:
        raise ConfigError(f"a vocabulary of {vocab_size} is too small for {group.size} ranks; lower tp_size")
    return Share(start, min(start + count, vocab_size), vocab_size)
