"""An engine's place among its peers: joined once the worker has loaded, and left and joined anew when what peers must
know of it changes.

An engine that joins anew is a new instance to them: whatever they knew of the old one is over, and both sides compare
again what they are before any page moves. Engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import zmq

from diptych.config import EngineConfig
from diptych.core.messages import EngineInfo
from diptych.engine.roles import create_peering

if TYPE_CHECKING:
    from diptych.engine.agents import AgentChannel
    from diptych.engine.peering import Peering


class Membership:
    """Args: poller: of the engine's loop; it waits for peers, too, while there are any. channel: to the ranks'
    processes, if there are any.
    """

    def __init__(self, config: EngineConfig, poller: zmq.Poller, channel: AgentChannel | None) -> None:
        self._config = config
        self._channel = channel
        self._poller = poller
        self.peering: Peering | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether no room is open on either side."""
        return self.peering is None or self.peering.hinge.is_idle

    def join(self, info: EngineInfo) -> EngineInfo:
        """Meet peers, if the role names any. Returns: `info` with how they reach us.

        Raises: ConfigError if sockets or NIXL cannot be had.
        """
        self.peering = create_peering(self._config, info, self._channel)
        if self.peering is None:
            return info
        for fd in self.peering.wake_fds:
            self._poller.register(fd, zmq.POLLIN)
        return msgspec.structs.replace(info, peer=self.peering.facts)

    def leave(self) -> None:
        """Tell peers that we are gone, unregister memory and close the sockets. No write may be under way."""
        peering, self.peering = self.peering, None
        if peering is None:
            return
        peering.hinge.leave(0.0)
        for fd in peering.wake_fds:
            self._poller.unregister(fd)
        peering.close()
