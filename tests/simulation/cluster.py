"""A whole cluster in one thread: real schedulers, senders, receivers and peers; virtual time, a network that
misbehaves.

Everything is drawn from one seed, so a failing seed replays. Engines compute with the toy worker, whose output depends
on every page, and move bytes by the loopback backend, which really copies them when the network delivers.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
from sharded_toy import NUM_KV_HEADS, NUM_LAYERS, ShardedToyWorker

from diptych.core.batch import Batch, FinishReason
from diptych.core.messages import RequestFailed, RequestOutput
from diptych.core.request import HandTo, Request, SamplingParams, TakeFrom
from diptych.engine.toy import expected_output
from diptych.errors import DiptychError
from diptych.kv.cache import KVCache
from diptych.scheduler.scheduler import Scheduler
from diptych.scheduler.step import SchedulerLimits
from diptych.transfer.agent import StepwiseAgent, TransferEvent
from diptych.transfer.backend import HOST, MemoryRegion
from diptych.transfer.extension import LayoutFields, PeerExtension, RankFields
from diptych.transfer.handoff import HandoffLayout, HandoffRows, HandoffSlots
from diptych.transfer.hinge import Hinge
from diptych.transfer.loopback import Faults, LoopbackBackend, LoopbackNetwork
from diptych.transfer.ports import HingeLimits, RankSite, Site

VOCAB = 50
EOS = (7,)


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What goes wrong in one run. delays in virtual seconds; probabilities each time; faults a schedule of events.

    num_strangers: engines with another cluster key, to which no connection opens. shapes: tp and pp sizes of engines.
    max_linger: seconds by which a rank's process may outlive that of its killed engine.
    """

    max_delay: float = 0.01
    drop_frame: float = 0.0
    write_faults: Faults = field(default_factory=Faults)
    num_kills: int = 0
    num_freezes: int = 0
    num_strangers: int = 0
    cancel: float = 0.0
    shapes: tuple[tuple[int, int], ...] = ((1, 1),)
    max_linger: float = 0.0


class ControlNetwork:
    """Frames between addresses, in order for each pair of processes, delayed or dropped; a dead address refuses."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self.now = 0.0
        self._rng = rng
        self._weather = weather
        self._wire: list[tuple[float, int, str, list[bytes]]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._serial = itertools.count()
        self._inboxes: dict[str, deque[list[bytes]]] = {}
        self._opened: set[tuple[str, str]] = set()
        self.strangers: set[str] = set()

    def listen(self, address: str) -> deque[list[bytes]]:
        """Open an address; whatever an earlier process there did not read is lost with it."""
        self._inboxes[address] = deque()
        return self._inboxes[address]

    def hang_up(self, address: str) -> None:
        """The process at the address dies: nobody listens, and what is on its way to it is lost."""
        del self._inboxes[address]
        self._wire = [entry for entry in self._wire if entry[2] != address]
        heapq.heapify(self._wire)

    def is_refused(self, address: str) -> bool:
        return address not in self._inboxes

    def send(self, source: str, address: str, frames: list[bytes]) -> None:
        if address not in self._inboxes or {address, source.partition("/")[0]} & self.strangers:
            return
        self._opened.add((source, address))
        if self._rng.random() < self._weather.drop_frame:
            return
        due = max(self.now + self._rng.uniform(0, self._weather.max_delay), self._last.get((source, address), 0.0))
        self._last[source, address] = due
        heapq.heappush(self._wire, (due, next(self._serial), address, frames))

    def has_opened(self, source: str, address: str) -> bool:
        return (source, address) in self._opened

    def deliver(self) -> None:
        while self._wire and self._wire[0][0] <= self.now:
            _, _, address, frames = heapq.heappop(self._wire)
            self._inboxes[address].append(frames)


class ControlSocket:
    """One engine's end of the control network."""

    def __init__(self, network: ControlNetwork, address: str, instance_id: str) -> None:
        self._network = network
        self._source = f"{address}/{instance_id}"
        self._inbox = network.listen(address)

    def send(self, address: str, frames: list[bytes]) -> None:
        self._network.send(self._source, address, frames)

    def receive(self) -> list[tuple[int, list[bytes]]]:
        messages = [(0, frames) for frames in self._inbox]
        self._inbox.clear()
        return messages

    def is_refused(self, address: str) -> bool:
        return self._network.is_refused(address)

    def withdraw(self, address: str) -> bool:
        return not self._network.has_opened(self._source, address)

    def forget(self, address: str) -> None:
        """Nothing is kept per connection."""


class Engine:
    """One engine process: what `EngineCore` and its hinge do, a turn at a time."""

    def __init__(self, cluster: Cluster, name: str, *, page_size: int, num_pages: int) -> None:
        rng = cluster.rng
        self.cluster = cluster
        self.address = f"{name}:1"
        self.instance_id = f"{name}-{rng.getrandbits(32):08x}"
        self.is_frozen = False
        self.tp_size, self.pp_size = rng.choice(cluster.weather.shapes)
        self.worker = ShardedToyWorker(
            num_pages, page_size, vocab_size=VOCAB, tp_size=self.tp_size, pp_size=self.pp_size
        )
        self.limits = SchedulerLimits(
            max_num_seqs=rng.choice([2, 8]),
            max_num_batched_tokens=rng.choice([4, 16, 64]),
            max_inflight_steps=rng.choice([1, 2]),
            max_queued_requests=100,
            max_model_len=num_pages * page_size,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
        )
        num_ranks = len(self.worker.layouts)
        self.backends = [LoopbackBackend(cluster.wire, f"{self.instance_id}-{rank}") for rank in range(num_ranks)]
        self.lifelines = [f"{name}:{self.instance_id}-{rank}" for rank in range(num_ranks)] if num_ranks > 1 else []
        for lifeline in self.lifelines:
            cluster.network.listen(lifeline)
        self._events: list[tuple[TransferEvent, int]] = []
        self.agents = [self._agent(rank) for rank in range(num_ranks)]
        site = self._site(num_pages, name)
        socket = ControlSocket(cluster.network, self.address, self.instance_id)
        self.hinge = Hinge(site, socket, limits=cluster.hinge_limits, rng=rng)
        self.cache = KVCache(num_pages, page_size, prefix_caching=rng.random() < 0.7)
        self.scheduler = Scheduler(
            self.limits,
            self.cache,
            source=self.hinge.receiver,
            sink=self.hinge.sender,
            clock=lambda: cluster.now,
        )
        self._batches: deque[tuple[float, Batch]] = deque()

    def _agent(self, rank: int) -> StepwiseAgent:
        def note(event: TransferEvent) -> None:
            self._events.append((event, rank))

        return StepwiseAgent(self.backends[rank], on_event=note, clock=lambda: self.cluster.now)

    def _site(self, num_pages: int, name: str) -> Site:
        handoff = HandoffLayout(num_slots=self.cluster.rng.choice([1, 4]), num_top_logprobs=4, hidden_nbytes=0)
        self._rows = np.zeros(handoff.nbytes, dtype=np.uint8)
        for backend, memory in zip(self.backends, self.worker.memories, strict=True):
            backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        self.backends[0].register([MemoryRegion(self._rows.ctypes.data, handoff.nbytes)])
        fields = [LayoutFields.of(layout, num_pages) for layout in self.worker.layouts]
        ranks = [RankFields(layout=part, lifeline=life) for part, life in zip(fields, self.lifelines, strict=False)]
        identity = PeerExtension(
            instance_id=self.instance_id,
            layout=fields[0],
            model_layers=NUM_LAYERS,
            model_kv_heads=NUM_KV_HEADS,
            model_fingerprint="toy",
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            ranks=ranks,
            control_endpoint=self.address,
            num_top_logprobs=4,
        )
        return Site(
            identity=identity,
            endpoint=name,
            port=1,
            agents=self.agents,
            ranks=[
                RankSite(
                    agent_name=backend.name,
                    agent_metadata=backend.metadata(),
                    kv_base=memory.ctypes.data,
                    kv_space=HOST,
                )
                for backend, memory in zip(self.backends, self.worker.memories, strict=True)
            ],
            handoff_layout=handoff,
            handoff_base=self._rows.ctypes.data,
            handoff_rows=HandoffRows(handoff, self._rows),
            handoff_slots=HandoffSlots(handoff.num_slots),
        )

    def add(self, request: Request) -> None:
        try:
            if isinstance(request.handoff, HandTo):
                self.hinge.sender.expect(request, self.cluster.now)
            self.scheduler.add(request)
        except DiptychError as error:
            self.cluster.hear(self, RequestFailed.of(request.request_id, error))

    def turn(self) -> None:
        """One turn of the loop, with a step's computation taking some virtual time."""
        if self.is_frozen:
            return
        now = self.cluster.now
        for agent in self.agents:
            agent.poll()
        events, self._events[:] = list(self._events), []
        for event, rank in events:
            self.hinge.on_event(event, rank)
        self.hinge.tick(now, now)
        for request in self.hinge.sender.take_requests():
            try:
                self.scheduler.add(request)
            except DiptychError as error:
                self.hinge.sender.refuse(request, error)
        if self._batches and self._batches[0][0] <= now:
            self.scheduler.apply(self.worker.step(self._batches.popleft()[1]))
        batch = self.scheduler.plan()
        if batch is not None:
            self._batches.append((now + self.cluster.rng.uniform(0.0, 0.02), batch))
        self.scheduler.check()
        self.hinge.check()
        for answer in self.scheduler.take_answers():
            self.cluster.hear(self, answer)

    def kill(self) -> None:
        """Its process; those of its ranks follow when the kernel, or their node, has noticed."""
        self.cluster.network.hang_up(self.address)
        for rank in range(len(self.backends)):
            if not self.lifelines:
                self._kill_rank(rank)
                continue
            linger = self.cluster.rng.uniform(0.0, self.cluster.weather.max_linger)
            self.cluster.at(self.cluster.now + linger, partial(self._kill_rank, rank))

    def _kill_rank(self, rank: int) -> None:
        self.cluster.wire.kill(self.backends[rank])
        if self.lifelines:
            self.cluster.network.hang_up(self.lifelines[rank])

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and self.hinge.is_idle


@dataclass(eq=False)
class Client:
    """One request as a client sees it: sent to a decode engine, which may be killed under it."""

    request: Request
    engine: Engine
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    failure: RequestFailed | None = None
    was_killed: bool = False
    cancelled: bool = False
    sent_at: float = 0.0
    ended_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.was_killed or self.reason is not None or self.failure is not None


class Cluster:
    """Engines, clients and the weather between them."""

    def __init__(self, seed: int, weather: Weather, *, num_prefill: int = 2, num_decode: int = 2) -> None:
        self.rng = random.Random(seed)
        self.weather = weather
        self.now = 0.0
        self.network = ControlNetwork(self.rng, weather)
        self.wire = LoopbackNetwork(seed=seed, faults=weather.write_faults)
        self.hinge_limits = HingeLimits(room_timeout=5.0, transfer_timeout=8.0)
        self.engines: dict[str, Engine] = {}
        self.clients: dict[str, Client] = {}
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        for name in [*(f"p{i}" for i in range(num_prefill)), *(f"d{i}" for i in range(num_decode))]:
            self.start(name)
        for name in self.rng.sample(list(self.engines), weather.num_strangers):
            self.network.strangers.add(self.engines[name].address)

    def start(self, name: str) -> None:
        """Start an engine, or a new instance of one."""
        page_size = self.rng.choice([2, 4])
        self.engines[name] = Engine(self, name, page_size=page_size, num_pages=self.rng.choice([96, 128]) // page_size)

    def kill(self, name: str) -> None:
        """kill -9, and a new instance on the same address."""
        self.trace.append(f"{self.now:.3f} kill {name}")
        engine = self.engines[name]
        engine.kill()
        for client in self.clients.values():
            if client.engine is engine and not client.is_over:
                client.was_killed = True
        self.start(name)

    def submit(self, prompt: list[int], *, both_told: bool, **sampling: object) -> Client:
        """A client's request to a random decode engine with a random prefill engine."""
        decode = self.engines[self.rng.choice([n for n in self.engines if n.startswith("d")])]
        prefill = self.engines[self.rng.choice([n for n in self.engines if n.startswith("p")])]
        room = self.rng.getrandbits(63) if both_told else None
        request_id = f"r{len(self.clients)}"
        params = SamplingParams(temperature=0.0, **sampling)
        handoff = TakeFrom(prefill.address, prefill.instance_id, room)
        request = Request(
            request_id=request_id, prompt_token_ids=prompt, sampling=params, arrival_time=self.now, handoff=handoff
        )
        client = self.clients[request_id] = Client(request, decode, sent_at=self.now)
        decode.add(request)
        if room is not None:
            twin = msgspec.structs.replace(request, request_id=f"{request_id}/prefill", handoff=HandTo(room))
            prefill.add(twin)
        return client

    def hear(self, engine: Engine, answer: RequestOutput | RequestFailed) -> None:
        """An engine answers one of its requests; prefill's own answers interest nobody."""
        client = self.clients.get(answer.request_id)
        if client is None or client.engine is not engine:
            return
        assert not client.is_over, f"{answer.request_id} was answered after its end"
        if isinstance(answer, RequestFailed):
            client.failure = answer
        else:
            client.tokens += answer.token_ids
            client.reason = answer.finish_reason
        if client.is_over:
            client.ended_at = self.now

    def advance(self, seconds: float) -> None:
        """Let time pass, deliver what is due, give every engine a turn in random order."""
        self.now += seconds
        self.network.now = self.now
        self.wire.advance(seconds)
        self.network.deliver()
        for engine in self.rng.sample(list(self.engines.values()), len(self.engines)):
            engine.turn()

    def run(self, num_requests: int, *, max_seconds: float = 120.0) -> None:
        """Send requests and bad weather for a while, then wait for calm; every invariant is checked on the way."""
        self._schedule(num_requests)
        while self._events or not self.is_calm:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.advance(self.rng.choice([0.001, 0.005, 0.02]))
            if self.now > max_seconds:
                raise AssertionError(f"no calm after {self.now:.0f} s: {self.describe()}")

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (seconds, next(self._serial), act))

    def _schedule(self, num_requests: int) -> None:
        rng, at = self.rng, self.at
        for _ in range(num_requests):
            at(rng.uniform(0, 2.0), self._send_random)
        for _ in range(self.weather.num_kills):
            at(rng.uniform(0, 3.0), lambda: self.kill(rng.choice(list(self.engines))))
        for _ in range(self.weather.num_freezes):
            name, start = rng.choice(list(self.engines)), rng.uniform(0, 2.0)
            at(start, partial(self._freeze, name))
            at(start + rng.uniform(0.1, 6.0), partial(self._thaw, name))

    def _send_random(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(3) for _ in range(rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 30]))]
        client = self.submit(
            prompt, both_told=rng.random() < 0.3, max_tokens=rng.choice([1, 2, 6, 12]), ignore_eos=rng.random() < 0.5
        )
        if rng.random() < self.weather.cancel:
            self.at(self.now + rng.uniform(0, 0.3), lambda: self._cancel(client))

    def _cancel(self, client: Client) -> None:
        if not client.is_over and self.engines.get(client.engine.address.split(":")[0]) is client.engine:
            client.cancelled = True
            client.engine.scheduler.abort(client.request.request_id)

    def _freeze(self, name: str) -> None:
        self.trace.append(f"{self.now:.3f} freeze {name}")
        self.engines[name].is_frozen = True
        for backend in self.engines[name].backends:
            self.wire.partition(backend.name)

    def _thaw(self, name: str) -> None:
        self.trace.append(f"{self.now:.3f} thaw {name}")
        self.engines[name].is_frozen = False
        for backend in self.engines[name].backends:
            self.wire.heal(backend.name)

    @property
    def is_calm(self) -> bool:
        return all(client.is_over for client in self.clients.values()) and all(e.is_idle for e in self.engines.values())

    def check_answers(self) -> None:
        """Every client that was not killed with its engine has the toy model's output, or the beginning of it."""
        for client in self.clients.values():
            expected = expected_output(
                client.request,
                vocab_size=VOCAB,
                max_len=client.engine.limits.max_model_len,
                eos_token_ids=EOS,
            )
            got = client.tokens
            if client.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == expected, f"{client.request}: {got} is not {expected}"
            else:
                assert got == expected[: len(got)], f"{client.request}: {got} does not begin {expected}"

    def describe(self) -> str:
        """What is not at rest."""
        parts = [f"{name}: idle={engine.is_idle}" for name, engine in self.engines.items()]
        parts += [
            f"{c.request.request_id} on {c.engine.instance_id} open" for c in self.clients.values() if not c.is_over
        ]
        return "; ".join([*parts, *self.trace])
