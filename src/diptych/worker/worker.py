"""One rank: takes a device, loads the model, reserves the KV pool, then runs batches one after the other.

Owns everything that needs torch. It knows no requests, only slots. One thread: the executor's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial

import torch

from diptych.attention.backend import AttentionBackend
from diptych.attention.registry import create_attention
from diptych.config import EngineConfig, ModelConfig
from diptych.core.batch import Batch
from diptych.core.messages import EngineInfo
from diptych.errors import ConfigError
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.fingerprint import fingerprint
from diptych.models.loader import load_model
from diptych.models.spec import inspect_model
from diptych.models.transformer import Transformer
from diptych.resolve import max_num_seqs, token_budget
from diptych.sampling.grammar import GrammarCompiler
from diptych.sampling.sampler import Sampler
from diptych.tokenizer import load_tokenizer
from diptych.worker.memory import num_pool_pages, resolve_max_model_len
from diptych.worker.rows import Rows
from diptych.worker.runner import ModelRunner, PendingStep, Runner, TorchStepModel
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
    """A loaded model behind `launch`. info: what it serves."""

    def __init__(self, runner: Runner, info: EngineInfo) -> None:
        self._runner = runner
        self.info = info

    def launch(self, batch: Batch) -> PendingStep:
        """Begin to run one batch. Batches must come in the order in which they were planned."""
        return self._runner.launch(batch)


def create_worker(config: EngineConfig, progress: Progress) -> Worker:
    """Take the device, load the model, reserve the KV pool. Raises ConfigError, before memory is taken where it can."""
    started = time.perf_counter()
    spec = inspect_model(config.model)
    device = resolve_device(config.model.device)
    if device.type == "cpu":
        torch.set_num_threads(config.model.num_threads or len(os.sched_getaffinity(0)))
    dtype = resolve_dtype(config.model, spec.config.dtype)
    logger.debug("torch and the device are there after %.1f s", time.perf_counter() - started)
    model = load_model(spec, dtype=dtype, device=device, quantization=config.model.quantization, progress=progress)
    if model.is_fused:
        torch.set_num_threads(1)  # torch's idle threads spin on the cores that the kernels' threads need
    logger.info("weights are on %s after %.1f s", device, time.perf_counter() - started)
    pool = _create_pool(config, model, device=device, dtype=dtype)
    num_slots = max_num_seqs(config.scheduler, device.type)
    max_model_len = resolve_max_model_len(
        config.model.max_model_len, spec.config.max_position_embeddings, pool.num_pages * pool.layout.page_size
    )
    slots = SlotTable(num_slots, max_model_len, pool.layout.page_size)
    attention = create_attention(config.cache.attention_backend, pool)
    rows = Rows(slots, _create_sampler(config, spec.config, num_slots, device))
    runner = _create_runner(config.model, model, attention, rows=rows, progress=progress)
    info = EngineInfo(
        model_path=config.model.model_path,
        architecture=spec.config.architecture,
        dtype=pool.layout.dtype,
        vocab_size=spec.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=spec.config.eos_token_ids,
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        page_nbytes=pool.layout.page_nbytes,
        max_num_seqs=num_slots,
        device=str(device),
        attention_backend=type(attention).__name__,
        load_s=time.perf_counter() - started,
        num_layers=pool.layout.num_layers,
        num_kv_heads=pool.layout.num_kv_heads,
        head_dim=pool.layout.head_dim,
        kv_address=pool.data_ptr,
        fingerprint=fingerprint(spec),
    )
    return Worker(runner, info)


def _create_pool(config: EngineConfig, model: Transformer, *, device: torch.device, dtype: torch.dtype) -> KVPool:
    """The KV pool, as large as asked for or as memory allows once the largest step has had its share."""
    layout = _layout_of(model.config, config.cache.page_size, dtype)
    step_nbytes = 0
    if device.type == "cuda":
        # Imported here, as in `_create_runner`.
        from diptych.worker.cuda_memory import largest_step_nbytes

        step_nbytes = largest_step_nbytes(
            model,
            layout,
            num_tokens=token_budget(config.scheduler, device.type),
            num_rows=max_num_seqs(config.scheduler, device.type),
        )
    return KVPool(layout, num_pool_pages(config.cache, layout, device, step_nbytes=step_nbytes), device, dtype)


def _create_runner(
    config: ModelConfig, model: Transformer, attention: AttentionBackend, *, rows: Rows, progress: Progress
) -> Runner:
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        # Imported here: a CPU needs neither Triton nor FlashInfer.
        from diptych.worker.cuda_runner import create_cuda_runner

        capture = partial(progress, "graphs") if config.cuda_graphs else None
        runner = create_cuda_runner(model, attention, rows, capture)
        if runner is not None:
            return runner
    return ModelRunner(TorchStepModel(model, attention, device), rows)


def _layout_of(config: TransformerConfig, page_size: int, dtype: torch.dtype) -> KVLayout:
    return KVLayout.single_rank(
        config.num_layers,
        config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=str(dtype).removeprefix("torch."),
    )


def _create_sampler(config: EngineConfig, model: TransformerConfig, num_slots: int, device: torch.device) -> Sampler:
    def grammars() -> GrammarCompiler:
        tokenizer = load_tokenizer(config.model.model_path, config.model.tokenizer_path)
        return GrammarCompiler(tokenizer.to_json(), model.vocab_size, model.eos_token_ids)

    return Sampler(model.vocab_size, num_slots, device=device, grammars=grammars)
