"""The adapters of one engine as its server knows them, so that a request for one that is not there is refused at once.

The engine decides; what is kept here is what it said last.
"""

from __future__ import annotations

import msgspec

from diptych.config import EngineConfig
from diptych.core.messages import AdapterInfo, AddAdapter, RemoveAdapter
from diptych.errors import AdapterError, ConfigError, DiptychError, RequestError, UnknownModel
from diptych.lora_paths import parse_lora_paths
from diptych.server.client import EngineClient


class ServedAdapters:
    """The adapters of one engine. config: resolved; it says what the model is called."""

    def __init__(self, client: EngineClient, config: EngineConfig) -> None:
        self._client = client
        self._paths = config.lora.lora_paths
        self._reserved = {config.model.model_path, config.server.served_model_name}
        self._loaded: dict[str, AdapterInfo] = {}

    @property
    def loaded(self) -> list[AdapterInfo]:
        """All that requests may name, in the order of loading."""
        return list(self._loaded.values())

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def check(self, name: str) -> None:
        """Raises: UnknownModel naming those that there are, unless `name` is loaded or empty."""
        if name and name not in self._loaded:
            names = ", ".join(map(repr, self._loaded)) or "none"
            raise UnknownModel(f"adapter {name!r} is not loaded; loaded are: {names}", param="lora_path")

    async def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        """Load an adapter while requests run. Raises: AdapterError, Unsupported; then nothing has changed."""
        if name in self._reserved:
            raise AdapterError(
                f"{name!r} is the name of the model itself; call the adapter otherwise", param="lora_name"
            )
        reply = await self._client.call(lambda call_id: AddAdapter(call_id, name, path, pinned), None)
        self._take(reply.value)

    async def unload(self, name: str) -> None:
        """Unload an adapter as soon as its running requests have ended. Raises: UnknownModel."""
        self.check(name)
        info = self._loaded.pop(name)
        try:
            reply = await self._client.call(lambda call_id: RemoveAdapter(call_id, name), None)
        except DiptychError:
            self._loaded.setdefault(name, info)
            raise
        self._take(reply.value)

    async def load_configured(self) -> None:
        """Those that the configuration names. Raises: ConfigError for the first that cannot be loaded."""
        for each in parse_lora_paths(self._paths):
            try:
                await self.load(each.name, each.path, pinned=each.pinned)
            except RequestError as error:
                raise ConfigError(f"lora_paths: {error}") from error

    def _take(self, value: bytes) -> None:
        infos = msgspec.msgpack.decode(value, type=list[AdapterInfo])
        self._loaded = {info.name: info for info in infos}
