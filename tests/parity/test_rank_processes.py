"""Ranks as processes, with everything that is between them: the executor, the collectives, the kernels, the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from rank_steps import Story, assert_alike, batches_of, play, play_alone, tokenizer_json
from tiny_models import prompt, reference_model

from diptych.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from diptych.core.batch import StepOutput
from diptych.core.messages import EngineInfo, RankPool
from diptych.core.request import SamplingParams
from diptych.engine.multi_process import MultiProcessExecutor
from diptych.kernels.library import kernels
from diptych.worker.worker import Worker, create_worker

T = TypeVar("T")
WAIT_S = 60.0


def config_of(folder: Path, dtype: str, quantization: str = "none", **parallel: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model_path=str(folder), device="cpu", dtype=dtype, quantization=quantization),
        cache=CacheConfig(page_size=4, kv_cache_memory="4MiB"),
        scheduler=SchedulerConfig(max_num_seqs=8),
        parallel=ParallelConfig(**parallel),
    )


def wait_for(poll: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        news = poll()
        if news is not None:
            return news
        time.sleep(0.002)
    raise TimeoutError("the ranks say nothing")


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[tuple[MultiProcessExecutor, EngineInfo]]:
    executor = MultiProcessExecutor(config)
    try:
        executor.start()
        news = None
        while not isinstance(news, EngineInfo):
            news = wait_for(executor.poll_loading)
        yield executor, news
    finally:
        executor.shutdown()


def run(executor: MultiProcessExecutor, stories: list[Story]) -> list[StepOutput]:
    """All steps submitted at once, as far as there are stages and beyond."""
    count = 0
    for batch, _ in batches_of(stories):
        executor.submit(batch)
        count += 1
    outputs = [wait_for(executor.poll) for _ in range(count)]
    assert all(isinstance(output, StepOutput) for output in outputs)
    return outputs


def test_two_stages_of_two_ranks(tmp_path: Path) -> None:
    case = "llama-head-dim-biases-tied"
    reference_model(case).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    told, expected = play_alone(case)
    with ranks_of(config_of(tmp_path, "float32", tp_size=2, pp_size=2)) as (executor, info):
        assert_alike(run(executor, told), expected)
    assert (info.num_layers, info.num_kv_heads, len(info.pools)) == (3, 2, 4)
    held = [(p.first_layer, p.num_layers, p.first_kv_head, p.num_kv_heads) for p in info.pools]
    assert held == [(0, 2, 0, 1), (0, 2, 1, 1), (2, 1, 0, 1), (2, 1, 1, 1)]
    assert len({pool.kv_address for pool in info.pools}) == 4
    row_nbytes = 2 * 4 * 20 * 4  # keys and values of a page's tokens
    assert [pool.page_nbytes for pool in info.pools] == [2 * row_nbytes, 2 * row_nbytes, row_nbytes, row_nbytes]
    assert info.num_pages == 4 * 2**20 // (2 * row_nbytes), "as many as the rank with the largest pages has room for"


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("deepseek-v3", {"tp_size": 2, "ep_size": 2}),
        ("qwen3-moe-some-layers-dense", {"tp_size": 4, "ep_size": 2}),
    ],
)
def test_experts_on_several_ranks(case: str, sizes: dict[str, int], tmp_path: Path) -> None:
    reference_model(case).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    told, expected = play_alone(case)
    with ranks_of(config_of(tmp_path, "float32", **sizes)) as (executor, info):
        assert_alike(run(executor, told), expected)
    held = {(pool.first_kv_head, pool.num_kv_heads) for pool in info.pools}
    assert info.is_latent == (case == "deepseek-v3")
    assert held == ({(0, 1)} if info.is_latent else {(0, 1), (1, 1)})


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
@pytest.mark.parametrize(
    ("quantization", "sizes"), [("none", {"tp_size": 2}), ("int8", {"tp_size": 2}), ("int8", {"pp_size": 2})]
)
def test_two_ranks_on_packed_weights(quantization: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """bfloat16 rounds each rank's part of a sum, so that logits differ in their last digits; stages change nothing."""
    reference_model("qwen3").save_pretrained(tmp_path)
    scored = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
    told = [Story(prompt(40, 1), scored, chunks=(30, 10), num_steps=0), Story(prompt(21, 2), scored, num_steps=0)]
    worker = load_alone(config_of(tmp_path, "bfloat16", quantization))
    expected = play(worker._runner, told)
    with ranks_of(config_of(tmp_path, "bfloat16", quantization, **sizes)) as (executor, info):
        outputs = run(executor, told)
    assert info.attention_backend == "CPUAttention"
    found, wanted = scores(outputs), scores(expected)
    assert len(found) == 39 + 20
    assert wanted.std() > 0.5, "scores that are all alike would prove nothing"
    assert (found - wanted).pow(2).mean().sqrt() < (0.1 if "tp_size" in sizes else 1e-6)


def load_alone(config: EngineConfig) -> Worker:
    worker = create_worker(config, lambda what, done, total: None)
    assert [type(pool) for pool in worker.info.pools] == [RankPool]
    return worker


def scores(outputs: list[StepOutput]) -> torch.Tensor:
    """Logprobs of the prompts' tokens."""
    return torch.tensor([entry.logprob for step in outputs for row in step.rows for entry in row.prompt_logprobs])
