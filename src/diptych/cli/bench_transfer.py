"""`diptych bench transfer`: how fast KV moves between two processes of this machine, and what it costs the host.

Every size is written in two ways in turn: as an engine does it (plan, transfer agent's thread, its event), and by NIXL
alone (one contiguous WRITE of as many bytes, polled without pause). Host memory only; needs no model and no torch.
"""

from __future__ import annotations

import mmap
import multiprocessing
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from diptych.cli.bench_unlike import Timer, compare, print_ways
from diptych.cli.flags import parse_flags
from diptych.errors import TransferError
from diptych.kv.layout import KVLayout
from diptych.transfer.agent import AgentReady, PeerAdded, TransferEvent, WriteDone
from diptych.transfer.backend import MemoryRegion, Write
from diptych.transfer.nixl import NixlBackend
from diptych.transfer.plan import Descriptors, Int64s, PageOrder, PageTemplate, page_template, plan
from diptych.worker.transfer_agent import TransferAgent

DESCRIPTION = "Bandwidth of KV transfers between two processes, by descriptor size and layout, against NIXL alone."
KIB, MIB = 2**10, 2**20
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB)
NUM_LAYERS = 16
WAIT_S = 30.0

Event = TypeVar("Event", bound=TransferEvent)


@dataclass(frozen=True, kw_only=True)
class BenchTransferFlags:
    """What to measure."""

    mib: int = 64
    """MiB moved for each row; sizes above it are left out."""
    repeats: int = 7
    """Times that each row is measured, in turn with NIXL alone; the best counts."""
    src_tp: int = 0
    """With dst_tp: compare direct and packed writes from a rank of an engine of this tp size, instead of the rest."""
    dst_tp: int = 0
    """The tp size of the engine that it is sent to."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One row. page_nbytes: of a page, cut in `num_pieces` pieces. ratio: of the two speeds in this row."""

    layout: str
    page_nbytes: int
    num_pieces: int
    gb_per_s: float
    bare_gb_per_s: float

    @property
    def ratio(self) -> float:
        """Our speed by that of NIXL alone."""
        return self.gb_per_s / self.bare_gb_per_s


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds for 1,000 pages. plan, hand_over: on the engine's thread. prepare: by NIXL, on the agent's."""

    pages: str
    num_descriptors: int
    plan_us: float
    hand_over_us: float
    prepare_us: float


class Bench:
    """The sending side: a transfer agent, a bare NIXL agent, and the receiving process behind both."""

    def __init__(self, nbytes: int, receiver: Connection) -> None:
        self.nbytes = nbytes
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.memory = allocated(nbytes)
        self.src_base = self.memory.ctypes.data
        regions = [MemoryRegion(self.src_base, nbytes)]
        metadata, self.dst_base = msgspec.msgpack.decode(receiver.recv_bytes(), type=tuple[bytes, int])
        self.bare = NixlBackend(f"bare-{uuid.uuid4()}")
        self.bare.register(regions)
        self.peer = self.bare.add_peer(metadata)
        self.agent = TransferAgent(lambda: NixlBackend(f"bench-{uuid.uuid4()}"), regions, on_event=self._events.put)
        self.agent.start()
        self._next(AgentReady)
        self.agent.add_peer("receiver", metadata)
        self._next(PeerAdded)
        self._num_writes = 0
        self.transport = "unknown"

    def hand_over(self, descriptors: Descriptors) -> None:
        """Give a write to the agent's thread."""
        self._num_writes += 1
        write = Write(peer=self.peer, descriptors=descriptors, notification=b"0_kv_0_1")
        self.agent.write(self._num_writes, write)

    def wait(self) -> None:
        """Until that write is done."""
        self.transport = self._next(WriteDone).transport

    def close(self) -> None:
        """End the agent's thread and the bare agent."""
        self.agent.close()
        self.bare.close()

    def write_bare(self, nbytes: int) -> None:
        """One WRITE by NIXL alone, first byte to last."""
        nixl = self.bare.agent
        local, remote = (nixl.get_xfer_descs(row(base, nbytes), "DRAM") for base in (self.src_base, self.dst_base))
        handle = nixl.initialize_xfer("WRITE", local, remote, self.peer, b"0_kv_0_1")
        state = nixl.transfer(handle)
        while state == "PROC":
            state = nixl.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise TransferError(f"NIXL alone could not write {nbytes} bytes: {state}")

    def _next(self, kind: type[Event]) -> Event:
        try:
            event = self._events.get(timeout=WAIT_S)
        except queue.Empty:
            raise TransferError(f"no {kind.__name__} came within {WAIT_S:g} s; try again") from None
        if not isinstance(event, kind):
            raise TransferError(f"expected {kind.__name__}, got {event}")
        return event


def run(arguments: Sequence[str]) -> int:
    """Measure and print."""
    flags = parse_flags(BenchTransferFlags, arguments, prog="diptych bench transfer", description=DESCRIPTION)
    if flags.src_tp or flags.dst_tp:
        return _run_unlike(flags)
    with bench(flags.mib * MIB) as running:
        rows = [row for order in PageOrder for row in bandwidths(running, order, repeats=flags.repeats)]
        costs = host_costs(running)
        transport = running.transport
    if flags.json:
        print(msgspec.json.encode({"transport": transport, "bandwidth": rows, "host": costs}).decode())
    else:
        _print_tables(rows, costs, transport)
    return 0


def _run_unlike(flags: BenchTransferFlags) -> int:
    with bench(flags.mib * MIB) as running:

        def write(descriptors: Descriptors) -> None:
            running.hand_over(descriptors)
            running.wait()

        timer = Timer(
            write=write,
            in_turn=partial(in_turn, repeats=flags.repeats),
            src_base=running.src_base,
            dst_base=running.dst_base,
            memory=running.memory,
        )
        rows = compare(timer, src_tp=flags.src_tp, dst_tp=flags.dst_tp)
    if flags.json:
        print(msgspec.json.encode({"transport": running.transport, "ways": rows}).decode())
    else:
        print_ways(rows, src_tp=flags.src_tp, dst_tp=flags.dst_tp)
    return 0


@contextmanager
def bench(nbytes: int) -> Iterator[Bench]:
    """A sender, and a receiver in a process of its own, each with `nbytes` of host memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, nbytes), daemon=True)
    process.start()
    theirs.close()
    running = Bench(nbytes, ours)
    try:
        yield running
    finally:
        running.close()
        ours.close()
        process.join(timeout=WAIT_S)


def receive(connection: Connection, nbytes: int) -> None:
    """The receiving process: polls as an engine that waits for notifications does, until the pipe closes."""
    memory = allocated(nbytes)
    backend = NixlBackend(f"receiver-{uuid.uuid4()}")
    backend.register([MemoryRegion(memory.ctypes.data, nbytes)])
    connection.send_bytes(msgspec.msgpack.encode((backend.metadata(), memory.ctypes.data)))
    while not connection.poll(0.0003):
        backend.notifications()
    backend.close()


def bandwidths(running: Bench, order: PageOrder, *, repeats: int) -> Iterator[Bandwidth]:
    """A row for each page size; pages are scattered on both sides, so that none are joined."""
    for page_nbytes in SIZES:
        num_pages = running.nbytes // page_nbytes
        if num_pages == 0:
            continue
        template = template_of(page_nbytes, order)
        src_pages, dst_pages = scattered(num_pages, 1), scattered(num_pages, 2)
        pieces = num_pages * template.num_runs

        def ours(template: PageTemplate = template, src: Int64s = src_pages, dst: Int64s = dst_pages) -> None:
            running.hand_over(planned(running, template, src, dst))
            running.wait()

        def bare(nbytes: int = num_pages * page_nbytes) -> None:
            running.write_bare(nbytes)

        ours_s, bare_s = in_turn(ours, bare, repeats=repeats)
        moved = num_pages * page_nbytes / 1e9
        yield Bandwidth(order.value, page_nbytes, pieces // num_pages, moved / ours_s, moved / bare_s)


def host_costs(running: Bench, *, num_pages: int = 1000, page_nbytes: int = 16 * KIB) -> list[HostCost]:
    """What 1,000 pages of equal layouts cost, scattered and adjacent; the copying itself is not in it."""
    template = template_of(page_nbytes, PageOrder.PAGE_MAJOR)
    num_pages = min(num_pages, running.nbytes // page_nbytes)
    adjacent = np.arange(num_pages, dtype=np.int64)
    nixl = running.bare.agent
    costs = []
    for pages, src, dst in (
        ("scattered", scattered(num_pages, 1), scattered(num_pages, 2)),
        ("adjacent", adjacent, adjacent),
    ):
        descriptors = planned(running, template, src, dst)

        def hand_over(descriptors: Descriptors = descriptors) -> None:
            running.hand_over(descriptors)

        def prepare(descriptors: Descriptors = descriptors) -> None:
            local = nixl.get_xfer_descs(descriptors.src_rows(0), "DRAM")
            remote = nixl.get_xfer_descs(descriptors.dst_rows(0), "DRAM")
            nixl.initialize_xfer("WRITE", local, remote, running.peer, b"0_kv_0_1").release()

        costs.append(
            HostCost(
                pages,
                len(descriptors),
                plan_us=1e6 * median_s(partial(planned, running, template, src, dst)),
                hand_over_us=1e6 * median_s(hand_over, after=running.wait),
                prepare_us=1e6 * median_s(prepare),
            )
        )
    return costs


def template_of(page_nbytes: int, order: PageOrder) -> PageTemplate:
    """Equal page-major layouts, or a layer-major destination: 2 x NUM_LAYERS pieces a page."""
    layout = KVLayout.single_rank(
        NUM_LAYERS, 1, head_dim=page_nbytes // (NUM_LAYERS * 2 * 16 * 2), page_size=16, dtype="bfloat16"
    )
    return page_template(layout, layout, dst_order=order)


def planned(running: Bench, template: PageTemplate, src_pages: Int64s, dst_pages: Int64s) -> Descriptors:
    """The descriptors of one write over the whole memory."""
    step = running.nbytes // template.num_dst_regions
    bases = [running.dst_base + index * step for index in range(template.num_dst_regions)]
    return plan(template, src_pages, dst_pages=dst_pages, src_base=running.src_base, dst_bases=bases)


def scattered(num_pages: int, seed: int) -> Int64s:
    """All pages once, in an order of no meaning."""
    return np.random.default_rng(seed).permutation(num_pages).astype(np.int64)


def allocated(nbytes: int) -> NDArray[np.uint8]:
    """Host memory as the KV pool has it, every page of it touched."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    memory[:] = 1
    return memory


def row(address: int, nbytes: int) -> NDArray[np.uint64]:
    """One descriptor as NIXL takes it."""
    return np.array([[address, nbytes, 0]], dtype=np.uint64)


def in_turn(first: Callable[[], None], second: Callable[[], None], *, repeats: int) -> tuple[float, float]:
    """Least seconds of two things measured alternately, so that a busy machine slows both alike."""
    first()
    second()
    times = np.array([(timed(first), timed(second)) for _ in range(repeats)])
    first_s, second_s = times.min(axis=0)
    return float(first_s), float(second_s)


def median_s(call: Callable[[], object], *, after: Callable[[], object] | None = None, repeats: int = 30) -> float:
    """Median seconds of a call; `after` is called each time and not counted."""
    times = []
    for _ in range(repeats):
        times.append(timed(call))
        if after is not None:
            after()
    return float(np.median(times))


def timed(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _print_tables(rows: Sequence[Bandwidth], costs: Sequence[HostCost], transport: str) -> None:
    console = Console()
    table = Table(title=f"host memory, two processes, over {transport}")
    for column in ("layout", "page KiB", "pieces", "piece KiB", "GB/s", "NIXL alone", "ratio"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for line in rows:
        piece = line.page_nbytes / line.num_pieces / KIB
        cells = (line.page_nbytes // KIB, line.num_pieces, f"{piece:g}", f"{line.gb_per_s:.2f}")
        table.add_row(line.layout, *map(str, cells), f"{line.bare_gb_per_s:.2f}", f"{line.ratio:.2f}")
    console.print(table)
    table = Table(title="1,000 pages, microseconds of host time")
    for column in ("pages", "descriptors", "plan", "hand over", "engine's thread", "NIXL prepares"):
        table.add_column(column, justify="left" if column == "pages" else "right")
    for cost in costs:
        engine_us = cost.plan_us + cost.hand_over_us
        numbers = (cost.plan_us, cost.hand_over_us, engine_us, cost.prepare_us)
        table.add_row(cost.pages, str(cost.num_descriptors), *(f"{number:.0f}" for number in numbers))
    console.print(table)
