"""What an engine asks of its workers besides steps, and how they answer. Plain typed data; never imports torch.

A call is ordered with the steps: a worker obeys it once every step submitted before it is done, and before any
submitted after it. Each kind of call is a struct of its own; an owner adds its kinds to `WorkerCall`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from diptych.errors import DiptychError, InvariantError, RequestError, WorkerError

MemoryTag = Literal["weights", "kv_cache"]


class TensorBytes(msgspec.Struct, array_like=True, frozen=True):
    """One tensor, or a piece of it. dtype: torch's name ("bfloat16"). shape: of the whole tensor.

    data: its elements, row by row, little-endian, from byte `start` on.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    start: int = 0


class GetWeights(msgspec.Struct, tag=True, frozen=True):
    """The values of these tensors as the model computes with them. names: Hugging Face's.

    Answered by a msgpack list of `TensorBytes` with rows start:stop of each, or all that there are of these.
    """

    names: list[str]
    start: int = 0
    stop: int | None = None


class StageWeights(msgspec.Struct, tag=True, frozen=True):
    """Keep these tensors, or the next pieces of them, for the update `update_id`; nothing else changes.

    The first call of another update drops what was staged before.
    """

    update_id: str
    tensors: list[TensorBytes]


class StageCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Check that the model at `path` could take the place of the loaded one, and keep its name for `update_id`.

    load_format: as in ModelConfig.
    """

    update_id: str
    path: str
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"


class ReceiveWeights(msgspec.Struct, tag=True, frozen=True):
    """Stage tensors that the trainer broadcasts over the process group `group`, in this order."""

    update_id: str
    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]


class CommitWeights(msgspec.Struct, tag=True, frozen=True):
    """Compute with what was staged from now on. Answered by the msgpack fingerprint of the weights."""

    update_id: str


class DropStagedWeights(msgspec.Struct, tag=True, frozen=True):
    """Forget what was staged for this update, if anything was."""

    update_id: str


class JoinWeightsGroup(msgspec.Struct, tag=True, frozen=True):
    """Meet the trainer at `address` in a process group: it is rank 0, we are `rank_offset` plus our own rank.

    timeout_s: for the meeting, and for each broadcast later.
    """

    group: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float


class LeaveWeightsGroup(msgspec.Struct, tag=True, frozen=True):
    """Leave that process group."""

    group: str


class FreeMemory(msgspec.Struct, tag=True, frozen=True):
    """Return the memory of these parts to the system. No step may follow before it is restored."""

    tags: list[MemoryTag]


class RestoreMemory(msgspec.Struct, tag=True, frozen=True):
    """Have it again: weights as they were, KV pages empty."""

    tags: list[MemoryTag]


class ReadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Begin to read the adapter in the folder `path`, under the engine's number for it; steps go on meanwhile."""

    adapter_id: int
    path: str


class AdapterIsRead(msgspec.Struct, tag=True, frozen=True):
    """Ask whether rank 0 has read it, or failed to. Answered by a msgpack bool."""

    adapter_id: int


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Wait until it is read, and keep it. Answered by msgpack `AdapterFacts`; fails if it could not be read."""

    adapter_id: int


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Forget an adapter, wherever it is by now."""

    adapter_id: int


class AdapterFacts(msgspec.Struct, array_like=True, frozen=True):
    """A loaded adapter. digest: of all that decides what it computes. rank: the largest of its modules."""

    digest: str
    rank: int
    nbytes: int


AdapterCall = ReadAdapter | AdapterIsRead | LoadAdapter | UnloadAdapter

WorkerCall = (
    GetWeights
    | FreeMemory
    | RestoreMemory
    | StageWeights
    | StageCheckpoint
    | ReceiveWeights
    | CommitWeights
    | DropStagedWeights
    | JoinWeightsGroup
    | LeaveWeightsGroup
    | AdapterCall
)


class SubmittedCall(msgspec.Struct, tag=True, frozen=True):
    """A call on its way to the workers, under the number that its answer will bear."""

    call_id: int
    call: WorkerCall


class CallDone(msgspec.Struct, tag=True, frozen=True):
    """Every rank has obeyed, or one could not. value: msgpack, of the form that the kind of call says.

    error_kind: the name of a class of `diptych.errors`; None where all went well.
    """

    call_id: int
    error_kind: str | None = None
    error: str | None = None
    value: bytes = b""


def answered(submitted: SubmittedCall, obey: Callable[[WorkerCall], bytes]) -> CallDone:
    """Obey on a worker. An error of the call is its answer, and so is one of a file that it names.

    Raises: WorkerError and InvariantError, after which the engine cannot go on.
    """
    try:
        return CallDone(submitted.call_id, value=obey(submitted.call))
    except (WorkerError, InvariantError):
        raise
    except DiptychError as error:
        return CallDone(submitted.call_id, type(error).__name__, str(error))
    except OSError as error:
        return CallDone(submitted.call_id, RequestError.__name__, f"{type(submitted.call).__name__}: {error}")
