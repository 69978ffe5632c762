"""Which engine has probably seen which beginning of a prompt: a bounded, approximate picture of their prefix caches.

A prompt is cut into blocks of characters or token ids; a block's key hashes everything up to its end, so that a plain
dictionary does what a tree would. Knows nothing of engines but their names. Single-threaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import orjson

BLOCK_TOKENS = 64
CHARS_PER_TOKEN = 4  # of English text; an estimate is all that a router has
BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN
MAX_BLOCKS = 2048  # of one prompt; what lies beyond does not change the choice
MAX_ENTRIES = 1 << 17


def block_keys(texts: Sequence[str | Sequence[int]], salt: str = "") -> list[int]:
    """Keys of the whole blocks of a prompt made of `texts`; prompts under different salts have nothing in common."""
    keys: list[int] = []
    key = hash(salt)
    for block in _blocks(texts):
        key = hash((key, block))
        keys.append(key)
        if len(keys) == MAX_BLOCKS:
            break
    return keys


def _blocks(texts: Sequence[str | Sequence[int]]) -> Iterator[str | bytes]:
    """A conversation's blocks run on over its messages, so that a short message costs none."""
    rest = ""
    for text in texts:
        if not isinstance(text, str):
            for start in range(0, len(text) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
                yield orjson.dumps(text[start : start + BLOCK_TOKENS])  # hashes whatever a client put there
            continue
        whole = rest + text
        end = len(whole) - len(whole) % BLOCK_CHARS
        for start in range(0, end, BLOCK_CHARS):
            yield whole[start : start + BLOCK_CHARS]
        rest = whole[end:]


class PrefixIndex:
    """Block key -> engines that were sent it, the least recently used forgotten first.

    Args: max_entries: blocks remembered at most.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._engines: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """Engine -> how many of the blocks, from the first on without a gap, it was sent."""
        found: dict[str, int] = {}
        alive: set[str] | None = None
        for index, key in enumerate(keys, start=1):
            engines = self._engines.get(key)
            alive = set() if engines is None else engines if alive is None else alive & engines
            if not alive:
                break
            found.update(dict.fromkeys(alive, index))
        return found

    def record(self, keys: Sequence[int], engine: str) -> None:
        """`engine` was sent a prompt with these blocks."""
        for key in reversed(keys):  # the first block ends up as the most recent: it must outlive those behind it
            self._engines.setdefault(key, set()).add(engine)
            self._engines.move_to_end(key)
        while len(self._engines) > self._max_entries:
            self._engines.popitem(last=False)

    def forget(self, engine: str) -> None:
        """`engine` has lost its cache, or is gone."""
        for key in [key for key, engines in self._engines.items() if engine in engines]:
            self._engines[key].discard(engine)
            if not self._engines[key]:
                del self._engines[key]

    def clear(self) -> None:
        """All caches were emptied."""
        self._engines.clear()
