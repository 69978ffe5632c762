"""From a configuration to a drafter: loads a draft model, and finds it a place in the pages. Worker's thread, while it
loads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from diptych.attention.registry import create_attention
from diptych.config import EngineConfig
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.fingerprint import fingerprint
from diptych.models.huggingface import draft_config_from_folder
from diptych.models.loader import Progress, load_model
from diptych.models.safetensors_files import find_safetensors
from diptych.models.safetensors_source import SafetensorsSource
from diptych.models.spec import ModelSpec, inspect_model
from diptych.models.transformer import Transformer
from diptych.speculative.draft_model import ModelDrafter
from diptych.speculative.drafter import Drafter, Texts
from diptych.speculative.eagle import EagleDrafter, EagleHead
from diptych.speculative.ngram import NgramDrafter
from diptych.worker.inputs import build_inputs
from diptych.worker.pool import layout_of
from diptych.worker.slots import SlotTable


class Draft:
    """A draft model with its weights. num_layers: layers of the target's shape in which its keys and values fit.

    fingerprint: of its weights; peers that differ in it do not exchange pages.
    """

    def __init__(self, spec: ModelSpec, model: Transformer | EagleHead, layout: KVLayout, *, target: KVLayout) -> None:
        self.model = model
        self.layout = layout
        self.fingerprint = fingerprint(spec)
        self.num_layers = -(-layout.page_nbytes * target.num_layers // target.page_nbytes)

    def pool(self, pool: KVPool) -> KVPool:
        """The draft's part of every page of the target's pool, as a pool of its own."""
        shape = self.layout.page_shape
        within = torch.empty(shape, device="meta").stride()
        first = (pool.layout.num_layers - self.num_layers) * pool.tensor.stride(1)
        view = pool.tensor.as_strided((pool.num_pages, *shape), (pool.tensor.stride(0), *within), first)
        return KVPool(self.layout, pool.num_pages, pool.tensor.device, pool.tensor.dtype, tensor=view)


def load_draft(config: EngineConfig, target: Transformer, dtype: torch.dtype, progress: Progress) -> Draft | None:
    """The draft model that the configuration names, if it names one.

    Raises: ConfigError if it does not fit the target, or if the target is spread over several ranks.
    """
    path = config.speculative.speculative_draft_model_path
    if path is None:
        return None
    if not target.groups.is_one_rank:
        raise ConfigError("a draft model beside a model on several ranks is not served yet; use NGRAM, or one rank")
    page_size = config.cache.page_size
    target_layout = layout_of(target, page_size, dtype)
    if config.speculative.speculative_algorithm == "EAGLE":
        spec, head = _load_eagle(Path(path).expanduser(), target, dtype)
        return Draft(spec, head, _layout_of_head(spec, page_size, target_layout), target=target_layout)
    spec = inspect_model(replace(config.model, model_path=path, load_format="auto"))
    _check_fits(path, "tokens", spec.config.vocab_size, target.config.vocab_size)
    quantization = config.model.quantization if config.model.quantization != "gguf" else "none"
    model = load_model(spec, dtype=dtype, device=target.device, quantization=quantization, progress=progress)
    return Draft(spec, model, layout_of(model, page_size, dtype), target=target_layout)


def create_drafter(
    config: EngineConfig, draft: Draft | None, target: Transformer, *, pool: KVPool, slots: SlotTable
) -> Drafter | None:
    """Who guesses, if anybody does."""
    if not config.speculative.is_on:
        return None
    texts = Texts(slots.token_ids, slots.num_tokens)
    if draft is None:
        return NgramDrafter(texts)
    attention = create_attention(config.cache.attention_backend, draft.pool(pool))
    inputs = partial(build_inputs, slots=slots, device=pool.tensor.device)
    if isinstance(draft.model, EagleHead):
        return EagleDrafter(draft.model, target, attention, texts, inputs)
    return ModelDrafter(draft.model, attention, texts, inputs)


def _load_eagle(path: Path, target: Transformer, dtype: torch.dtype) -> tuple[ModelSpec, EagleHead]:
    config = draft_config_from_folder(path)
    _check_fits(str(path), "tokens", config.vocab_size, target.config.vocab_size)
    _check_fits(str(path), "hidden elements", config.hidden_size, target.config.hidden_size)
    spec = ModelSpec(path=path, weight_format="safetensors", config=config, files=find_safetensors(path))
    source = SafetensorsSource(spec.files)
    with torch.inference_mode(False), torch.no_grad():
        head = EagleHead(config, has_bias=source.has("fc.bias"), dtype=dtype, device=target.device)
        head.load(source)
    return spec, head.eval().requires_grad_(False)


def _layout_of_head(spec: ModelSpec, page_size: int, target: KVLayout) -> KVLayout:
    return KVLayout.single_rank(
        1, spec.config.num_kv_heads, head_dim=spec.config.head_dim, page_size=page_size, dtype=target.dtype
    )


def _check_fits(path: str, what: str, draft: int, target: int) -> None:
    if draft != target:
        raise ConfigError(f"the draft model {path} has {draft} {what}, the model {target}: they must be the same")
