"""A list of hosts that a client may name: names, addresses and networks."""

from __future__ import annotations

import ipaddress

from diptych.errors import ConfigError


class HostList:
    """Hosts from a text such as "localhost,10.0.0.7,10.1.0.0/16". Names are compared as they are, never resolved.

    Raises: ConfigError for a network that is none.
    """

    def __init__(self, text: str) -> None:
        items = [item.strip().lower() for item in text.split(",") if item.strip()]
        self._names = frozenset(item for item in items if "/" not in item)
        try:
            self._networks = [ipaddress.ip_network(item) for item in items if "/" in item]
        except ValueError as error:
            raise ConfigError(f"allowed_bootstrap_hosts: {error}") from error

    def __contains__(self, host: str) -> bool:
        if host.lower() in self._names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)
