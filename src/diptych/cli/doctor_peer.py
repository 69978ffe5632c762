"""`diptych doctor --peer HOST:PORT`: what a prefill engine's registry tells, and how its pages come here.

Asks the engine for a few random prompts, as a decode engine would, and throws away what it gets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from dataclasses import dataclass

import psutil

from diptych.cli.finding import Finding
from diptych.config import ModelConfig
from diptych.errors import ConfigError, PeerIncompatible, PeerLost
from diptych.models.fingerprint import fingerprint
from diptych.models.spec import inspect_model
from diptych.server.registry_client import PrefillSummary, RankRoute, ask_registry, open_session
from diptych.transfer.extension import PROTOCOL_VERSION
from diptych.transfer.rooms import DEFAULT_BOOTSTRAP_PORT

CONNECT_TIMEOUT_S = 2.0
BENCH_NBYTES = 16 * 2**20
BENCH_REPEATS = 3
PROMPT_PAGES = (1, 8, 32)
_SECTION = "peer"


@dataclass(frozen=True)
class _Answers:
    """What the registry said. latency_s: of one question, over an open connection."""

    summary: PrefillSummary
    route: RankRoute
    latency_s: float


def examine_peer(peer: str, model_path: str | None) -> list[Finding]:
    """Every finding about the engine whose registry is at `peer` ("host:port", or "host" for the usual port).

    Args: model_path: a local model to compare it with. Raises: ConfigError if `peer` is no address.
    """
    host, port = parse_peer(peer)
    try:
        answers = asyncio.run(_ask(host, port))
    except PeerLost as error:
        return [Finding(_SECTION, "registry", "no answer", "warn", str(error))]
    reached = Finding(_SECTION, "registry", f"{host}:{port}", "ok", f"answers in {1e3 * answers.latency_s:.1f} ms")
    return [
        reached,
        *_engine(answers.summary),
        _control_socket(answers.route),
        *_model(answers.summary, model_path),
        *_received(answers),
        *_measured_here(answers.route.rank_ip),
    ]


def parse_peer(peer: str) -> tuple[str, int]:
    """Host and port of "host:port", "[v6]:port" or "host". Raises: ConfigError."""
    host, colon, port = peer.rpartition(":")
    if not colon or peer.endswith("]"):
        host, port = peer, str(DEFAULT_BOOTSTRAP_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(f"--peer must be HOST:PORT of a prefill engine's registry, got {peer!r}")
    return host, int(port)


async def _ask(host: str, port: int) -> _Answers:
    async with open_session() as session:
        summary = await ask_registry(session, host, port, rank=-1, group=-1, kind=PrefillSummary)
        started = time.perf_counter()
        route = await ask_registry(session, host, port, rank=0, group=0, kind=RankRoute)
        return _Answers(summary, route, time.perf_counter() - started)


def _engine(summary: PrefillSummary) -> list[Finding]:
    sizes = f"tp {summary.prefill_tp_size}, dp {summary.prefill_dp_size}, pp {summary.prefill_pp_size}"
    name = summary.instance_id or "of another make"
    found = [Finding(_SECTION, "engine", f"prefill, instance {name}", "ok", sizes)]
    version = summary.protocol_version
    if version is None:
        note = "it speaks the base format alone: no first token ahead of the KV, no heartbeats"
        found.append(Finding(_SECTION, "protocol", "base format", "warn", note))
    elif version != PROTOCOL_VERSION:
        note = f"version {version} there, {PROTOCOL_VERSION} here: no KV moves; upgrade one of them"
        found.append(Finding(_SECTION, "protocol", f"version {version}", "warn", note))
    else:
        found.append(Finding(_SECTION, "protocol", f"version {version}", "ok", "the same as here"))
    return found


def _control_socket(route: RankRoute) -> Finding:
    started = time.perf_counter()
    try:
        with socket.create_connection((route.rank_ip, route.rank_port), CONNECT_TIMEOUT_S):
            took_ms = 1e3 * (time.perf_counter() - started)
    except OSError as error:
        return Finding(_SECTION, "control socket", route.address, "warn", f"cannot be reached from here: {error}")
    return Finding(_SECTION, "control socket", route.address, "ok", f"connects in {took_ms:.1f} ms")


def _model(summary: PrefillSummary, model_path: str | None) -> list[Finding]:
    there = _shape(summary.num_layers, summary.num_kv_heads, summary.head_dim)
    layout = f"{there}, {summary.dtype}, pages of {summary.page_size} tokens"
    shown = Finding(_SECTION, "KV layout", layout if summary.num_layers else "not told")
    told = summary.fingerprint or "not told"
    if model_path is None:
        note = "name a local model with --model-path to compare it"
        return [shown, Finding(_SECTION, "weights", told, "info", note)]
    try:
        spec = inspect_model(ModelConfig(model_path=model_path))
    except ConfigError as error:
        return [shown, Finding(_SECTION, "weights", told, "warn", f"nothing to compare with: {error}")]
    here = _shape(spec.config.num_layers, spec.config.num_kv_heads, spec.config.kv_head_dim)
    if here != there:
        shown = Finding(_SECTION, "KV layout", layout, "warn", f"{here} in {model_path}: no KV moves")
    ours = fingerprint(spec)
    if ours == summary.fingerprint:
        return [shown, Finding(_SECTION, "weights", told, "ok", f"the same as {model_path}")]
    return [shown, Finding(_SECTION, "weights", told, "warn", f"{ours} for {model_path}: no KV moves")]


def _shape(num_layers: int | None, num_kv_heads: int | None, head_dim: int | None) -> str:
    return f"{num_layers} layers x {num_kv_heads} KV heads x {head_dim}"


def _received(answers: _Answers) -> list[Finding]:
    """What a decode engine in this process sees of the peer: is it taken, over what do pages come, how fast."""
    page_size = answers.summary.page_size or 0
    try:
        # Imported only now: NIXL may not be there.
        from diptych.server.peer_transfer import receive_from

        landings = receive_from(answers.route, answers.summary, [page_size * count for count in PROMPT_PAGES])
    except PeerIncompatible as error:
        return [Finding(_SECTION, "transfer", "refused", "warn", str(error))]
    # NIXL and its native libraries raise whatever they like; the doctor must survive all of it.
    except Exception as error:
        return [Finding(_SECTION, "transfer", "failed", "warn", f"{type(error).__name__}: {error}")]
    transport = landings[-1].transport
    note = "pages of the peer into host memory of this process"
    if transport == "tcp":
        note += "; with RDMA, or shared memory on one machine, this would be ten times faster or more"
    return [
        Finding(_SECTION, "transport", transport, "warn" if transport == "tcp" else "ok", note),
        *(
            Finding(
                _SECTION,
                f"prompt of {landing.num_tokens}",
                f"{landing.nbytes / 2**10:,.0f} KiB in {1e3 * landing.land_s:.1f} ms"
                + (f", {landing.gb_per_s:.2f} GB/s" if landing.land_s else ""),
                "ok",
                f"from the first token to the last page; first token after {1e3 * landing.ttft_s:.1f} ms",
            )
            for landing in landings
        ),
    ]


def _measured_here(rank_ip: str) -> list[Finding]:
    """If the peer is on this machine: what two processes reach by descriptor size, without a model between them."""
    if not is_here(rank_ip):
        return []
    try:
        # Imported only now: NIXL may not be there.
        from diptych.cli.bench_transfer import KIB, bandwidths, bench
        from diptych.transfer.plan import PageOrder

        with bench(BENCH_NBYTES) as running:
            rows = list(bandwidths(running, PageOrder.PAGE_MAJOR, repeats=BENCH_REPEATS))
    # As above.
    except Exception as error:
        return [Finding(_SECTION, "bandwidth", "unknown", "warn", f"{type(error).__name__}: {error}")]
    note = "between two processes of this machine, host memory"
    return [
        Finding(_SECTION, f"{row.page_nbytes // KIB} KiB descriptors", f"{row.gb_per_s:.2f} GB/s", "ok", note)
        for row in rows
    ]


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {item.address.partition("%")[0] for items in psutil.net_if_addrs().values() for item in items}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in map(str, addresses))
