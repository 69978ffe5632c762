"""Every architecture against transformers on tiny random models: whole prompts, chunks, decodes and mixtures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from diptych.attention.backend import AttentionInputs, ForwardInputs
from diptych.attention.registry import create_attention
from diptych.errors import ConfigError
from diptych.kernels.library import kernels
from diptych.kv.layout import KVLayout
from diptych.kv.pool import KVPool
from diptych.models.config import TransformerConfig
from diptych.models.huggingface import config_from_fields
from diptych.models.json_fields import Fields
from diptych.models.registry import MODELS
from diptych.models.transformer import Transformer

VOCAB = 96
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3 = {**TINY, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
GEMMA3_SCALED_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Mistral": (MistralConfig, MistralForCausalLM),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "Gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", TINY),
    "llama-llama3-rope": ("Llama", {**TINY, "rope_parameters": LLAMA3_ROPE}),
    "llama-yarn-rope": ("Llama", {**TINY, "rope_parameters": YARN_ROPE}),
    "llama-head-dim-biases-tied": (
        "Llama",
        {**TINY, "head_dim": 20, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-multi-query": ("Llama", {**TINY, "num_key_value_heads": 1}),
    "llama-multi-head": ("Llama", {**TINY, "num_key_value_heads": 4}),
    "mistral-window": ("Mistral", {**TINY, "sliding_window": 7}),
    "mistral-full": ("Mistral", {**TINY, "sliding_window": None}),
    "qwen2": ("Qwen2", TINY),
    "qwen2-late-windows": (
        "Qwen2",
        {**TINY, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**TINY, "head_dim": 32}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-scaled-rope-multi-query": (
        "Gemma3",
        {**GEMMA3, "num_key_value_heads": 1, "rope_parameters": GEMMA3_SCALED_ROPE},
    ),
}


class StateDictSource:
    """A WeightSource over a state dict. On device "meta" it knows names and shapes only."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: str = "cpu") -> None:
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.names_read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ConfigError(f"tensor {name} is missing")
        return tuple(self.tensors[name].shape)

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        self.names_read.add(name)
        tensor = self.tensors[name]
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)


@cache
def reference_model(case: str) -> PreTrainedModel:
    """transformers' model, random weights; every norm and bias is random too, or a missing one would go unnoticed."""
    family, options = CASES[case]
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(sum(map(ord, case)))
    model = model_class(config_class(**options)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def our_config(config: PreTrainedConfig, architecture: str) -> TransformerConfig:
    content = {**config.to_dict(), "architectures": [architecture]}
    return config_from_fields(Fields(content, "config.json"), Fields({}, "generation_config.json"))


@cache
def our_model(case: str, dtype: torch.dtype = torch.float32, backend: str = "reference") -> Transformer:
    """Our model in plain torch, or with its weights packed for the CPU kernels."""
    reference = reference_model(case)
    config = our_config(reference.config, type(reference).__name__)
    model = MODELS.resolve(config.architecture)(config, dtype=dtype, device="cpu")
    assert isinstance(model, Transformer)
    model.load(StateDictSource(reference.state_dict()))
    if backend == "cpu":
        model.pack()
    return model


@dataclass
class Runner:
    """Feeds ragged steps to a model; pages are handed out in a shuffled order, so that none happen to be adjacent."""

    model: Transformer
    page_size: int
    backend: str = "reference"
    num_pages: int = 160
    page_ids: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        dtype = self.model.embed_tokens.weight.dtype
        layout = KVLayout.single_rank(
            config.num_layers,
            config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=self.page_size,
            dtype=str(dtype).removeprefix("torch."),
        )
        self.pool = KVPool(layout, self.num_pages, torch.device("cpu"), dtype)
        self.attention = create_attention(self.backend, self.pool)
        self.free = torch.randperm(self.num_pages).tolist()

    def step(self, rows: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some sequences; logits of every one of them, [tokens, vocab]."""
        positions: list[int] = []
        slots: list[int] = []
        for row, token_ids in rows.items():
            start = self.computed.get(row, 0)
            self.computed[row] = start + len(token_ids)
            pages = self.page_ids.setdefault(row, [])
            while len(pages) * self.page_size < self.computed[row]:
                pages.append(self.free.pop())
            for position in range(start, self.computed[row]):
                positions.append(position)
                slots.append(pages[position // self.page_size] * self.page_size + position % self.page_size)
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for token_ids in rows.values() for token in token_ids]),
            positions=torch.tensor(positions),
            logit_rows=torch.arange(len(positions)),
            attention=self._attention_inputs(rows, slots),
        )
        hidden = self.model.forward(inputs, self.attention)
        lengths = [len(token_ids) for token_ids in rows.values()]
        return dict(zip(rows, self.model.logits(hidden).split(lengths), strict=True))

    def _attention_inputs(self, rows: dict[int, Sequence[int]], slots: list[int]) -> AttentionInputs:
        lengths = [len(token_ids) for token_ids in rows.values()]
        kv_lens = [self.computed[row] for row in rows]
        width = max(len(self.page_ids[row]) for row in rows)
        table = [self.page_ids[row] + [2**30] * (width - len(self.page_ids[row])) for row in rows]
        return AttentionInputs(
            query_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=torch.tensor(table, dtype=torch.int32),
            kv_slots=torch.tensor(slots),
            query_lens_host=lengths,
            kv_lens_host=kv_lens,
        )


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def expected_logits(case: str, length: int, seed: int = 0) -> torch.Tensor:
    return reference_model(case)(torch.tensor([prompt(length, seed)])).logits[0]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.5, "logits that are all alike would prove nothing"
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


backends = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param(
            "cpu", marks=pytest.mark.skipif(kernels() is None, reason="no C++ compiler: there are no kernels")
        ),
    ],
)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_whole_prompt(case: str, page_size: int) -> None:
    logits = Runner(our_model(case), page_size).step({0: prompt(70)})[0]
    assert_same(logits, expected_logits(case, 70))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", [(1, 30, 3, 36), (16, 16, 16, 16, 6), (69, 1)])
def test_chunks(case: str, chunks: tuple[int, ...]) -> None:
    runner, token_ids = Runner(our_model(case), page_size=4), prompt(70)
    bounds = [0, *itertools.accumulate(chunks)]
    parts = [runner.step({0: token_ids[start:stop]})[0] for start, stop in itertools.pairwise(bounds)]
    assert_same(torch.cat(parts), expected_logits(case, 70))


@backends
@pytest.mark.parametrize("case", CASES)
def test_mixed_batches_of_chunks_and_decodes(case: str, backend: str) -> None:
    """Five sequences of different lengths, each with its own rhythm of chunks, all in the same steps."""
    runner = Runner(our_model(case, backend=backend), page_size=4, backend=backend)
    lengths = {row: 12 + 14 * row for row in range(5)}
    tokens = {row: prompt(length, seed=row) for row, length in lengths.items()}
    rhythms = {row: itertools.cycle(rhythm) for row, rhythm in enumerate([(1,), (5, 1, 1), (17, 1), (1, 2), (40, 1)])}
    collected: dict[int, list[torch.Tensor]] = {row: [] for row in lengths}
    while unfinished := [row for row in lengths if runner.computed.get(row, 0) < lengths[row]]:
        chunks = {}
        for row in unfinished:
            start = runner.computed.get(row, 0)
            chunks[row] = tokens[row][start : start + next(rhythms[row])]
        for row, logits in runner.step(chunks).items():
            collected[row].append(logits)
    for row, parts in collected.items():
        assert_same(torch.cat(parts), expected_logits(case, lengths[row], seed=row))


@pytest.mark.parametrize("case", ["llama-llama3-rope", "gemma3"])
def test_prompt_longer_than_a_query_block(case: str) -> None:
    runner, token_ids = Runner(our_model(case), page_size=16), prompt(400)
    parts = [runner.step({0: token_ids[:90]})[0], runner.step({0: token_ids[90:]})[0]]
    assert_same(torch.cat(parts), expected_logits(case, 400))


@backends
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_as_close_as_transformers_is_to_itself(case: str, backend: str) -> None:
    """Our distance from float32 is at most 1.25 times that of transformers in bfloat16, and the two are close."""
    exact = expected_logits(case, 70)
    # A copy, as bfloat16: the cached model stays float32.
    theirs_model = type(reference_model(case))(reference_model(case).config)
    theirs_model.load_state_dict(reference_model(case).state_dict())
    theirs = theirs_model.eval().bfloat16()(torch.tensor([prompt(70)])).logits[0].float()
    model = our_model(case, torch.bfloat16, backend)
    ours = Runner(model, page_size=16, backend=backend).step({0: prompt(70)})[0]
    their_error, our_error = (theirs - exact).square().mean().sqrt(), (ours - exact).square().mean().sqrt()
    assert our_error <= 1.25 * their_error
    assert (ours - theirs).square().mean().sqrt() <= 1.25 * their_error


@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_read_and_a_dry_run_takes_no_memory(case: str) -> None:
    config = our_model(case).config
    state = reference_model(case).state_dict()
    source = StateDictSource(state, device="meta")
    model = MODELS.resolve(config.architecture)(config, dtype=torch.bfloat16, device="meta")
    assert isinstance(model, Transformer)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load(source)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert source.names_read == set(state) - tied
    missing = dict(source.tensors)
    del missing["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        model.load(StateDictSource(missing, device="meta"))
