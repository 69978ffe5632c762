"""The registry of a prefill engine: where decode engines find its ranks. HTTP on the bootstrap port.

`PUT /route` and `GET /route` are SGLang's, with fields of ours beside them. Owns who has registered; moves no KV.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych.core.messages import EngineInfo
from diptych.errors import DiptychError, RequestError, Unavailable
from diptych.server.bodies import read_schema
from diptych.server.errors import (
    error_body,
    json_response,
    on_diptych_error,
    on_http_error,
    on_unexpected_error,
)
from diptych.server.listening import HttpServer, http_server, listen
from diptych.server.schemas import RankRegistration
from diptych.server.streaming import ClientGone, on_client_gone

logger = logging.getLogger(__name__)

MAX_BODY_NBYTES = 64 * 1024


class OtherInstance(RequestError):
    """The registry belongs to another engine than the one that wants to register."""

    status = 409
    code = "other_instance"


class Registry:
    """The ranks of one engine. `facts`: what else our own engine says of itself.

    Within one instance every rank must name the same sizes. An instance that owns the registry keeps it; one that only
    registered is replaced by the next.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._ranks: dict[int, RankRegistration] = {}
        self._first: RankRegistration | None = None
        self._is_owned = False

    def own(self, info: EngineInfo) -> None:
        """Our own engine is ready: the registry is its, and its ranks are in it. Does nothing without peers."""
        peer = info.peer
        if peer is None:
            return
        self._first, self._ranks, self._is_owned = None, {}, True
        for rank, address in enumerate(peer.rank_addresses or (peer.address,)):
            host, _, port = address.rpartition(":")
            self.register(
                RankRegistration(
                    role="Prefill",
                    tp_size=peer.tp_size,
                    dp_size=peer.dp_size,
                    pp_size=peer.pp_size,
                    rank_ip=host,
                    rank_port=int(port),
                    engine_rank=rank,
                    instance_id=peer.instance_id,
                    protocol_version=peer.protocol_version,
                    fingerprint=peer.fingerprint,
                )
            )
        self.facts = _model_facts(info)

    def register(self, rank: RankRegistration) -> None:
        """A rank is there. Raises: RequestError for a rank that cannot be, OtherInstance if that is not its engine."""
        if rank.tp_size % rank.dp_size:
            raise RequestError(f"dp_size {rank.dp_size} does not divide tp_size {rank.tp_size}", param="dp_size")
        if rank.engine_rank >= rank.tp_size * rank.pp_size:
            raise RequestError(
                f"engine_rank {rank.engine_rank} is too large for tp_size {rank.tp_size} and pp_size {rank.pp_size}",
                param="engine_rank",
            )
        first = self._first
        if first is None or (rank.instance_id != first.instance_id and not self._is_owned):
            self._first, self._ranks = rank, {}
        elif rank.instance_id != first.instance_id:
            raise OtherInstance(
                f"this registry is of instance {first.instance_id}, not {rank.instance_id or 'unknown'}", "instance_id"
            )
        else:
            _check_same(first, rank)
        self._ranks[rank.engine_rank] = rank

    def summary(self) -> dict[str, Any]:
        """The engine as a whole. Raises: Unavailable until every rank has registered."""
        first = self._complete()
        sizes = {
            "prefill_tp_size": first.tp_size,
            "prefill_dp_size": first.dp_size,
            "prefill_pp_size": first.pp_size,
        }
        return {**sizes, **_identity(first), **self.facts}

    def route(self, rank_in_group: int, group: int) -> dict[str, Any] | None:
        """Where one rank of one data-parallel group listens; None if there is no such rank. Raises: Unavailable."""
        first = self._complete()
        group_size = first.tp_size // first.dp_size
        stage, place = divmod(rank_in_group, group_size)
        if not (0 <= group < first.dp_size and 0 <= stage < first.pp_size):
            return None
        rank = self._ranks[stage * first.tp_size + group * group_size + place]
        return {"rank_ip": rank.rank_ip, "rank_port": rank.rank_port, **_identity(rank)}

    def _complete(self) -> RankRegistration:
        first = self._first
        wanted = 0 if first is None else first.tp_size * first.pp_size
        if first is None or len(self._ranks) < wanted:
            raise Unavailable(f"{len(self._ranks)} of {wanted or 'all'} ranks have registered; try again in a moment")
        return first


def _check_same(first: RankRegistration, rank: RankRegistration) -> None:
    for name in ("tp_size", "dp_size", "pp_size", "protocol_version", "fingerprint"):
        there, here = vars(first)[name], vars(rank)[name]
        if there != here:
            raise RequestError(f"{name} is {here} here and {there} on another rank of this engine", param=name)


def _identity(rank: RankRegistration) -> dict[str, Any]:
    return {
        "pp_size": rank.pp_size,
        "instance_id": rank.instance_id,
        "protocol_version": rank.protocol_version,
        "fingerprint": rank.fingerprint,
    }


def _model_facts(info: EngineInfo) -> dict[str, Any]:
    return {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "page_size": info.page_size,
        "num_layers": info.num_layers,
        "num_kv_heads": info.num_kv_heads,
        "head_dim": info.head_dim,
        "is_latent": info.is_latent,
    }


def create_registry_app(
    registry: Registry, *, cluster_key: str | None, is_serving: Callable[[], bool] = lambda: True
) -> Starlette:
    """The ASGI application. cluster_key: bearer token that writes need. is_serving: False sends everybody away."""

    async def put_route(request: Request) -> Response:
        if cluster_key is not None and not _has_key(request, cluster_key):
            body = error_body(401, "registering needs the cluster key as bearer token", code="invalid_cluster_key")
            return json_response(body, 401, {"WWW-Authenticate": "Bearer"})
        registry.register(await read_schema(request, RankRegistration, MAX_BODY_NBYTES))
        return Response("OK", media_type="text/plain")

    async def get_route(request: Request) -> Response:
        rank, group = _number(request, "engine_rank"), _number(request, "target_dp_group")
        if not is_serving():
            raise Unavailable("this prefill engine is not ready, or shutting down")
        if rank == group == -1:
            return json_response(registry.summary())
        route = registry.route(rank, group)
        if route is None:
            raise HTTPException(404, f"there is no rank {rank} in data-parallel group {group}")
        return json_response(route)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if is_serving() else 503)

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        DiptychError: on_diptych_error,
        HTTPException: on_http_error,
        ClientGone: on_client_gone,
        Exception: on_unexpected_error,
    }
    routes = [
        Route("/route", put_route, methods=["PUT"]),
        Route("/route", get_route, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers=handlers)


def _has_key(request: Request, key: str) -> bool:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key.encode())


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise RequestError(f"{name} must be a whole number (-1 for the engine as a whole), got {text[:40]!r}", name)
    return int(text)


class RegistryServer:
    """Serves a registry's application on a port of its own, on the running event loop.

    Args: host, port: where; port 0 takes a free one. Raises: ConfigError if it cannot be had.
    """

    def __init__(self, app: Starlette, host: str, *, port: int) -> None:
        self._app = app
        self._listener = listen(host, port, flag="--disaggregation-bootstrap-port")
        self._http: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        """Answer from now on."""
        self._http = http_server(self._app)
        self._task = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        logger.info("prefill registry on port %d", self.port)

    async def stop(self) -> None:
        """Close the port, and connections as they come to rest."""
        if self._http is not None and self._task is not None:
            self._http.should_exit = True
            await self._task
        self._listener.close()
