"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors, read and checked.

Knows nothing of the model that they are for, beyond what its modules are called.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.errors import AdapterError
from diptych.layers.lora import LowRank
from diptych.models.safetensors_files import check_header
from diptych.models.safetensors_source import SafetensorsSource

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# What may be in a config without changing what the adapter's weights mean.
_REFUSED_UNLESS: dict[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "alora_invocation_tokens": ([], None),
}


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """One adapter as its folder holds it. modules: by the names of the modules that it changes, such as
    "model.layers.0.self_attn.q_proj"; tensors are views of the file. digest: of all that decides what it computes.
    """

    path: Path
    digest: str
    rank: int
    modules: dict[str, LowRank]


@dataclass(frozen=True, kw_only=True)
class _Scaling:
    """What multiplies each module's product, by PEFT's rules. patterns: of module names, their own rank and alpha."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: dict[str, float]
    alpha_pattern: dict[str, float]

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_adapter(folder: Path, *, max_rank: int) -> AdapterFile:
    """Read and check an adapter, as far as that can be done without its model.

    Raises: AdapterError naming the file, field or tensor that is at fault.
    """
    config_file, weights_file = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    if not config_file.is_file():
        raise AdapterError(f"there is no adapter at {folder}: it has no {CONFIG_NAME}")
    config = _read_config(config_file)
    if not weights_file.is_file():
        raise AdapterError(
            f"adapter {folder} has no {WEIGHTS_NAME}; save it with safetensors (pickled files are not read)"
        )
    scaling = _scaling(config, config_file)
    check_header(weights_file)
    source = SafetensorsSource([weights_file])
    modules = {
        module: _low_rank(source, names, module, scaling, max_rank=max_rank)
        for module, names in _by_module(source, weights_file).items()
    }
    digest = hashlib.sha256(json.dumps(_meaning(config), sort_keys=True).encode())
    with weights_file.open("rb") as content:
        while chunk := content.read(1 << 22):
            digest.update(chunk)
    rank = max(len(low_rank.down) for low_rank in modules.values())
    return AdapterFile(path=folder, digest=digest.hexdigest()[:32], rank=rank, modules=modules)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} holds no JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{file} has peft_type {config.get('peft_type')!r}; only LORA is served")
    for field, allowed in _REFUSED_UNLESS.items():
        if config.get(field) not in allowed:
            raise AdapterError(f"{file} has {field} {config[field]!r}, which is not served; only {allowed[0]!r} is")
    return config


def _scaling(config: dict[str, Any], file: Path) -> _Scaling:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{file} has r {rank!r}, which must be a whole number above 0")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{file} has lora_alpha {alpha!r}, which must be a number")
    for name, pattern in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
        if not isinstance(pattern, dict) or not all(isinstance(value, int | float) for value in pattern.values()):
            raise AdapterError(f"{file} has {name} {pattern!r}, which must be numbers by module name")
    return _Scaling(
        rank=rank,
        alpha=float(alpha),
        is_rank_stabilized=bool(config.get("use_rslora")),
        rank_pattern=patterns[0],
        alpha_pattern=patterns[1],
    )


def _of_pattern(pattern: dict[str, float], module: str, default: float) -> float:
    """PEFT's rule: the first key that is the end of the module's name, as a regular expression."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise AdapterError(f"pattern {key!r} for modules is no regular expression: {error}") from error
    return default


def _meaning(config: dict[str, Any]) -> dict[str, Any]:
    """What of a config decides what the weights compute."""
    names = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    return {name: config.get(name) for name in names}


def _by_module(source: SafetensorsSource, file: Path) -> dict[str, dict[str, str]]:
    """Names of both tensors of every module, by "A" and "B"."""
    found: dict[str, dict[str, str]] = {}
    for name in source.names():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"{file} holds tensor {name}, but only lora_A and lora_B weights of linear layers are served"
            )
        found.setdefault(match["module"].removeprefix(_PREFIX), {})[match["half"]] = name
    if not found:
        raise AdapterError(f"{file} holds no tensors")
    for module, halves in found.items():
        if len(halves) != 2:
            raise AdapterError(f"{file} holds lora_{next(iter(halves))} of {module} alone")
    return found


def _low_rank(
    source: SafetensorsSource, names: dict[str, str], module: str, scaling: _Scaling, *, max_rank: int
) -> LowRank:
    down, up = source.read(names["A"]), source.read(names["B"])
    rank = scaling.rank_of(module)
    if down.dim() != 2 or up.dim() != 2 or len(down) != rank or up.shape[1] != rank:
        raise AdapterError(
            f"tensors {names['A']} {list(down.shape)} and {names['B']} {list(up.shape)} are not of rank {rank}, "
            f"which {CONFIG_NAME} says"
        )
    if rank > max_rank:
        raise AdapterError(f"{module} has rank {rank}, above --max-lora-rank {max_rank}")
    return LowRank(down, up, scaling.scale_of(module))
