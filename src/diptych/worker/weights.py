"""The weights of one rank's model while it serves: read by name, and replaced in two steps.

What can be wrong with an update is found out while it is staged, and nothing has changed then; a commit only copies.
The layers' own loading code says which tensor is where (`layers.weights.WeightVisitor`), so that merged, packed and
quantised layers need nothing of their own. Worker's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import msgspec
import torch

from diptych.config import ModelConfig
from diptych.core.calls import (
    CommitWeights,
    DropStagedWeights,
    GetWeights,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReceiveWeights,
    StageCheckpoint,
    StageWeights,
    WorkerCall,
)
from diptych.errors import ConfigError, DiptychError, RequestError, Unavailable, Unsupported, WorkerError
from diptych.layers.parameter import fill
from diptych.layers.shard import Part
from diptych.layers.weights import Rows, WeightVisitor
from diptych.models.fingerprint import fingerprint
from diptych.models.loader import check_weights, open_source
from diptych.models.memory_source import MemorySource
from diptych.models.safetensors_source import canonical_name
from diptych.models.shapes import tensor_shapes
from diptych.models.spec import ModelSpec, inspect_model
from diptych.models.transformer import Transformer
from diptych.parallel.groups import GroupCoordinator
from diptych.parallel.layer_groups import ALONE
from diptych.parallel.weights_group import WeightsGroup
from diptych.worker.weight_reader import read_weights


@dataclass(frozen=True, slots=True)
class Staged:
    """An update that has been checked, or whose tensors still arrive."""

    update_id: str
    content: MemorySource | ModelSpec


class ModelWeights:
    """Reads and replaces the weights of `model`.

    Args: spec: where they were loaded from. quantization: how they were packed. group: all ranks of the engine.
    """

    def __init__(
        self,
        model: Transformer,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        quantization: str,
        group: GroupCoordinator = ALONE,
    ) -> None:
        self._model = model
        self._spec = spec
        self._dtype = dtype
        self._keeps_blocks = quantization == "gguf"
        self._group = group
        self._shapes = tensor_shapes(spec.config)
        self._staged: Staged | None = None
        self._groups: dict[str, WeightsGroup] = {}
        self.fingerprint = fingerprint(spec)
        self.is_released = False
        self._is_as_stored = True

    def obey(self, call: WorkerCall) -> bytes:
        """Do what a call asks. Returns: msgpack, of the form that the call says."""
        match call:
            case GetWeights():
                return self.get(call)
            case StageWeights():
                self.stage(call)
            case StageCheckpoint():
                self.stage_checkpoint(call)
            case ReceiveWeights():
                self.receive(call)
            case CommitWeights():
                return self.commit(call)
            case DropStagedWeights(update_id):
                self.drop(update_id)
            case JoinWeightsGroup():
                self.join(call)
            case LeaveWeightsGroup(group):
                self.leave(group)
        return b""

    # ------------------------------------------------------------------ reading

    def get(self, call: GetWeights) -> bytes:
        """The tensors asked for, as a msgpack list of TensorBytes (on rank 0).

        Raises: RequestError naming one that is not there.
        """
        self._refuse_released()
        own_names = {name: self._own_name(name) for name in call.names}
        found = read_weights(self._model, call, own_names, shapes=self._shapes, group=self._group)
        return msgspec.msgpack.encode(found)

    def _own_name(self, name: str) -> str:
        """The name under which the layers know a tensor."""
        name = canonical_name(name)
        is_tied_head = name == "lm_head.weight" and self._spec.config.tie_word_embeddings
        return "model.embed_tokens.weight" if is_tied_head else name

    # ------------------------------------------------------------------ staging

    def stage(self, call: StageWeights) -> None:
        """Take tensors, or pieces of them. Raises RequestError naming the first that does not fit, and drops all."""
        source = self._memory_source(call.update_id)
        with self._dropping(call.update_id):
            for piece in call.tensors:
                # A tied head is no tensor of its own; whoever sends the whole state of a model sends it all the same.
                name = canonical_name(piece.name)
                if not (name == "lm_head.weight" and self._spec.config.tie_word_embeddings):
                    source.add(piece, name)

    def receive(self, call: ReceiveWeights) -> None:
        """Take tensors that the trainer broadcasts. Raises RequestError before anything is received if one does not
        fit; Unavailable if the trainer does not send.
        """
        group = self._groups.get(call.group)
        if group is None:
            raise RequestError(f"there is no group {call.group!r}; call init_weights_update_group first", "group_name")
        if not len(call.names) == len(call.dtypes) == len(call.shapes):
            raise RequestError(
                f"{len(call.names)} names, {len(call.dtypes)} dtypes, {len(call.shapes)} shapes", "names"
            )
        source = self._memory_source(call.update_id)
        with self._dropping(call.update_id):
            tensors = [
                source.put(canonical_name(name), tuple(shape), dtype)
                for name, dtype, shape in zip(call.names, call.dtypes, call.shapes, strict=True)
            ]
            for tensor in tensors:
                group.broadcast(tensor)

    def stage_checkpoint(self, call: StageCheckpoint) -> None:
        """Check another checkpoint of the same model. Raises ConfigError or RequestError saying what does not fit."""
        try:
            spec = inspect_model(ModelConfig(model_path=call.path, load_format=call.load_format))
            ours, theirs = self._spec.config, spec.config
            for field in fields(ours):
                pair = (vars(ours)[field.name], vars(theirs)[field.name])
                if pair[0] != pair[1] and field.name != "eos_token_ids":
                    raise ConfigError(f"its {field.name} is {pair[1]}, the loaded model's is {pair[0]}")
            check_weights(spec, dtype=self._dtype)
        except (ConfigError, OSError, ValueError) as error:  # a path may be too long, or hold a zero
            raise RequestError(
                f"{call.path[:200]} cannot take the loaded model's place: {error}", "model_path"
            ) from error
        self._refuse_blocks()
        self._staged = Staged(call.update_id, spec)

    def drop(self, update_id: str) -> None:
        """Forget what was staged for this update."""
        if self._staged is not None and self._staged.update_id == update_id:
            self._staged = None

    def _memory_source(self, update_id: str) -> MemorySource:
        self._refuse_blocks()
        if self._staged is None or self._staged.update_id != update_id:
            self._staged = Staged(update_id, MemorySource(self._shapes))
        content = self._staged.content
        if not isinstance(content, MemorySource):
            raise RequestError(f"update {update_id!r} is of a checkpoint, and takes no tensors")
        return content

    def _refuse_blocks(self) -> None:
        if self._keeps_blocks:
            raise Unsupported(
                "with quantization gguf the weights stay in their file's own blocks, which cannot be replaced; start "
                "the engine with quantization none or int8"
            )

    @contextmanager
    def _dropping(self, update_id: str) -> Iterator[None]:
        try:
            yield
        except DiptychError:
            self.drop(update_id)
            raise

    # ------------------------------------------------------------------ replacing

    def commit(self, call: CommitWeights) -> bytes:
        """Compute with what was staged from now on. Returns: the msgpack fingerprint.

        Raises: RequestError if it is not staged, or not whole, and then nothing has changed; WorkerError if it could
        not be read to its end: the weights are neither the old nor the new ones.
        """
        staged = self._staged
        if staged is None or staged.update_id != call.update_id:
            raise RequestError(f"nothing is staged for update {call.update_id!r}; another one may have begun")
        self._refuse_released()
        self._staged = None
        content = staged.content
        if isinstance(content, MemorySource):
            content.check_complete()
            self._model.load(_Replacer(content))
            self._is_as_stored = False
            previous = "" if content.is_whole_model else self.fingerprint
            self.fingerprint = _fingerprint_of(self._spec, content, previous)
        else:
            self._load(content)
            self.fingerprint = fingerprint(content)
            self._is_as_stored = True
        return msgspec.msgpack.encode(self.fingerprint)

    def _load(self, spec: ModelSpec) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._model.load(open_source(spec, dtype=self._dtype))
        except (ConfigError, OSError, RuntimeError, MemoryError) as error:
            raise WorkerError(f"{spec.path} could not be read to its end, start the engine anew: {error}") from error
        self._spec = spec

    # ------------------------------------------------------------------ released memory

    @property
    def is_on_disk(self) -> bool:
        """Whether the weights can be had again from their checkpoint."""
        return self._is_as_stored and not self._keeps_blocks

    def read_again(self) -> None:
        """Read the checkpoint into released memory. Raises: ConfigError if it is not what it was."""
        if fingerprint(self._spec) != self.fingerprint:
            raise ConfigError(f"{self._spec.path} has changed since it was loaded")
        with torch.inference_mode(False), torch.no_grad():
            self._model.load(open_source(self._spec, dtype=self._dtype))

    def _refuse_released(self) -> None:
        if self.is_released:
            raise Unavailable("the weights are released; call resume_memory_occupation first")

    # ------------------------------------------------------------------ the trainer's group

    def join(self, call: JoinWeightsGroup) -> None:
        """Meet the trainer. Raises RequestError if the group is there already; Unavailable if it does not come."""
        if call.group in self._groups:
            raise RequestError(f"group {call.group!r} is there already; destroy it first", "group_name")
        self._groups[call.group] = WeightsGroup(
            call.address,
            call.port,
            rank=call.rank_offset + self._group.rank,
            world_size=call.world_size,
            name=call.group,
            backend=call.backend,
            timeout_s=call.timeout_s,
        )

    def leave(self, group: str) -> None:
        """Leave a group. Raises RequestError if there is none of that name."""
        if self._groups.pop(group, None) is None:
            raise RequestError(f"there is no group {group!r}", "group_name")


class _Replacer(WeightVisitor):
    """Overwrites those tensors that a source holds."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source

    def visit(self, name: str, place: Rows, *, part: Part | None, offset: float) -> None:
        if self._source.has(name):
            fill(place, self._source, name, part=part, offset=offset)


def _fingerprint_of(spec: ModelSpec, content: MemorySource, previous: str) -> str:
    """The same for the same values, whoever has been given them; previous: of the weights of which some stay."""
    digest = hashlib.blake2b(repr(spec.config).encode(), digest_size=12)
    digest.update(f"{previous} {content.digest()}".encode())
    return digest.hexdigest()
