"""Whole models on the GPU against the same weights in float32 torch: chunks, decodes, graphs, batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from diptych.core.batch import Admission, Batch, SequenceStep
from diptych.core.messages import EngineInfo
from diptych.core.request import SamplingParams
from diptych.worker.worker import Worker, create_worker

pytestmark = pytest.mark.gpu

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    "llama-64": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "head_dim": 64},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
}


def worker_of(folder: Path, name: str, **changes: str) -> Worker:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
    config = EngineConfig(
        model=replace(ModelConfig(model_path=str(path), load_format="dummy"), **changes),
        cache=CacheConfig(kv_cache_memory="64MiB"),
        scheduler=SchedulerConfig(max_num_seqs=24),
    )
    return create_worker(config, lambda what, done, total: None)


class Driver:
    """Drives a worker as a scheduler would, with every prompt in pages of its own."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.info = worker, worker.info
        self.step_id = 0
        self.next_page = 0
        self.lens: dict[int, int] = {}
        self.pages: dict[int, int] = {}

    def admission(self, slot: int, prompt: list[int], sampling: SamplingParams) -> Admission:
        self.lens[slot], self.pages[slot] = 0, 0
        return Admission(slot, f"r{slot}", prompt, len(prompt), sampling, (), 200)

    def row(self, slot: int, count: int, total: int) -> SequenceStep:
        start = self.lens[slot]
        self.lens[slot] = start + count
        needed = -(-self.lens[slot] // self.info.page_size) - self.pages[slot]
        new_pages = [self.next_page + index for index in range(needed)]
        self.next_page += needed
        self.pages[slot] += needed
        return SequenceStep(slot, start, count, new_pages, start + count >= total)

    def launch(self, rows: list[SequenceStep], admissions: list[Admission] | None = None) -> Any:
        self.step_id += 1
        return self.worker.launch(Batch(self.step_id, [], admissions or [], rows))


def generate(
    worker: Worker, prompts: list[list[int]], count: int, *, chunk: int = 1000, sampling: SamplingParams | None = None
) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch; decode steps are launched before the last one is collected."""
    driver = Driver(worker)
    sampling = sampling or SamplingParams(max_tokens=200, temperature=0.0, seed=0)
    admissions = [driver.admission(slot, prompt, sampling) for slot, prompt in enumerate(prompts)]
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(driver.lens[slot] < len(prompt) for slot, prompt in enumerate(prompts)):
        rows = [
            driver.row(slot, min(chunk, len(prompt) - driver.lens[slot]), len(prompt))
            for slot, prompt in enumerate(prompts)
            if driver.lens[slot] < len(prompt)
        ]
        take(outputs, rows, driver.launch(rows, admissions))
        admissions = []
    pending: list[tuple[list[SequenceStep], Any]] = []
    for _ in range(count - 1):
        rows = [driver.row(slot, 1, 0) for slot in range(len(prompts))]
        pending.append((rows, driver.launch(rows)))
        if len(pending) > 1:
            take(outputs, *pending.pop(0))
    for rows, step in pending:
        take(outputs, rows, step)
    worker.launch(Batch(10**6, list(range(len(prompts))), [], []))
    return outputs


def take(outputs: list[list[int]], rows: list[SequenceStep], step: Any) -> None:
    step.wait()
    for row, result in zip(rows, step.collect().rows, strict=True):
        assert result.error is None
        outputs[row.slot] += result.token_ids


def prompts() -> list[list[int]]:
    lens = [1, 2, 15, 16, 17, 40, 100, 257, 3, 64]
    return [[(7 * index + 13 * place) % 1000 + 5 for place in range(length)] for index, length in enumerate(lens)]


def first_logprobs(worker: Worker, prompt: list[int]) -> dict[int, float]:
    """The 20 likeliest first tokens of a prompt."""
    driver = Driver(worker)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, seed=0, logprobs=20)
    step = driver.launch([*[]], [driver.admission(0, prompt, sampling)])
    step.wait()
    step.collect()
    step = driver.launch([driver.row(0, len(prompt), len(prompt))])
    step.wait()
    top = step.collect().rows[0].logprobs[0].top
    worker.launch(Batch(10**6, [0], [], []))
    return dict(top)


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Worker, Worker]:
    """The same weights in bfloat16 with our kernels and in float32 with torch."""
    folder = tmp_path_factory.mktemp("models")
    return (
        worker_of(folder, request.param, device="cuda"),
        worker_of(folder, request.param, device="cuda", dtype="float32"),
    )


def test_the_fast_path_is_the_one_under_test(pair: tuple[Worker, Worker]) -> None:
    fast, exact = (worker.info for worker in pair)
    assert (fast.attention_backend, exact.attention_backend) == ("FlashInferAttention", "ReferenceAttention")
    assert isinstance(fast, EngineInfo) and fast.dtype == "bfloat16"


def test_logits_are_those_of_float32(pair: tuple[Worker, Worker]) -> None:
    for prompt in prompts():
        fast, exact = (first_logprobs(worker, prompt) for worker in pair)
        common = set(fast) & set(exact)
        assert len(common) >= 15
        assert max(abs(fast[token] - exact[token]) for token in common) < 0.06


def test_batches_chunks_and_graphs_change_next_to_nothing(pair: tuple[Worker, Worker]) -> None:
    """In 16 bits another order of summation may turn a near tie; more than a few of them would be a bug."""
    fast, exact = pair
    alone = [generate(fast, [prompt], 12)[0] for prompt in prompts()]
    for other in (
        generate(fast, prompts(), 12),
        generate(fast, prompts(), 12, chunk=16),
        generate(fast, prompts(), 12, chunk=7),
        generate(exact, prompts(), 12),
    ):
        same = sum(one == another for one, another in zip(alone, other, strict=True))
        assert same >= 7, f"{same} of {len(alone)} are equal"


def test_the_same_batch_twice_is_the_same(pair: tuple[Worker, Worker]) -> None:
    fast, _ = pair
    assert generate(fast, prompts(), 20) == generate(fast, prompts(), 20)


def test_seeded_sampling_repeats(pair: tuple[Worker, Worker]) -> None:
    fast, _ = pair
    sampling = SamplingParams(max_tokens=200, temperature=0.8, top_p=0.9, top_k=50, seed=7)
    first = generate(fast, prompts(), 10, sampling=sampling)
    assert first == generate(fast, prompts(), 10, sampling=sampling)
    assert first != generate(fast, prompts(), 10, sampling=replace_seed(sampling))


def replace_seed(sampling: SamplingParams) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(sampling, seed=8)
