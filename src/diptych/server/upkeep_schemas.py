"""Bodies of the requests that replace weights, release memory and pause. Rules as in `schemas`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from diptych.core.messages import InFlight
from diptych.server.schemas import Body, Name, Strings
from diptych.server.upkeep import MEMORY_TAGS, LoadFormat

Names = Annotated[list[Name], Field(max_length=100_000)]
Size = Annotated[int, Field(ge=0, le=2**40)]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**20)]


def _as_number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdigit() else value


class UpdateFields(Body):
    """What every update may say. in_flight: what becomes of requests in flight; abort_all_requests: SGLang's word for
    "abort". The prefix cache is emptied whatever `flush_cache` says."""

    in_flight: InFlight = "wait"
    abort_all_requests: bool = False
    flush_cache: bool = True
    weight_version: Name | None = None


class DiskUpdate(UpdateFields):
    """POST /update_weights_from_disk."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: LoadFormat = "auto"


class TensorUpdate(UpdateFields):
    """POST /update_weights_from_tensor; with a body of safetensors bytes, its query."""

    serialized_named_tensors: list[str] = Field(default_factory=list)
    update_id: Name = ""
    is_last: bool = True


class DistributedUpdate(UpdateFields):
    """POST /update_weights_from_distributed."""

    names: Names
    dtypes: Names
    shapes: Annotated[list[Annotated[list[Size], Field(max_length=8)]], Field(max_length=100_000)]
    group_name: Name = "weight_update_group"


class InitGroupRequest(Body):
    """POST /init_weights_update_group. rank_offset: of this engine's first rank. timeout: seconds for each step."""

    master_address: Name
    master_port: Port
    rank_offset: Annotated[int, Field(ge=1, le=2**20)]
    world_size: Count
    group_name: Name = "weight_update_group"
    backend: Name = "gloo"
    timeout: Annotated[float, Field(gt=0, le=3600)] = 60.0


class DestroyGroupRequest(Body):
    """POST /destroy_weights_update_group."""

    group_name: Name = "weight_update_group"


class VersionRequest(Body):
    """POST /update_weight_version."""

    new_version: Annotated[str, Field(min_length=1, max_length=512)]


class WeightsByName(Body):
    """POST /get_weights_by_name."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    truncate_size: Annotated[int, Field(ge=1, le=2**20)] = 100


class PauseRequest(Body):
    """POST /pause_generation, /pause. in_place is SGLang's word for keep."""

    mode: Literal["abort", "wait", "keep", "in_place", "retract"] = "abort"


class MemoryRequest(Body):
    """POST /release_memory_occupation, /resume_memory_occupation, /sleep, /wake_up. level, and `mode` for in_flight:
    vLLM's words.
    """

    tags: Strings = Field(default_factory=lambda: list[str](MEMORY_TAGS))
    level: Annotated[Literal[1, 2], BeforeValidator(_as_number)] = 1
    in_flight: Annotated[Literal["wait", "abort"] | None, Field(validation_alias=AliasChoices("in_flight", "mode"))] = (
        None
    )
