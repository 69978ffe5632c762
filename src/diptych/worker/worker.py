"""One rank: takes a device, loads the model, reserves the KV pool, then runs batches one after the other.

Owns everything that needs torch. It knows no requests, only slots. One thread: the executor's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from diptych.attention.registry import create_attention
from diptych.config import EngineConfig, ModelConfig
from diptych.core.batch import Batch, StepOutput
from diptych.core.messages import EngineInfo
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.fingerprint import fingerprint
from diptych.models.loader import load_model
from diptych.models.spec import inspect_model
from diptych.sampling.grammar import GrammarCompiler
from diptych.sampling.sampler import Sampler
from diptych.tokenizer import load_tokenizer
from diptych.worker.memory import num_pool_pages, resolve_max_model_len
from diptych.worker.runner import ModelRunner
from diptych.worker.slots import SlotTable

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(name: str) -> torch.device:
    """The device to compute on. Raises ConfigError for "cuda" where torch finds none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device; see `diptych doctor`")
    return torch.device(name)


def resolve_dtype(config: ModelConfig, checkpoint_dtype: str) -> torch.dtype:
    """Compute dtype: what the user said, else the checkpoint's."""
    return _DTYPES[checkpoint_dtype if config.dtype == "auto" else config.dtype]


class Worker:
    """A loaded model behind `step`. info: what it serves."""

    def __init__(self, runner: ModelRunner, info: EngineInfo) -> None:
        self._runner = runner
        self.info = info

    def step(self, batch: Batch) -> StepOutput:
        """Run one batch. Batches must come in the order in which they were planned."""
        return self._runner.run(batch)


def create_worker(config: EngineConfig, progress: Progress) -> Worker:
    """Take the device, load the model, reserve the KV pool. Raises ConfigError, before memory is taken where it can."""
    started = time.perf_counter()
    spec = inspect_model(config.model)
    model_config = spec.config
    device = resolve_device(config.model.device)
    if device.type == "cpu":
        torch.set_num_threads(config.model.num_threads or len(os.sched_getaffinity(0)))
    dtype = resolve_dtype(config.model, model_config.dtype)
    model = load_model(spec, dtype=dtype, device=device, quantization=config.model.quantization, progress=progress)
    if model.is_fused:
        torch.set_num_threads(1)  # torch's idle threads spin on the cores that the kernels' threads need
    layout = _layout_of(model_config, config.cache.page_size, dtype)
    num_pages = num_pool_pages(config.cache, layout, device)
    max_model_len = resolve_max_model_len(
        config.model.max_model_len, model_config.max_position_embeddings, num_pages * layout.page_size
    )
    pool = KVPool(layout, num_pages, device, dtype)
    attention = create_attention(config.cache.attention_backend, pool)
    runner = ModelRunner(
        model,
        attention,
        sampler=_create_sampler(config, model_config, device),
        slots=SlotTable(config.scheduler.max_num_seqs, max_model_len, layout.page_size),
        device=device,
    )
    info = EngineInfo(
        model_path=config.model.model_path,
        architecture=model_config.architecture,
        dtype=layout.dtype,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        page_size=layout.page_size,
        num_pages=num_pages,
        page_nbytes=layout.page_nbytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        device=str(device),
        attention_backend=type(attention).__name__,
        load_s=time.perf_counter() - started,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        kv_address=pool.data_ptr,
        fingerprint=fingerprint(spec),
    )
    return Worker(runner, info)


def _layout_of(config: TransformerConfig, page_size: int, dtype: torch.dtype) -> KVLayout:
    return KVLayout.single_rank(
        config.num_layers,
        config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=str(dtype).removeprefix("torch."),
    )


def _create_sampler(config: EngineConfig, model: TransformerConfig, device: torch.device) -> Sampler:
    def grammars() -> GrammarCompiler:
        tokenizer = load_tokenizer(config.model.model_path, config.model.tokenizer_path)
        return GrammarCompiler(tokenizer.to_json(), model.vocab_size, model.eos_token_ids)

    return Sampler(model.vocab_size, config.scheduler.max_num_seqs, device=device, grammars=grammars)
