"""What a server or a Python program asks of its engine's weights and memory, over the client. No HTTP, no torch.

Tensors travel as bytes, in buckets that fit a frame; what they replace is decided by a second call (`worker.weights`).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from diptych.core.calls import (
    DropStagedWeights,
    GetWeights,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    MemoryTag,
    ReceiveWeights,
    StageCheckpoint,
    StageWeights,
    TensorBytes,
)
from diptych.core.messages import (
    ContinueGeneration,
    InFlight,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
)
from diptych.errors import DiptychError, RequestError
from diptych.server.client import EngineClient

BUCKET_NBYTES = 64 * 1024 * 1024
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


class EngineUpkeep:
    """Weights and memory of the engine behind `client`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    # ------------------------------------------------------------------ weights

    async def stage(self, update_id: str, tensors: Iterable[TensorBytes]) -> None:
        """Send tensors for an update; they change nothing yet. Raises RequestError naming one that does not fit."""
        num_buckets = 0
        async with self._dropping(update_id):
            for bucket in buckets(tensors, BUCKET_NBYTES):
                await self._client.call_workers(StageWeights(update_id, bucket), None)
                num_buckets += 1
            if not num_buckets:
                raise RequestError("no tensor was sent", param="named_tensors")

    async def commit(self, update_id: str, in_flight: InFlight, weight_version: str | None) -> int:
        """Compute with what was staged. Returns: how many requests were in flight. Raises: RequestError."""
        async with self._dropping(update_id):
            return await self._update(update_id, in_flight, weight_version, None)

    async def update_from_disk(
        self, path: str, load_format: LoadFormat, *, in_flight: InFlight, weight_version: str | None
    ) -> int:
        """Compute with another checkpoint of the same model, as `commit`."""
        update_id = new_update_id()
        checkpoint = StageCheckpoint(update_id, path, load_format)
        async with self._dropping(update_id):
            return await self._update(update_id, in_flight, weight_version, checkpoint)

    async def receive(
        self, update_id: str, group: str, *, names: list[str], dtypes: list[str], shapes: list[tuple[int, ...]]
    ) -> None:
        """Stage tensors that the trainer broadcasts now. Raises: RequestError, Unavailable."""
        async with self._dropping(update_id):
            await self._client.call_workers(ReceiveWeights(update_id, group, names, dtypes, shapes), None)

    async def join_group(self, call: JoinWeightsGroup) -> None:
        """Meet a trainer. Raises: RequestError, Unavailable if it does not come."""
        await self._client.call_workers(call, None)

    async def leave_group(self, group: str) -> None:
        """Part from a trainer. Raises: RequestError."""
        await self._client.call_workers(LeaveWeightsGroup(group), None)

    async def set_version(self, weight_version: str) -> None:
        """Call the weights otherwise."""
        await self._client.call(lambda call_id: SetWeightVersion(call_id, weight_version), None)

    async def read(self, names: Sequence[str], rows: int | None = None) -> list[TensorBytes]:
        """Whole tensors, or their first rows, however large. Raises: RequestError naming one that is not there."""
        return [await self._read_one(name, rows) for name in names]

    async def _read_one(self, name: str, rows: int | None) -> TensorBytes:
        (first,) = await self._read_rows(name, 0, 1)
        num_rows = first.shape[0] if rows is None else min(rows, first.shape[0])
        step = max(1, BUCKET_NBYTES // max(1, len(first.data)))
        pieces = [
            (await self._read_rows(name, start, min(start + step, num_rows)))[0].data
            for start in range(0, num_rows, step)
        ]
        return msgspec.structs.replace(first, shape=(num_rows, *first.shape[1:]), data=b"".join(pieces))

    async def _read_rows(self, name: str, start: int, stop: int) -> list[TensorBytes]:
        value = await self._client.call_workers(GetWeights([name], start, stop), None)
        return msgspec.msgpack.decode(value, type=list[TensorBytes])

    async def _update(
        self, update_id: str, in_flight: InFlight, weight_version: str | None, checkpoint: StageCheckpoint | None
    ) -> int:
        reply = await self._client.call(
            lambda call_id: UpdateWeights(call_id, update_id, in_flight, checkpoint, weight_version), None
        )
        return msgspec.msgpack.decode(reply.value, type=int)

    @asynccontextmanager
    async def _dropping(self, update_id: str) -> AsyncIterator[None]:
        """What is staged is dropped if the update comes to nothing."""
        try:
            yield
        except BaseException:
            with suppress(DiptychError):
                self._client.tell_workers(DropStagedWeights(update_id))
            raise

    # ------------------------------------------------------------------ pauses and memory

    async def pause(self, mode: InFlight) -> None:
        """Hold new requests, and plan no steps for those in flight."""
        await self._client.call(lambda call_id: PauseGeneration(call_id, mode), None)

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._client.call(ContinueGeneration, None)

    async def release(self, tags: Iterable[str], in_flight: Literal["wait", "abort"]) -> str:
        """Return memory to the system. Returns: a sentence. Raises: RequestError, Unavailable."""
        wanted = memory_tags(tags)
        return (await self._client.call(lambda call_id: ReleaseMemory(call_id, wanted, in_flight), None)).message

    async def resume(self, tags: Iterable[str]) -> str:
        """Have memory again. Returns: a sentence. Raises: RequestError."""
        wanted = memory_tags(tags)
        return (await self._client.call(lambda call_id: ResumeMemory(call_id, wanted), None)).message


def new_update_id() -> str:
    """A name for an update that nobody else uses."""
    return uuid.uuid4().hex


def memory_tags(tags: Iterable[str]) -> list[MemoryTag]:
    """The parts that the words name; no words mean all parts. Raises RequestError for another word."""
    known: dict[str, MemoryTag] = {tag: tag for tag in MEMORY_TAGS}
    wanted = list(dict.fromkeys(tags)) or list(known)
    unknown = [tag for tag in wanted if tag not in known]
    if unknown:
        raise RequestError(f"tags must be among {', '.join(MEMORY_TAGS)}, got {unknown[0]!r}", param="tags")
    return [known[tag] for tag in wanted]


def buckets(tensors: Iterable[TensorBytes], nbytes: int) -> Iterator[list[TensorBytes]]:
    """The tensors in groups of at most `nbytes` bytes, each cut where it has to be."""
    bucket: list[TensorBytes] = []
    room = nbytes
    for tensor in tensors:
        start = 0
        while start == 0 or start < len(tensor.data):
            piece = msgspec.structs.replace(tensor, data=tensor.data[start : start + room], start=start)
            bucket.append(piece)
            start += len(piece.data)
            room -= len(piece.data)
            if room == 0:
                yield bucket
                bucket, room = [], nbytes
            if not tensor.data:
                break
    if bucket:
        yield bucket


def float_values(tensor: TensorBytes) -> npt.NDArray[np.float64]:
    """Its elements as numbers."""
    if tensor.dtype == "bfloat16":
        widened = np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32) << 16
        values = widened.view(np.float32)
    else:
        values = np.frombuffer(tensor.data, dtype=f"<f{np.dtype(tensor.dtype).itemsize}")
    return values.reshape(tensor.shape).astype(np.float64)
