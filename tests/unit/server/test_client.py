"""The engine's client on a real socket, against a fake engine."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import zmq

from diptych.config import EngineConfig, ModelConfig
from diptych.core.batch import FinishReason
from diptych.core.channel import open_socket
from diptych.core.messages import RequestOutput
from diptych.core.request import Request, SamplingParams
from diptych.errors import ConfigError, Overloaded, PromptTooLong, RequestError, Unavailable
from diptych.server.client import EngineClient, merge_outputs
from diptych.server.process import EngineProcess


def make_request(request_id: str, num_tokens: int = 5, **sampling) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=num_tokens, seed=0, **sampling),
    )


async def until(condition, timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
async def pair(fake, socket_folder: Path) -> AsyncIterator[tuple]:
    """A client that is ready and its engine."""
    context: zmq.Context = zmq.Context()
    progress = []
    endpoint = f"ipc://{socket_folder}/e"
    client = EngineClient(open_socket(context, endpoint, bind=True), on_progress=progress.append)
    engine = fake.FakeEngine(endpoint)
    engine.start()
    info = await client.start()
    assert info == fake.INFO
    assert [(loading.done, loading.total) for loading in progress] == [(1, 2), (2, 2)]
    yield client, engine
    engine.stop()
    client.close()
    context.term()


async def collect(client: EngineClient, request: Request) -> list[int]:
    return [token for output in [o async for o in client.generate(request)] for token in output.token_ids]


async def test_outputs_arrive_in_order_for_every_request(pair):
    client, _ = pair
    results = await asyncio.gather(*(collect(client, make_request(str(n), 3 + n)) for n in range(20)))
    assert results == [([1, 2, 3] * 10)[: 3 + n] for n in range(20)]
    assert client.num_open == 0


async def test_a_slow_reader_gets_outputs_merged(pair):
    client, engine = pair
    engine.step_s = 0.002
    async with aclosing(client.generate(make_request("a", 50))) as outputs:
        first = await anext(outputs)
        await until(lambda: not engine.open)
        await asyncio.sleep(0.05)
        second = await anext(outputs)
    assert len(first.token_ids) + len(second.token_ids) == 50
    assert second.finish_reason is FinishReason.LENGTH


async def test_closing_early_aborts(pair):
    client, engine = pair
    engine.step_s = 0.005
    async with aclosing(client.generate(make_request("a", 1000))) as outputs:
        await anext(outputs)
    await until(lambda: engine.aborted == ["a"])
    await until(lambda: not engine.open)
    assert client.num_open == 0


async def test_cancelling_the_reader_aborts(pair):
    client, engine = pair
    engine.is_holding = True
    task = asyncio.create_task(collect(client, make_request("a")))
    await until(lambda: engine.requests)
    task.cancel()
    await until(lambda: engine.aborted == ["a"])


async def test_dropping_the_iterator_aborts(pair):
    client, engine = pair
    engine.step_s = 0.005
    outputs = client.generate(make_request("a", 1000))
    await anext(outputs)
    del outputs
    gc.collect()
    await until(lambda: engine.aborted == ["a"])


async def test_a_finished_request_is_not_aborted(pair):
    client, engine = pair
    async with aclosing(client.generate(make_request("a", 4))) as outputs:
        await anext(outputs)
        await until(lambda: not engine.open)
        await asyncio.sleep(0.05)
    await client.load()
    assert engine.aborted == []


async def test_an_id_in_use_is_refused(pair):
    client, engine = pair
    engine.is_holding = True
    task = asyncio.create_task(collect(client, make_request("a")))
    await until(lambda: engine.requests)
    with pytest.raises(RequestError, match="in use"):
        await collect(client, make_request("a"))
    engine.is_holding = False
    assert await task == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("kind", [PromptTooLong, Overloaded, RequestError, Unavailable])
async def test_refusals_have_their_class(pair, kind):
    client, engine = pair
    engine.failure = (kind.__name__, "no", None)
    with pytest.raises(kind, match="no"):
        await collect(client, make_request("a"))


async def test_abort_ends_with_a_reason(pair):
    client, engine = pair
    engine.step_s = 0.005
    outputs = client.generate(make_request("a", 1000))
    await anext(outputs)
    client.abort(None)
    engine_outputs = [output async for output in outputs]
    assert engine_outputs[-1].finish_reason is FinishReason.ABORT


async def test_calls_are_answered(pair):
    client, engine = pair
    assert (await client.load()).num_pages == 512
    assert client.last_load is not None
    assert (await client.flush_cache()).ok and engine.flushes == 1
    engine.is_idle_for_flush = False
    assert (await client.flush_cache()).message == "busy"


async def test_a_call_without_an_answer_times_out(pair):
    client, engine = pair
    engine.stop()
    with pytest.raises(Unavailable, match=r"did not answer|not connected"):
        await client.load(timeout_s=0.05)


async def test_fatal_fails_everything_at_once(pair):
    client, engine = pair
    engine.is_holding = True
    tasks = [asyncio.create_task(collect(client, make_request(str(n)))) for n in range(5)]
    await until(lambda: len(engine.requests) == 5)
    engine.die("out of memory")
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1)
    assert all(isinstance(result, Unavailable) and "out of memory" in str(result) for result in results)
    assert not client.is_alive
    with pytest.raises(Unavailable, match="out of memory"):
        await collect(client, make_request("later"))


async def test_drain_lets_requests_finish(pair):
    client, engine = pair
    engine.step_s = 0.005
    task = asyncio.create_task(collect(client, make_request("a", 20)))
    await until(lambda: engine.requests)
    await asyncio.wait_for(client.drain(5), 3)
    assert engine.drained and len(await task) == 20
    assert not client.is_alive


async def test_drain_aborts_after_its_timeout(pair):
    client, engine = pair
    engine.step_s = 0.01
    task = asyncio.create_task(collect(client, make_request("a", 4000)))
    await until(lambda: engine.requests)
    await asyncio.wait_for(client.drain(0.1), 3)
    assert 0 < len(await task) < 4000


def test_merging_keeps_everything():
    first = RequestOutput("a", [1], None, None, 7, [], [], 0.5)
    merged = merge_outputs([first, RequestOutput("a", [2]), RequestOutput("a", [3], FinishReason.STOP, 3)])
    assert merged == RequestOutput("a", [1, 2, 3], FinishReason.STOP, 3, 7, [], [], 0.5)
    assert merge_outputs([first]) is first


FAKE_COMMAND = (sys.executable, str(Path(__file__).parent / "fake_engine.py"))


def config_of(model_path: str) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model_path=model_path))


async def test_process_serves_and_stops(fake):
    process = EngineProcess(config_of("x"), command=FAKE_COMMAND)
    try:
        assert await process.client.start() == fake.INFO
        assert await collect(process.client, make_request("a")) == [1, 2, 3, 1, 2]
        await asyncio.wait_for(process.client.drain(1), 5)
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        await process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_killed_process_fails_requests_within_a_second():
    process = EngineProcess(config_of("x"), command=FAKE_COMMAND)
    try:
        await process.client.start()
        outputs = process.client.generate(make_request("a", 1000))
        await anext(outputs)
        os.kill(process.pid, 9)
        with pytest.raises(Unavailable, match="killed by signal 9"):
            async with asyncio.timeout(1):
                async for _ in outputs:
                    pass
    finally:
        assert await process.stop() == -9


async def test_refusal_to_start_keeps_its_class():
    process = EngineProcess(config_of("refuse-to-start"), command=FAKE_COMMAND)
    with pytest.raises(ConfigError, match="no such model"):
        await asyncio.wait_for(process.client.start(), 10)
    await process.stop()


async def test_death_while_starting_is_noticed():
    process = EngineProcess(config_of("die-at-once"), command=FAKE_COMMAND)
    with pytest.raises(Unavailable, match="exit code 7"):
        await asyncio.wait_for(process.client.start(), 10)
    assert await process.stop() == 7


def test_engine_dies_with_its_parent(tmp_path: Path):
    """A server that is killed without a word leaves no engine behind."""
    import subprocess
    import time

    code = f"""
import asyncio, json, sys
from diptych.config import EngineConfig
from diptych.server.process import EngineProcess

async def main():
    process = EngineProcess(EngineConfig(), command={FAKE_COMMAND!r})
    await process.client.start()
    print(json.dumps(process.pid), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
