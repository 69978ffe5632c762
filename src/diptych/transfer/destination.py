"""What a prefill rank makes of a registered decode rank: where its memory is, and whether what it asks for can be done.

Owns the checks between what peers say and what `plan` and `handoff` take for granted. Whatever passes here raises no
InvariantError there. Knows no sockets and no rooms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych.errors import PeerIncompatible
from diptych.kv.layout import KVLayout
from diptych.transfer.backend import HOST, MemoryKind, MemorySpace
from diptych.transfer.extension import OtherVersion, PeerExtension, RoomExtension, mismatches
from diptych.transfer.handoff import NUM_BUFFERS, HandoffLayout
from diptych.transfer.plan import PageOrder, PageTemplate, page_template
from diptych.transfer.wire import Registration, TransferInfo


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Destination:
    """One decode rank, as one of our prefill ranks writes to it.

    template: what of our pages goes there. num_pages: of its pool, None from a base peer. aux_row_nbytes: of its
    handoff rows. instance_id: empty for a base peer.
    """

    template: PageTemplate
    kv_addresses: tuple[int, ...]
    kv_space: MemorySpace
    aux_addresses: tuple[int, ...]
    aux_row_nbytes: tuple[int, ...]
    num_pages: int | None
    instance_id: str

    @property
    def is_base(self) -> bool:
        """Whether it speaks the base format alone."""
        return not self.instance_id

    def num_cached_tokens(self, info: TransferInfo) -> int:
        """Tokens whose pages `info` leaves out, because the destination holds them."""
        return info.extension.num_cached_tokens if isinstance(info.extension, RoomExtension) else 0

    def problem(self, info: TransferInfo, num_prompt_tokens: int) -> str | None:
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
        return None if info.is_dummy else self._problem_with_pages(info, num_prompt_tokens)

    def _problem_with_pages(self, info: TransferInfo, num_prompt_tokens: int) -> str | None:
        page_size, cached = self.template.dst.page_size, self.num_cached_tokens(info)
        if cached % page_size or cached >= num_prompt_tokens:
            return f"room {info.room}: {cached} cached tokens of {num_prompt_tokens}, in pages of {page_size}"
        needed, named = -(-(num_prompt_tokens - cached) // page_size), len(info.dst_pages)
        if named < needed or (named > needed and not self.is_base):
            return f"room {info.room}: {needed} pages of {page_size} tokens are needed, {named} were named"
        highest = int(info.dst_pages.max())
        if self.num_pages is not None and highest >= self.num_pages:
            return f"room {info.room}: page {highest} was named, the pool has {self.num_pages}"
        return None


def destination_of(
    registration: Registration, ours: PeerExtension, *, layout: KVLayout, handoff: HandoffLayout
) -> Destination:
    """How the rank with `layout` and `handoff` rows writes to a registered peer.

    A base peer does not describe itself: its pages and rows are taken to be shaped like ours, its pool to be
    layer-major. Raises PeerIncompatible, naming both values, if no KV can move.
    """
    extension = registration.extension
    if isinstance(extension, OtherVersion):
        raise PeerIncompatible(extension.message)
    if extension is None:
        theirs, order, num_pages, instance_id = layout, PageOrder.LAYER_MAJOR, None, ""
        aux_row_nbytes = handoff.row_nbytes
    else:
        differences = mismatches(ours, extension)
        if differences:
            raise PeerIncompatible("; ".join(str(difference) for difference in differences))
        theirs, order = extension.layout.layout(), PageOrder.PAGE_MAJOR
        num_pages, instance_id = extension.layout.num_pages, extension.instance_id
        aux_row_nbytes = _handoff_of(extension, handoff).row_nbytes
    template = page_template(layout, theirs, dst_order=order)
    for what, needed, named in (
        ("KV", template.num_dst_regions, len(registration.kv_addresses)),
        ("aux", NUM_BUFFERS, len(registration.aux_addresses)),
    ):
        if needed != named:
            raise PeerIncompatible(f"{what} base addresses: {needed} expected here, {named} registered there")
    return Destination(
        template=template,
        kv_addresses=registration.kv_addresses,
        kv_space=_kv_space(registration, ours),
        aux_addresses=registration.aux_addresses,
        aux_row_nbytes=aux_row_nbytes,
        num_pages=num_pages,
        instance_id=instance_id,
    )


def _kv_space(registration: Registration, ours: PeerExtension) -> MemorySpace:
    """Where a peer's pool is; a base peer, which does not say, is taken to have it in the kind of memory that we do."""
    extension = registration.extension
    kind = MemoryKind((extension if isinstance(extension, PeerExtension) else ours).kv_memory)
    return MemorySpace(kind, registration.gpu_id) if kind is MemoryKind.VRAM else HOST


def _handoff_of(extension: PeerExtension, ours: HandoffLayout) -> HandoffLayout:
    return replace(ours, num_top_logprobs=extension.num_top_logprobs, hidden_nbytes=extension.hidden_nbytes)
