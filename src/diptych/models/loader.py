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
from diptych.layers.shard import Part
from diptych.layers.weights import BlockSource, WeightSource
from diptych.models.dummy import DummySource
from diptych.models.gguf_source import GGUFSource
from diptych.models.registry import MODELS
from diptych.models.safetensors_source import SafetensorsSource
from diptych.models.shapes import draft_layer_prefixes
from diptych.models.spec import ModelSpec
from diptych.models.transformer import Transformer
from diptych.parallel.layer_groups import ONE_RANK, LayerGroups

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
    groups: LayerGroups = ONE_RANK,
    progress: Progress | None = None,
) -> Transformer:
    """The model of `spec` with its weights, for inference.

    Args: dtype: of weights and activations; weights are rounded to it. quantization: "int8" rounds them further, "gguf"
    keeps a GGUF file's own blocks; both on a CPU with kernels only. groups: ranks that the model is spread over; only
    this one's share is read. progress: told "weights", tensors done, and all.
    Raises: ConfigError if the quantisation cannot be had, if the ranks cannot share the model, if the checkpoint lacks
    a tensor or holds one of another shape, before memory is taken; or if memory runs out.
    """
    _check_quantization(quantization, spec, dtype=dtype, device=device)
    model_class = MODELS.resolve(spec.config.architecture)
    source = open_source(spec, dtype=dtype, device=device, keeps_blocks=quantization == "gguf")
    names = _dry_run(model_class, spec, source)
    _warn_about_unused(spec, source, names)
    if not groups.is_one_rank:
        names = _dry_run(model_class, spec, source, groups)
    try:
        with torch.inference_mode(False), torch.no_grad():
            model = model_class(spec.config, groups=groups, dtype=dtype, device=device)
            model.load(_CountingSource(source, total=len(names), progress=progress), pack_as=quantization)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        raise ConfigError(
            f"the weights of {spec.path} did not load to {device} as {dtype}: {error}. If memory ran out, use a "
            "smaller dtype, another device or a smaller model."
        ) from error
    return model.eval().requires_grad_(False)


def check_weights(spec: ModelSpec, *, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the checkpoint holds every tensor that its configuration asks for, in its shape."""
    _dry_run(MODELS.resolve(spec.config.architecture), spec, open_source(spec, dtype=dtype))


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


def _dry_run(
    model_class: type[Transformer], spec: ModelSpec, source: CheckpointSource, groups: LayerGroups = ONE_RANK
) -> list[str]:
    """Load shapes only, into a model without memory. Returns the names read, in order."""
    recorder = _MetaSource(source)
    model = model_class(spec.config, groups=groups, dtype=torch.float32, device="meta")
    try:
        model.load(recorder)
    except ConfigError as error:
        raise ConfigError(f"{spec.path} does not fit its own configuration: {error}") from error
    return recorder.names_read


def _warn_about_unused(spec: ModelSpec, source: CheckpointSource, names_read: list[str]) -> None:
    """A tensor that nobody reads may be a sign of an architecture that only looks familiar."""
    passed_over = draft_layer_prefixes(spec.config)
    if spec.config.tie_word_embeddings:
        passed_over += ("lm_head.",)
    unused = [
        name
        for name in sorted(set(source.names()) - set(names_read))
        if not name.startswith(passed_over) and not any(part in name for part in UNUSED_BY_DESIGN)
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

    def blocks(self, name: str, part: Part) -> StoredBlocks | None:
        found = self._source.blocks(name, part) if isinstance(self._source, BlockSource) else None
        if found is not None:
            self._report_one()
        return found

    def _report_one(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress("weights", self._done, self._total)
