"""Which other engine takes part in each sequence of a request, and how others find this one.

Owns what this engine advertises (its role, which may change while it runs), its registry's port, and the client that
asks other registries. Which role does what is decided in `engine.roles`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from diptych.config import TransferConfig
from diptych.core.messages import EngineInfo
from diptych.core.request import HandTo, TakeFrom
from diptych.engine.roles import Role, disaggregation_mode, hand_to, has_registry, initial_role
from diptych.errors import ConfigError, DiptychError, PeerLost, RequestError, Unavailable, Unsupported
from diptych.server.hosts import HostList
from diptych.server.registry import Registry, RegistryServer, create_registry_app
from diptych.server.registry_client import RegistryClient
from diptych.server.rendezvous import expand
from diptych.server.schemas import RendezvousFields
from diptych.transfer.rooms import Rendezvous

logger = logging.getLogger(__name__)

# What SGLang's own health probes name instead of a prefill engine.
FAKE_HOST = "2.2.2.2"


def _no_peers() -> Unsupported:
    return Unsupported(
        "this engine has no peers: it was started as unified; start it with --role decode or --role prefill",
        param="bootstrap_host",
    )


class Matchmaker:
    """One engine's part in prefill and decode apart.

    Args: config: its own part. is_serving: whether requests are taken. on_missed: told of every sequence whose prefill
    engine was not found, and whether it is computed here instead. Raises: ConfigError for an allow list that is none.
    """

    def __init__(
        self,
        config: TransferConfig | None = None,
        *,
        is_serving: Callable[[], bool] = lambda: True,
        on_missed: Callable[[bool], None] = lambda is_local: None,
    ) -> None:
        self._config = config or TransferConfig()
        self.role: Role = initial_role(self._config)
        self.info: EngineInfo | None = None
        self._on_missed = on_missed
        self._allowed = HostList(self._config.allowed_bootstrap_hosts)
        self._registries = RegistryClient()
        self._registry = Registry()
        self._app = create_registry_app(self._registry, cluster_key=self._config.cluster_key, is_serving=is_serving)
        self._server: RegistryServer | None = None
        self._switching = asyncio.Lock()

    @property
    def mode(self) -> str:
        """The role as SGLang calls it."""
        return disaggregation_mode(self.role)

    @property
    def bootstrap_port(self) -> int | None:
        """Where the registry listens; None if there is none."""
        return None if self._server is None else self._server.port

    def bind(self) -> None:
        """Take the registry's port, if the role wants one. Raises: ConfigError if it cannot be had."""
        if has_registry(self.role) and self._server is None:
            port = self._config.disaggregation_bootstrap_port
            self._server = RegistryServer(self._app, self._config.peer_host, port=port)

    def open(self) -> None:
        """Answer on the registry's port, if one was taken; needs the event loop."""
        if self._server is not None:
            self._server.start()

    def become_ready(self, info: EngineInfo) -> None:
        """The engine answers; this is how peers reach it."""
        self.info = info
        self._registry.own(info)

    async def close(self) -> None:
        """Close the registry's port and connections to others."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
        await self._registries.close()

    async def switch(self, role: Role) -> None:
        """Advertise another role from now on; requests that run are not touched, whatever they do.

        Raises: Unsupported without peers, Unavailable if the registry's port cannot be had.
        """
        if self.info is None or self.info.peer is None:
            raise _no_peers()
        async with self._switching:
            before, self.role = self.role, role
            try:
                self.bind()
            except ConfigError as error:
                self.role = before
                raise Unavailable(str(error)) from error
            if has_registry(role) and not has_registry(before):
                self.open()
            elif self._server is not None and not has_registry(role):
                server, self._server = self._server, None
                await server.stop()
        logger.info("role %s -> %s", before, role)

    async def handoffs(self, fields: RendezvousFields, counts: Sequence[int]) -> list[HandTo | TakeFrom | None]:
        """What each sequence of a request has to do with another engine; None: nothing.

        Args: counts: sequences of each prompt, in order. Raises: RequestError naming the field that is wrong;
        Unavailable or PeerLost if the prefill engine is not found and the prompt may not be computed here.
        """
        meetings = expand(fields, counts)
        is_ticket = fields.bootstrap_host is None
        if not any(meetings) or (is_ticket and has_registry(self.role)):  # tickets are for engines that decode
            return [None] * len(meetings)
        return list(await asyncio.gather(*map(self._handoff, meetings)))

    async def _handoff(self, meeting: Rendezvous | None) -> HandTo | TakeFrom | None:
        if meeting is None or meeting.host == FAKE_HOST:
            return None
        has_peers = self.info is not None and self.info.peer is not None
        if has_peers and (handoff := hand_to(self.role, meeting)) is not None:
            return handoff
        if meeting.host not in self._allowed:
            raise RequestError(
                f"bootstrap_host {meeting.host!r} is not among the hosts that a client may name "
                "(--allowed-bootstrap-hosts)",
                param="bootstrap_host",
            )
        if not has_peers:
            self._miss(meeting, _no_peers())
            return None
        return await self._take_from(meeting)

    async def _take_from(self, meeting: Rendezvous) -> TakeFrom | None:
        try:
            route = await self._registries.find(meeting.host, meeting.port)
        except PeerLost as error:
            self._miss(meeting, error if meeting.room is None else Unavailable(str(error)))
            return None
        if self.info is not None and self.info.peer is not None and route.instance_id == self.info.peer.instance_id:
            self._miss(meeting, Unsupported("bootstrap_host names this engine itself", param="bootstrap_host"))
            return None
        return TakeFrom(route.address, route.instance_id, meeting.room)

    def _miss(self, meeting: Rendezvous, error: DiptychError) -> None:
        """There is no prefill engine: the prompt is computed here if nobody else was told. Raises: `error` if not."""
        is_local = meeting.room is None and self._config.local_prefill
        self._on_missed(is_local)
        if not is_local:
            raise error
        logger.debug("computing a prompt here: %s", error)

    def ticket(self, fields: RendezvousFields, request_id: str) -> dict[str, Any] | None:
        """`kv_transfer_params` of an answer, for the engine that decodes; None if this one cannot be asked again."""
        wants = fields.kv_transfer_params
        peer = None if self.info is None else self.info.peer
        if not (wants is not None and wants.do_remote_decode) or peer is None or self.bootstrap_port is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": peer.instance_id,
            "remote_request_id": request_id,
            "remote_host": self._config.peer_host,
            "remote_port": self.bootstrap_port,
            "remote_block_ids": [],
            "tp_size": peer.tp_size,
        }
