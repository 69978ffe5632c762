"""Several machines for one engine: where its nodes find each other, and what they must agree on. Pure functions."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version

from diptych.config import EngineConfig
from diptych.transfer.sockets import is_loopback

# What a node decides for itself: where its files and cores are, and which one it is.
_OWN = {
    "model_path",
    "tokenizer_path",
    "num_threads",
    "node_rank",
    "dist_init_addr",
    "lora_paths",
    "speculative_draft_model_path",
}


def node_endpoint(address: str) -> str:
    """Where node 0 listens: on loopback if that is where the others look for it. Args: address: "host:port"."""
    host, port = _split(address)
    return f"tcp://127.0.0.1:{port}" if is_loopback(host) else f"tcp://*:{port}"


def rank_endpoint(address: str, *, is_leader: bool) -> str:
    """Where a rank or a node finds node 0. Args: is_leader: whether that is on the same machine."""
    host, port = _split(address)
    return f"tcp://127.0.0.1:{port}" if is_leader or is_loopback(host) else f"tcp://{address}"


def meeting_place(address: str) -> str:
    """Where the ranks meet, as torch.distributed spells it: rank 0 listens on the next port."""
    host, port = _split(address)
    return f"tcp://127.0.0.1:{port + 1}" if is_loopback(host) else f"tcp://{address.rpartition(':')[0]}:{port + 1}"


def node_settings(config: EngineConfig) -> dict[str, str]:
    """What must be the same on all nodes, by name. Args: config: resolved."""
    sections = (config.model, config.cache, config.scheduler, config.parallel, config.lora, config.speculative)
    values = {
        field.name: str(vars(section)[field.name])
        for section in sections
        for field in fields(section)
        if field.name not in _OWN
    }
    return {"version": version("diptych"), **values}


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first setting that is not the same, with both values; None if all are."""
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)} there and {ours.get(name)} here"
    return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
