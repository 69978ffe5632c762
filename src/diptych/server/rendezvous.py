"""The rendezvous fields of a request's body, spread over its sequences. Pure; `transfer.rooms` knows the rules.

A body says where to meet in SGLang's way (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`) or brings the ticket of
a prefill engine in vLLM's (`kv_transfer_params`), which names no room: decode drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.errors import RequestError
from diptych.server.schemas import RendezvousFields
from diptych.transfer.extension import MAX_ROOM
from diptych.transfer.rooms import Rendezvous, expand_rendezvous


def expand(fields: RendezvousFields, counts: Sequence[int]) -> list[Rendezvous | None]:
    """Where each sequence meets its prefill engine; None: nowhere.

    Lists may have an entry for each sequence, or for each prompt; then the sequences of a prompt get its room and those
    after it. Args: counts: sequences of each prompt. Raises: RequestError naming the field that is wrong.
    """
    host, port, room = fields.bootstrap_host, fields.bootstrap_port, fields.bootstrap_room
    if host is None and room is None and fields.kv_transfer_params is not None:
        ticket = fields.kv_transfer_params
        if ticket.do_remote_prefill:
            host, port = ticket.remote_host, ticket.remote_port
    _check("bootstrap_host", host, str)
    _check("bootstrap_port", port, int)
    _check("bootstrap_room", room, int)
    return expand_rendezvous(
        _spread(host, counts),
        _spread(port, counts),
        room=_spread(room, counts, counts_up=True),
        num_sequences=sum(counts),
    )


def _check(name: str, value: object, kind: type) -> None:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if item is not None and (not isinstance(item, kind) or isinstance(item, bool)):
            raise RequestError(f"{name} must be of type {kind.__name__}, got {item!r:.80}", name)


def _spread(value: Any, counts: Sequence[int], *, counts_up: bool = False) -> Any:
    """A list with one entry a prompt as one with an entry a sequence; anything else as it is."""
    if not isinstance(value, list) or len(value) != len(counts) or len(value) == sum(counts):
        return value
    if not counts_up:
        return [item for item, count in zip(value, counts, strict=True) for _ in range(count)]
    if not all(isinstance(item, int) and 0 <= item <= MAX_ROOM for item in value):
        return value  # and is refused for its length or for what it holds
    return [(item + index) & MAX_ROOM for item, count in zip(value, counts, strict=True) for index in range(count)]
