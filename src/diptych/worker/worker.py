"""One rank: takes a device, loads the model, reserves the KV pool, then runs batches one after the other.

Owns everything that needs torch. It knows no requests, only slots. One thread: the executor's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from diptych.attention.backend import AttentionBackend
from diptych.attention.registry import create_attention
from diptych.config import EngineConfig, ModelConfig
from diptych.core.batch import Batch
from diptych.core.calls import (
    AdapterIsRead,
    FreeMemory,
    LoadAdapter,
    ReadAdapter,
    RestoreMemory,
    UnloadAdapter,
    WorkerCall,
)
from diptych.core.messages import EngineInfo
from diptych.errors import ConfigError
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.fingerprint import fingerprint
from diptych.models.loader import load_model
from diptych.models.spec import ModelSpec, inspect_model
from diptych.models.transformer import Transformer
from diptych.parallel.layer_groups import ALONE, LayerGroups
from diptych.parallel.mesh import Axis
from diptych.parallel.world import World
from diptych.resolve import max_num_seqs
from diptych.sampling.grammar import GrammarCompiler
from diptych.sampling.sampler import Sampler
from diptych.speculative.drafter import Drafter
from diptych.tokenizer import load_tokenizer
from diptych.worker.adapters import AdapterStore, NoAdapters, create_adapters
from diptych.worker.drafting import create_drafter, load_draft
from diptych.worker.grouped_runner import GroupedRunner
from diptych.worker.memory import resolve_max_model_len
from diptych.worker.occupancy import Occupancy
from diptych.worker.pool import create_pool, pools_of_ranks
from diptych.worker.rows import Rows
from diptych.worker.runner import ModelRunner, PendingStep, Runner, TorchStepModel
from diptych.worker.slots import SlotTable
from diptych.worker.speculative_runner import SpeculativeRunner
from diptych.worker.stages import LastStage, StageRunner
from diptych.worker.weights import ModelWeights

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

    def __init__(
        self,
        runner: Runner,
        weights: ModelWeights,
        occupancy: Occupancy,
        info: EngineInfo,
        *,
        adapters: AdapterStore | NoAdapters,
    ) -> None:
        self._runner = runner
        self._weights = weights
        self._adapters = adapters
        self._occupancy = occupancy
        self.info = info

    def launch(self, batch: Batch) -> PendingStep:
        """Begin to run one batch. Batches must come in the order in which they were planned."""
        if batch.adapters:
            self._adapters.place(batch.adapters)
        return self._runner.launch(batch)

    def obey(self, call: WorkerCall) -> bytes:
        """Do what a call asks, between two batches. Returns: msgpack, of the form that the call says."""
        match call:
            case FreeMemory(tags):
                self._occupancy.free(tags)
            case RestoreMemory(tags):
                self._occupancy.restore(tags)
            case ReadAdapter() | AdapterIsRead() | LoadAdapter() | UnloadAdapter():
                return self._adapters.obey(call)
            case _:
                return self._weights.obey(call)
        return b""


def create_worker(config: EngineConfig, progress: Progress, world: World | None = None) -> Worker:
    """Take the device, load the model, reserve the KV pool. Raises ConfigError, before memory is taken where it can.

    Args: world: the ranks that share the model; None: there is only this one.
    """
    started = time.perf_counter()
    spec = inspect_model(config.model)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model, spec.config.dtype)
    logger.debug("torch and the device are there after %.1f s", time.perf_counter() - started)
    model = _load(config.model, spec, device=device, world=world, progress=progress)
    logger.info("weights are on %s after %.1f s", device, time.perf_counter() - started)
    draft = load_draft(config, model, dtype, progress)
    num_draft_layers = 0 if draft is None else draft.num_layers
    pool = create_pool(config, model, dtype=dtype, world=world, num_draft_layers=num_draft_layers)
    num_slots = max_num_seqs(config.scheduler, device.type)
    num_spare = int(model.groups.data.size > 1)  # a slot and a page for steps in which this group has nothing to do
    num_pages = pool.num_pages - num_spare
    max_model_len = resolve_max_model_len(
        config.model.max_model_len, spec.config.max_position_embeddings, num_pages * pool.layout.page_size
    )
    slots = SlotTable(num_slots + num_spare, max_model_len, pool.layout.page_size)
    attention = create_attention(config.cache.attention_backend, pool)
    rows = Rows(slots, _create_sampler(config, spec.config, num_slots, device))
    adapters = create_adapters(config.lora, model)
    drafter = create_drafter(config, draft, model, pool=pool, slots=slots)
    runner: Runner
    if num_spare:
        runner = GroupedRunner(model, attention, rows, spare_page=num_pages)
    else:
        runner = _create_runner(
            config, model, attention, rows=rows, adapters=adapters, drafter=drafter, progress=progress
        )
    info = _describe(config, spec, pool, world=world, attention=attention)
    info = msgspec.structs.replace(
        info,
        num_pages=num_pages,
        max_model_len=max_model_len,
        load_s=time.perf_counter() - started,
        max_loras=adapters.num_slots,
        draft_fingerprint="" if draft is None else draft.fingerprint,
    )
    everyone = ALONE if world is None else world.group(Axis.WORLD)
    weights = ModelWeights(model, spec, dtype=dtype, quantization=config.model.quantization, group=everyone)
    return Worker(runner, weights, Occupancy(model, weights, pool), info, adapters=adapters)


def _load(
    config: ModelConfig, spec: ModelSpec, *, device: torch.device, world: World | None, progress: Progress
) -> Transformer:
    """This rank's share of the model, on its share of the machine's cores."""
    if device.type == "cpu":
        num_ranks = 1 if world is None else world.placement.local_size
        torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // num_ranks))
    model = load_model(
        spec,
        dtype=resolve_dtype(config, spec.config.dtype),
        device=device,
        quantization=config.quantization,
        groups=LayerGroups.of(world),
        progress=progress,
    )
    if model.is_packed:
        torch.set_num_threads(1)  # torch's idle threads spin on the cores that the kernels' threads need
    return model


def _describe(
    config: EngineConfig, spec: ModelSpec, pool: KVPool, *, world: World | None, attention: AttentionBackend
) -> EngineInfo:
    """What this rank's engine serves, as far as model and pool say. Collective."""
    pools = pools_of_ranks(pool, world)
    return EngineInfo(
        model_path=config.model.model_path,
        architecture=spec.config.architecture,
        dtype=pool.layout.dtype,
        vocab_size=spec.config.vocab_size,
        max_model_len=spec.config.max_position_embeddings,
        eos_token_ids=spec.config.eos_token_ids,
        page_size=pool.layout.page_size,
        num_pages=pool.num_pages,
        page_nbytes=pool.layout.page_nbytes,
        max_num_seqs=max_num_seqs(config.scheduler, pool.tensor.device.type),
        device=str(pool.tensor.device),
        attention_backend=type(attention).__name__,
        load_s=0.0,
        num_layers=max(rank.first_layer + rank.num_layers for rank in pools),
        num_kv_heads=max(rank.first_kv_head + rank.num_kv_heads for rank in pools),
        head_dim=pool.layout.head_dim,
        is_latent=pool.layout.is_latent,
        kv_address=pool.data_ptr,
        pools=pools,
        fingerprint=fingerprint(spec),
    )


def _create_runner(
    config: EngineConfig,
    model: Transformer,
    attention: AttentionBackend,
    *,
    rows: Rows,
    adapters: AdapterStore | NoAdapters,
    drafter: Drafter | None,
    progress: Progress,
) -> Runner:
    device = model.device
    if model.groups.pipeline.size > 1:
        return _create_stage(config, model, attention, rows=rows)
    step_model = TorchStepModel(
        model, attention, device, adapters=adapters if isinstance(adapters, AdapterStore) else None
    )
    if drafter is not None:
        return SpeculativeRunner(step_model, rows, drafter, vocab_size=model.config.vocab_size)
    if device.type == "cuda" and model.groups.is_one_rank:
        # Imported here: a CPU needs neither Triton nor FlashInfer.
        from diptych.worker.cuda_runner import create_cuda_runner

        capture = partial(progress, "graphs") if config.model.cuda_graphs else None
        runner = create_cuda_runner(model, attention, rows, capture)
        if runner is not None:
            return runner
    return ModelRunner(step_model, rows)


def _create_stage(config: EngineConfig, model: Transformer, attention: AttentionBackend, *, rows: Rows) -> Runner:
    """The runner of one of several pipeline stages."""
    if config.speculative.is_on:
        raise ConfigError("speculative decoding does not run over pipeline stages; use tp_size instead of pp_size")
    if not model.groups.pipeline.is_last:
        return StageRunner(model, attention, rows, model.device)
    return ModelRunner(LastStage(model, attention, model.device), rows)


def _create_sampler(config: EngineConfig, model: TransformerConfig, num_slots: int, device: torch.device) -> Sampler:
    def grammars() -> GrammarCompiler:
        tokenizer = load_tokenizer(config.model.model_path, config.model.tokenizer_path)
        return GrammarCompiler(tokenizer.to_json(), model.vocab_size, model.eos_token_ids)

    return Sampler(model.vocab_size, num_slots, device=device, grammars=grammars)
