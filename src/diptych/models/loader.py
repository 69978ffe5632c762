"""From a ModelSpec to a model with its weights: checked on paper first, then filled tensor by tensor.

Owns the order of things: a dry run on the meta device asks for every tensor and compares every shape, so that a
checkpoint that does not fit is refused before memory is taken. Knows nothing of what a layer is made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from diptych.errors import ConfigError
from diptych.gguf_file import GGUFFile
from diptych.kernels.gguf_linear import StoredBlocks
from diptych.kernels.library import kernels
from diptych.kernels.linear import Quantization
from diptych.layers.weights import BlockSource, WeightSource
from diptych.models.dummy import DummySource
from diptych.models.gguf_source import GGUFSource
from diptych.models.registry import MODELS
from diptych.models.safetensors_source import SafetensorsSource
from diptych.models.spec import ModelSpec
from diptych.models.transformer import Transformer

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as (what, done, total) after every tensor."""

UNUSED_BY_DESIGN = ("rotary_emb.", "vision_tower.", "multi_modal_projector.", "vision_model.", "rope_freqs.")


class CheckpointSource(WeightSource, Protocol):
    """A WeightSource that can list what it holds."""

    def names(self) -> list[str]:
        """Every tensor that the checkpoint holds, under the names that `read` takes."""
        ...


def load_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: Quantization = "none",
    progress: Progress | None = None,
) -> Transformer:
    """The model of `spec` with its weights, for inference.

    Args: dtype: of weights and activations; weights are rounded to it. quantization: "int8" rounds them further, "gguf"
    keeps a GGUF file's own blocks; both on a CPU with kernels only. progress: told "weights", tensors done, and all.
    Raises: ConfigError if the quantisation cannot be had, if the checkpoint lacks a tensor or holds one of another
    shape, before memory is taken; or if memory runs out.
    """
    _check_quantization(quantization, spec, dtype=dtype, device=device)
    model_class = MODELS.resolve(spec.config.architecture)
    source = open_source(spec, dtype=dtype, device=device, keeps_blocks=quantization == "gguf")
    names = _dry_run(model_class, spec, source)
    _warn_about_unused(spec, source, names)
    try:
        with torch.inference_mode(False), torch.no_grad():
            model = model_class(spec.config, dtype=dtype, device=device)
            model.load(_CountingSource(source, total=len(names), progress=progress), pack_as=quantization)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        raise ConfigError(
            f"the weights of {spec.path} did not load to {device} as {dtype}: {error}. If memory ran out, use a "
            "smaller dtype, another device or a smaller model."
        ) from error
    return model.eval().requires_grad_(False)


def _check_quantization(
    quantization: Quantization, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    if quantization == "none":
        return
    if quantization == "gguf" and spec.weight_format != "gguf":
        raise ConfigError(
            f"quantization gguf keeps the blocks of a GGUF file, but {spec.path} holds {spec.weight_format} weights; "
            "leave it out, or use int8"
        )
    if torch.device(device).type != "cpu" or dtype != torch.bfloat16 or kernels() is None:
        raise ConfigError(
            f"quantization {quantization} needs the CPU kernels and dtype bfloat16, got device {device} and {dtype}; "
            "leave it out, or see `diptych doctor`"
        )


def open_source(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str = "cpu", keeps_blocks: bool = False
) -> CheckpointSource:
    """Where the spec's weights are read from; formats that are expanded on the way deliver `dtype`.

    Args: device: where made-up weights are made; files are read on the CPU. keeps_blocks: a GGUF file's matrices are
    offered as they are, too.
    """
    match spec.weight_format:
        case "dummy":
            return DummySource(spec.config, seed=spec.seed, dtype=dtype, device=device)
        case "gguf":
            return GGUFSource(GGUFFile(spec.files[0]), spec.config, dtype=dtype, keeps_blocks=keeps_blocks)
        case "safetensors":
            return SafetensorsSource(spec.files)


def _dry_run(model_class: type[Transformer], spec: ModelSpec, source: CheckpointSource) -> list[str]:
    """Load shapes only, into a model without memory. Returns the names read, in order."""
    recorder = _MetaSource(source)
    model = model_class(spec.config, dtype=torch.float32, device="meta")
    try:
        model.load(recorder)
    except ConfigError as error:
        raise ConfigError(f"{spec.path} does not fit its own configuration: {error}") from error
    return recorder.names_read


def _warn_about_unused(spec: ModelSpec, source: CheckpointSource, names_read: list[str]) -> None:
    """A tensor that nobody reads may be a sign of an architecture that only looks familiar."""
    tied = ("lm_head.",) if spec.config.tie_word_embeddings else ()
    unused = [
        name
        for name in sorted(set(source.names()) - set(names_read))
        if not name.startswith(tied) and not any(part in name for part in UNUSED_BY_DESIGN)
    ]
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        logger.warning(
            "%s holds %d tensors that %s does not use: %s", spec.path, len(unused), spec.config.architecture, shown
        )


class _MetaSource:
    """Answers with tensors that have a shape and nothing else, and remembers what was asked for."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.names_read: list[str] = []

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        self.names_read.append(name)
        whole = torch.empty(self._source.shape(name), device="meta")
        begin, end, _ = slice(start, stop).indices(whole.shape[dim])
        return whole.narrow(dim, begin, end - begin)


class _CountingSource:
    """Passes reads on and reports each one that is done: when the next begins, its tensor has been copied."""

    def __init__(self, source: WeightSource, *, total: int, progress: Progress | None) -> None:
        self._source = source
        self._total = total
        self._progress = progress
        self._done = 0
        self._last = ""  # a large tensor is read in parts

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self._source.read(name, dim=dim, start=start, stop=stop)
        if name != self._last:
            self._report_one()
        self._last = name
        return tensor

    def blocks(self, name: str) -> StoredBlocks | None:
        found = self._source.blocks(name) if isinstance(self._source, BlockSource) else None
        if found is not None:
            self._report_one()
        return found

    def _report_one(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress("weights", self._done, self._total)
