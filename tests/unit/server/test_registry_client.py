"""Asking registries: what is kept, for how long, and who waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from diptych.errors import PeerLost
from diptych.server import registry_client
from diptych.server.registry_client import RegistryClient


@asynccontextmanager
async def fake_registry() -> AsyncIterator[tuple[int, list[float]]]:
    """Its port, and when it was asked."""
    asked: list[float] = []

    async def route(request: web.Request) -> web.Response:
        asked.append(asyncio.get_running_loop().time())
        return web.json_response({"rank_ip": "127.0.0.1", "rank_port": len(asked), "instance_id": "one"})

    app = web.Application()
    app.router.add_get("/route", route)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await web.SockSite(runner, listener).start()
        yield listener.getsockname()[1], asked
        await runner.cleanup()


@pytest.fixture
async def registries() -> AsyncIterator[RegistryClient]:
    client = RegistryClient()
    yield client
    await client.close()


async def test_requests_do_not_wait_while_the_registry_answers_again_and_again(registries, monkeypatch):
    monkeypatch.setattr(registry_client, "FRESH_S", 0.02)
    monkeypatch.setattr(registry_client, "STALE_S", 0.5)
    async with fake_registry() as (port, asked):
        await asyncio.gather(*(registries.find("127.0.0.1", port) for _ in range(5)))
        assert len(asked) == 1
        while len(asked) < 4:
            await asyncio.sleep(0.005)
        found = registries.find("127.0.0.1", port)
        with pytest.raises(StopIteration) as done:
            found.send(None)  # it ends without ever waiting
        assert done.value.value.rank_port >= 3


async def test_a_registry_that_nobody_names_is_left_alone(registries, monkeypatch):
    monkeypatch.setattr(registry_client, "FRESH_S", 0.01)
    monkeypatch.setattr(registry_client, "USED_S", 0.1)
    async with fake_registry() as (port, asked):
        await registries.find("127.0.0.1", port)
        while asyncio.get_running_loop().time() - asked[-1] < 0.15:
            await asyncio.sleep(0.02)
        assert asked[-1] - asked[0] < 0.2
        count = len(asked)
        await registries.find("127.0.0.1", port)
        while len(asked) == count:
            await asyncio.sleep(0.005)


async def test_a_registry_that_is_gone_is_not_asked_on_and_on(registries, monkeypatch):
    monkeypatch.setattr(registry_client, "FRESH_S", 0.01)
    async with fake_registry() as (port, _):
        await registries.find("127.0.0.1", port)
    entry = registries._entries["127.0.0.1", port]
    while not isinstance(entry.answer, str):
        await asyncio.sleep(0.01)
    assert entry.next_lookup is None
    with pytest.raises(PeerLost, match="cannot be reached"):
        await registries.find("127.0.0.1", port)
