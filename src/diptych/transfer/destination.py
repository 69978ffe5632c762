"""What a prefill engine makes of whoever registers: where its memory is, and whether what it asks for can be done.

A destination is a whole decode engine of ours, or one rank of a base peer. Owns the checks between what peers say and
what `plan` and `handoff` take for granted: whatever passes here raises no InvariantError there. Knows no sockets and no
rooms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.core.request import Request
from diptych.errors import PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.backend import HOST, MemoryKind, MemorySpace
from diptych.transfer.extension import OtherVersion, PeerExtension, RankFields, RoomExtension, mismatches
from diptych.transfer.handoff import NUM_BUFFERS, HandoffLayout
from diptych.transfer.plan import PageOrder, PageTemplate, page_template
from diptych.transfer.ranks import HANDOFF_RANK, Ranks, streams
from diptych.transfer.wire import Registration, TransferInfo


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """What one of our ranks writes to one of theirs. rank: ours. agent: theirs. template: what of our pages goes there.

    kv_addresses: of their pool, in kv_space.
    """

    rank: int
    agent: str
    template: PageTemplate
    kv_addresses: tuple[int, ...]
    kv_space: MemorySpace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Destination:
    """A decode engine of ours, or a rank of a base peer, as our ranks write to it.

    streams: by our and their data-parallel group. agents: their metadata by name. handoff_agent: gets the handoff row.
    num_pages: of its pools, None from a base peer. aux_row_nbytes: of its handoff rows. instance_id: empty for a base
    peer. tp_rank: ours, that a base peer addresses.
    """

    streams: dict[tuple[int, int], tuple[Stream, ...]]
    agents: dict[str, bytes]
    handoff_agent: str
    aux_addresses: tuple[int, ...]
    aux_row_nbytes: tuple[int, ...]
    page_size: int
    num_pages: int | None
    instance_id: str
    tp_rank: int = 0

    @property
    def is_base(self) -> bool:
        """Whether it speaks the base format alone."""
        return not self.instance_id

    @property
    def pairs(self) -> set[tuple[int, str]]:
        """(rank of ours, agent of theirs) that must have met."""
        writing = {(stream.rank, stream.agent) for found in self.streams.values() for stream in found}
        return writing | {(HANDOFF_RANK, self.handoff_agent)}

    def streams_of(self, info: TransferInfo, src_group: int) -> tuple[Stream, ...]:
        """What is to be written for a room that our group `src_group` computes; empty if `info` names no group."""
        extension = info.extension
        group = extension.dp_group if isinstance(extension, RoomExtension) else 0
        return self.streams.get((src_group, group), ())

    def num_cached_tokens(self, info: TransferInfo) -> int:
        """Tokens whose pages `info` leaves out, because the destination holds them."""
        return info.extension.num_cached_tokens if isinstance(info.extension, RoomExtension) else 0

    def problem(self, info: TransferInfo, num_prompt_tokens: int, *, src_group: int = 0) -> str | None:
        """Why `info` cannot be served for a prompt of so many tokens; None if it can.

        A base peer may name more pages than needed, ours names exactly those after its cached tokens.
        """
        extension = info.extension
        if isinstance(extension, OtherVersion):
            return extension.message
        if (extension is None) != self.is_base:
            return f"room {info.room}: the extension of the transfer info and of the registration do not go together"
        if extension is not None and extension.instance_id != self.instance_id:
            return f"room {info.room}: instance {extension.instance_id} asks, {self.instance_id} has registered"
        if info.is_dummy:
            return None
        if not self.streams_of(info, src_group):
            return f"room {info.room}: it is of data-parallel group {src_group} here, and of none that asks for it"
        return self._problem_with_pages(info, num_prompt_tokens)

    def _problem_with_pages(self, info: TransferInfo, num_prompt_tokens: int) -> str | None:
        page_size, cached = self.page_size, self.num_cached_tokens(info)
        if cached % page_size or cached >= num_prompt_tokens:
            return f"room {info.room}: {cached} cached tokens of {num_prompt_tokens}, in pages of {page_size}"
        needed, named = -(-(num_prompt_tokens - cached) // page_size), len(info.dst_pages)
        if named < needed or (named > needed and not self.is_base):
            return f"room {info.room}: {needed} pages of {page_size} tokens are needed, {named} were named"
        highest = int(info.dst_pages.max())
        if self.num_pages is not None and highest >= self.num_pages:
            return f"room {info.room}: page {highest} was named, the pool has {self.num_pages}"
        return None


def adapter_problem(info: TransferInfo, request: Request) -> str | None:
    """Why the KV of `request` is not what `info` asks for, as far as adapters go; None if it is."""
    theirs = info.extension if isinstance(info.extension, RoomExtension) else None
    if theirs is None:
        asked = "no adapter that it could name" if request.adapter else ""
    else:
        is_same = theirs.adapter_digest == request.adapter_digest
        asked = "" if is_same else _adapter(theirs.adapter, theirs.adapter_digest)
    if not asked:
        return None
    ours = _adapter(request.adapter, request.adapter_digest)
    return f"room {info.room}: the decode engine goes on with {asked}, the prompt is computed with {ours}"


def _adapter(name: str, digest: str) -> str:
    return f"adapter {name!r} ({digest})" if name else "the base model"


def destination_of(
    registration: Registration, ours: PeerExtension, *, handoff: HandoffLayout, rank: int = 0
) -> Destination:
    """How our engine, with `handoff` rows, writes to whoever has registered with our rank `rank`.

    A base peer does not describe itself: its pages and rows are taken to be shaped like those of the rank that it
    addresses, with the layers of all stages, its pool to be layer-major. Raises PeerIncompatible, naming both values,
    if no KV can move.
    """
    extension = registration.extension
    if isinstance(extension, OtherVersion):
        raise PeerIncompatible(extension.message)
    _check_aux(registration)
    if extension is None:
        return _base_destination(registration, ours, handoff=handoff, rank=rank)
    differences = mismatches(ours, extension)
    if differences:
        raise PeerIncompatible("; ".join(str(difference) for difference in differences))
    readers = _ranks_of(registration, extension)
    return Destination(
        streams=_streams(ours.shape(), extension, readers, registration),
        agents={reader.agent_name: reader.agent_metadata for reader in readers},
        handoff_agent=readers[HANDOFF_RANK].agent_name,
        aux_addresses=registration.aux_addresses,
        aux_row_nbytes=_handoff_of(extension, handoff).row_nbytes,
        page_size=extension.layout.page_size,
        num_pages=min(reader.layout.num_pages for reader in readers),
        instance_id=extension.instance_id,
    )


def _ranks_of(registration: Registration, extension: PeerExtension) -> list[RankFields]:
    """A peer's ranks; the frame describes one that is alone."""
    if extension.ranks:
        names = {rank.agent_name for rank in extension.ranks}
        if len(names) < len(extension.ranks) or "" in names:
            raise PeerIncompatible(f"{len(extension.ranks)} ranks have {len(names - {''})} agents; each needs its own")
        return extension.ranks
    _check_kv(1, registration)
    alone = RankFields(
        layout=extension.layout,
        agent_name=registration.agent_name,
        agent_metadata=registration.agent_metadata,
        kv_address=registration.kv_addresses[0],
        kv_device=registration.gpu_id,
    )
    return [alone]


def _streams(
    srcs: Ranks, extension: PeerExtension, readers: Sequence[RankFields], registration: Registration
) -> dict[tuple[int, int], tuple[Stream, ...]]:
    """By groups; a template is made once for each pair of layouts."""
    dsts = extension.shape()
    templates: dict[tuple[KVLayout, KVLayout], PageTemplate] = {}
    found: dict[tuple[int, int], tuple[Stream, ...]] = {}
    for src_group in range(srcs.dp_size):
        for dst_group in range(dsts.dp_size):
            group = []
            for writer, reader in streams(srcs, dsts, src_group=src_group, dst_group=dst_group):
                layouts = (srcs.layouts[writer], dsts.layouts[reader])
                template = templates.get(layouts) or templates.setdefault(layouts, page_template(*layouts))
                fields = readers[reader]
                space = _space(extension.kv_memory, fields.kv_device)
                group.append(Stream(writer, fields.agent_name, template, (fields.kv_address,), space))
            found[src_group, dst_group] = tuple(group)
    return found


def _base_destination(
    registration: Registration, ours: PeerExtension, *, handoff: HandoffLayout, rank: int
) -> Destination:
    srcs = ours.shape()
    tp_rank = rank % srcs.tp_size
    stages = range(tp_rank, len(srcs.layouts), srcs.tp_size)
    last = srcs.layouts[stages[-1]]
    theirs = replace(last, layers=range(srcs.layouts[tp_rank].layers.start, last.layers.stop))
    space = _space(ours.kv_memory, registration.gpu_id)
    found = []
    for stage in stages:
        template = page_template(srcs.layouts[stage], theirs, dst_order=PageOrder.LAYER_MAJOR)
        _check_kv(template.num_dst_regions, registration)
        found.append(Stream(stage, registration.agent_name, template, registration.kv_addresses, space))
    group = tp_rank // (srcs.tp_size // srcs.dp_size)
    return Destination(
        streams={(group, 0): tuple(found)},
        agents={registration.agent_name: registration.agent_metadata},
        handoff_agent=registration.agent_name,
        aux_addresses=registration.aux_addresses,
        aux_row_nbytes=handoff.row_nbytes,
        page_size=theirs.page_size,
        num_pages=None,
        instance_id="",
        tp_rank=tp_rank,
    )


def _check_aux(registration: Registration) -> None:
    if len(registration.aux_addresses) != NUM_BUFFERS:
        raise PeerIncompatible(
            f"aux base addresses: {NUM_BUFFERS} expected here, {len(registration.aux_addresses)} registered there"
        )


def _check_kv(needed: int, registration: Registration) -> None:
    named = len(registration.kv_addresses)
    if named != needed:
        raise PeerIncompatible(f"KV base addresses: {needed} expected here, {named} registered there")


def _space(kv_memory: str, device: int) -> MemorySpace:
    """Where a pool is; a base peer, which does not say, is taken to have it in the kind of memory that we do."""
    kind = MemoryKind(kv_memory)
    return MemorySpace(kind, device) if kind is MemoryKind.VRAM else HOST


def _handoff_of(extension: PeerExtension, ours: HandoffLayout) -> HandoffLayout:
    return replace(ours, num_top_logprobs=extension.num_top_logprobs, hidden_nbytes=extension.hidden_nbytes)
