"""What an engine is to its peers, said in their terms: its ranks' layouts, agents and addresses, and its handoff rows.

Pure: everything is given. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.config import ParallelConfig
from diptych.core.messages import EngineInfo, PeerFacts, RankPool
from diptych.core.request import MAX_LOGPROBS
from diptych.engine.agents import RankAgents
from diptych.engine.rank_agent import memory_space
from diptych.kv.layout import KVLayout
from diptych.transfer.extension import PROTOCOL_VERSION, LayoutFields, PeerExtension, RankFields
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.ports import Site


def site_of(identity: PeerExtension, agents: RankAgents, *, host: str, port: int, handoff: HandoffLayout) -> Site:
    """Args: host, port: of the control socket. handoff: of the rows that the agents have."""
    return Site(
        identity=identity,
        endpoint=host,
        port=port,
        agents=agents.agents,
        ranks=agents.ranks,
        handoff_layout=handoff,
        handoff_base=agents.rows_address,
        handoff_rows=HandoffRows(handoff, agents.rows),
        handoff_slots=HandoffSlots(handoff.num_slots),
    )


def facts_of(identity: PeerExtension, *, role: str, host: str, ports: Sequence[int]) -> PeerFacts:
    """How peers find the engine. Args: ports: of the control sockets of its ranks."""
    addresses = tuple(f"{host}:{port}" for port in ports)
    return PeerFacts(
        role=role,
        instance_id=identity.instance_id,
        address=addresses[0],
        rank_addresses=addresses,
        tp_size=identity.tp_size,
        dp_size=identity.dp_size,
        pp_size=identity.pp_size,
        fingerprint=identity.model_fingerprint,
        protocol_version=PROTOCOL_VERSION,
    )


def identity_of(
    instance_id: str, info: EngineInfo, parallel: ParallelConfig, lifelines: Sequence[str], address: str
) -> PeerExtension:
    """What we say of ourselves; ranks only where there are several."""
    fields = [LayoutFields.of(layout, info.num_pages) for layout in _layouts(info)]
    ranks = [RankFields(layout=each, lifeline=life) for each, life in zip(fields, lifelines, strict=bool(lifelines))]
    return PeerExtension(
        instance_id=instance_id,
        layout=fields[0],
        model_layers=info.num_layers,
        model_kv_heads=info.num_kv_heads,
        model_fingerprint=info.fingerprint,
        draft_fingerprint=info.draft_fingerprint,
        weight_version="" if info.weight_version == "default" else info.weight_version[:256],
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        dp_size=parallel.dp_size,
        ranks=ranks,
        control_endpoint=address,
        num_top_logprobs=MAX_LOGPROBS,
        kv_memory=memory_space(info.device).kind.value,
    )


def _layouts(info: EngineInfo) -> list[KVLayout]:
    """Of every rank's pool; a worker that names none holds all."""
    pools = info.pools or (RankPool(0, info.num_layers, 0, info.num_kv_heads, info.page_nbytes, info.kv_address),)
    return [
        KVLayout(
            layers=range(pool.first_layer, pool.first_layer + pool.num_layers),
            kv_heads=range(pool.first_kv_head, pool.first_kv_head + pool.num_kv_heads),
            head_dim=info.head_dim,
            page_size=info.page_size,
            dtype=info.dtype,
            is_latent=info.is_latent,
        )
        for pool in pools
    ]
