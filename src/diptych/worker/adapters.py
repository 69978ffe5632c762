"""A rank's adapters: every loaded one ready in memory, some of them in the slots from which steps compute.

Which adapter goes into which slot is decided by the engine, and comes with the batch that needs it. Worker's thread,
but files are read on another, so that steps go on meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from diptych.config import LoraConfig
from diptych.core.batch import NO_ADAPTER, AdapterPlacement, SequenceStep
from diptych.core.calls import AdapterCall, AdapterFacts, AdapterIsRead, LoadAdapter, ReadAdapter, UnloadAdapter
from diptych.errors import AdapterError, ConfigError, InvariantError, Unsupported
from diptych.layers.lora import StepAdapters
from diptych.models.adapter_files import read_adapter
from diptych.models.adapters import ModelAdapters, PreparedAdapter
from diptych.models.transformer import Transformer
from diptych.worker.slots import SlotTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """An adapter in memory, ready for a slot."""

    prepared: PreparedAdapter
    facts: AdapterFacts


class NoAdapters:
    """In place of a store where there can be none. reason: what a call is answered with."""

    num_slots = 0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def obey(self, call: AdapterCall) -> bytes:
        """Refuse. Raises: Unsupported."""
        if isinstance(call, UnloadAdapter):
            return b""
        raise Unsupported(self._reason, param="lora_path")

    def place(self, placements: Sequence[AdapterPlacement]) -> None:
        """Nothing can have been loaded."""
        raise InvariantError(f"{len(placements)} adapters are to be placed where there can be none")


def create_adapters(config: LoraConfig, model: Transformer) -> AdapterStore | NoAdapters:
    """The store of a loaded model, or why it has none."""
    if model.device.type != "cpu":
        return NoAdapters(f"adapters are not served on {model.device.type} yet, only on a CPU")
    if model.groups.pipeline.size > 1 or model.groups.data.size > 1:
        return NoAdapters("adapters are not served over pipeline stages or data parallel groups yet; use --tp-size")
    if config.max_loras == 0:  # said last of what a flag decides: with data parallel groups it is 0 whatever was asked
        return NoAdapters("adapters are off: start with --max-loras above 0")
    if model.layer_blocks is None:
        return NoAdapters(f"adapters are not served for {model.config.architecture}: its attention has other parts")
    return AdapterStore(model, num_slots=config.max_loras, max_rank=config.max_lora_rank)


class AdapterStore:
    """Adapters of one model.

    Args: model: loaded and packed, of layers that can have adapters. num_slots: adapters that one step may use at most.
    max_rank: of any adapter.
    """

    def __init__(self, model: Transformer, *, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self._layers = ModelAdapters(model, num_slots)
        self._max_rank = max_rank
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="diptych-adapters")
        self._reading: dict[int, Future[_Read]] = {}
        self._loaded: dict[int, _Read] = {}
        self._in_slots: dict[int, int] = {}

    def obey(self, call: AdapterCall) -> bytes:
        """Do what a call asks. Raises: AdapterError, and then nothing has changed."""
        match call:
            case ReadAdapter(adapter_id, path):
                self._reading[adapter_id] = self._reader.submit(self._read, path)
                return b""
            case AdapterIsRead(adapter_id):
                return msgspec.msgpack.encode(self._reading[adapter_id].done())
            case LoadAdapter(adapter_id):
                read = self._loaded[adapter_id] = self._reading.pop(adapter_id).result()
                return msgspec.msgpack.encode(read.facts)
            case UnloadAdapter(adapter_id):
                self._unload(adapter_id)
                return b""

    def place(self, placements: Sequence[AdapterPlacement]) -> None:
        """Put adapters into slots, in whose place no later step needs what was there."""
        for adapter_id, slot in placements:
            read = self._loaded.get(adapter_id)
            if read is None:
                raise InvariantError(f"adapter {adapter_id} is to be placed, but is not loaded")
            self._layers.put(slot, read.prepared)
            self._in_slots[slot] = adapter_id

    def begin_step(self, steps: Sequence[SequenceStep], slots: SlotTable) -> None:
        """Under which adapters the tokens of these rows are; the rows of each adapter are adjacent."""
        self._layers.begin_step(_step_adapters(steps, slots) if slots.has_adapters else None)

    def _read(self, path: str) -> _Read:
        """On the reader's thread."""
        try:
            found = read_adapter(Path(path).expanduser(), max_rank=self._max_rank)
        except ConfigError as error:
            raise AdapterError(str(error)) from error
        with torch.inference_mode():
            prepared = self._layers.prepare(found.modules, path)
        nbytes = sum(part.nbytes for linear in prepared for part in linear if part is not None)
        modules = sorted({name.rpartition(".")[2] for name in found.modules})
        logger.info("adapter %s: rank %d, %s, %.1f MB", path, found.rank, ", ".join(modules), nbytes / 1e6)
        return _Read(prepared, AdapterFacts(found.digest, found.rank, nbytes))

    def _unload(self, adapter_id: int) -> None:
        reading = self._reading.pop(adapter_id, None)
        if reading is not None and not reading.cancel():
            reading.add_done_callback(Future.exception)  # what it found, or failed with, is of no interest any more
        self._loaded.pop(adapter_id, None)
        for slot in [slot for slot, held in self._in_slots.items() if held == adapter_id]:
            self._layers.clear(slot)
            del self._in_slots[slot]


def _step_adapters(steps: Sequence[SequenceStep], slots: SlotTable) -> StepAdapters | None:
    """Segments of adjacent rows under one adapter; None if no row is under any."""
    segments: list[tuple[int, int, int]] = []
    end = 0
    for step in steps:
        adapter = slots.occupant(step.slot).adapter_slot
        if segments and segments[-1][2] == adapter:
            begin, count, _ = segments.pop()
            segments.append((begin, count + step.num_tokens, adapter))
        else:
            segments.append((end, step.num_tokens, adapter))
        end += step.num_tokens
    return StepAdapters(segments) if any(slot != NO_ADAPTER for _, _, slot in segments) else None
