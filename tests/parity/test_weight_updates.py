"""The golden law after an update: greedy output of an engine that was given model B's weights is a fresh engine's on B,
and transformers' own, whichever way the weights came and however they are packed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen3Config

from diptych import Engine, FlattenedBucket, WeightsGroup
from diptych.errors import RequestError, Unavailable

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=16, query_pre_attn_scalar=32),
}
PROMPTS = [[1, *range(3, 3 + n)] for n in (2, 5, 17, 40)]
GREEDY = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}


def make_model(name: str, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Random models of their own scale say the same token for ever.
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) / 8)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, PreTrainedModel]]:
    def save(name: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Path, PreTrainedModel]:
        path, model = tmp_path / f"{name}-{seed}", make_model(name, seed, dtype)
        model.save_pretrained(path)
        vocabulary = {f"t{index}": index for index in range(96)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(path / "tokenizer.json"))
        return path, model

    return save


def outputs(engine: Engine) -> list[list[int]]:
    answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return [answer["output_ids"] for answer in answers]


def reference(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        token_ids = torch.tensor([prompt])
        with torch.no_grad():
            generated = model.generate(token_ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(generated[0, len(prompt) :].tolist())
    return found


def start(path: Path, **options: object) -> Engine:
    return Engine(
        model_path=str(path), kv_cache_memory="8MiB", page_size=4, max_model_len=128, check_invariants=True, **options
    )


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_tensors_of_b_make_it_b(name: str, saved: Callable[..., tuple[Path, PreTrainedModel]]) -> None:
    (path_a, model_a), (_, model_b) = saved(name, 1), saved(name, 2)
    with start(path_a, dtype="float32") as engine:
        assert outputs(engine) == reference(model_a)
        engine.update_weights_from_tensor(model_b.state_dict().items(), weight_version="b")
        assert outputs(engine) == reference(model_b) != reference(model_a)
        answer = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert answer["meta_info"]["weight_version"] == "b" == engine.get_server_info()["weight_version"]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_packed_engine_becomes_a_fresh_one(
    quantization: str, saved: Callable[..., tuple[Path, PreTrainedModel]]
) -> None:
    (path_a, _), (path_b, model_b) = saved("qwen3", 1, torch.bfloat16), saved("qwen3", 2, torch.bfloat16)
    options = {"dtype": "bfloat16", "quantization": quantization}
    with start(path_b, **options) as fresh:
        expected = outputs(fresh)
        fingerprint = fresh.get_server_info()["fingerprint"]
    with start(path_a, **options) as engine:
        before = outputs(engine)
        assert before != expected
        engine.update_weights_from_tensor(FlattenedBucket.of(model_b.state_dict().items()))
        assert outputs(engine) == expected
        engine.update_weights_from_disk(str(path_a))
        assert outputs(engine) == before
        engine.update_weights_from_disk(str(path_b))
        assert outputs(engine) == expected and engine.get_server_info()["fingerprint"] == fingerprint


def test_a_trainer_broadcasts(saved: Callable[..., tuple[Path, PreTrainedModel]], free_port: int) -> None:
    (path_a, _), (_, model_b) = saved("llama", 1), saved("llama", 2)
    state = dict(model_b.state_dict())

    def train() -> None:
        group = WeightsGroup("127.0.0.1", free_port, rank=0, world_size=2, timeout_s=30)
        for values in state.values():
            group.broadcast(values.contiguous())

    trainer = threading.Thread(target=train)
    trainer.start()
    with start(path_a, dtype="float32") as engine:
        engine.init_weights_update_group("127.0.0.1", free_port, 1, 2, timeout_s=30)
        shapes = [tuple(values.shape) for values in state.values()]
        engine.update_weights_from_distributed(list(state), ["torch.float32"] * len(state), shapes)
        assert outputs(engine) == reference(model_b)
        engine.destroy_weights_update_group()
    trainer.join()


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_every_rank_takes_its_part(sizes: dict[str, int], saved: Callable[..., tuple[Path, PreTrainedModel]]) -> None:
    (path_a, model_a), (path_b, model_b) = saved("qwen3", 1), saved("qwen3", 2)
    with start(path_a, dtype="float32", **sizes) as engine:
        assert outputs(engine) == reference(model_a)
        engine.update_weights_from_tensor(model_b.state_dict().items())
        assert outputs(engine) == reference(model_b)
        for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
            rows = torch.tensor(engine.get_weights_by_name(name, 90))
            assert torch.equal(rows, model_b.state_dict()[name][:90]), name
        with pytest.raises(RequestError, match="cannot take the loaded model's place"):
            engine.update_weights_from_disk("/nowhere")
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert outputs(engine) == reference(model_b)
        engine.update_weights_from_disk(str(path_a))
        assert outputs(engine) == reference(model_a)
    _ = path_b


@pytest.fixture
def engine(saved: Callable[..., tuple[Path, PreTrainedModel]]) -> Iterator[Engine]:
    with start(saved("llama", 1)[0], dtype="float32") as engine:
        yield engine


def test_values_are_read_as_they_are(engine: Engine) -> None:
    expected = make_model("llama", 1, torch.float32).state_dict()["model.layers.1.self_attn.k_proj.weight"]
    rows = engine.get_weights_by_name("model.layers.1.self_attn.k_proj.weight", 7)
    assert torch.equal(torch.tensor(rows), expected[:7])
    with pytest.raises(RequestError, match="no tensor 'nothing'"):
        engine.get_weights_by_name("nothing")


def test_a_bad_tensor_changes_nothing(engine: Engine) -> None:
    before = outputs(engine)
    good = make_model("llama", 2, torch.float32).state_dict()
    for bad, message in (
        (("model.layers.7.mlp.up_proj.weight", torch.zeros(96, 64)), r"no tensor 'model\.layers\.7"),
        (("model.norm.weight", torch.zeros(65)), r"has shape \[65\]"),
        (("model.norm.weight", torch.zeros(64, dtype=torch.int32)), "dtype 'int32'"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.update_weights_from_tensor({**good, bad[0]: bad[1]}.items())
        assert outputs(engine) == before


def test_first_request_after_sleep_is_right(engine: Engine) -> None:
    before = outputs(engine)
    changed = make_model("llama", 2, torch.float32)
    for _ in range(2):
        engine.release_memory_occupation()
        with pytest.raises(Unavailable, match="resume_memory_occupation"):
            outputs(engine)
        engine.resume_memory_occupation(["weights"])
        engine.resume_memory_occupation(["kv_cache"])
        assert outputs(engine) == before
        # The second time the weights are those of no file.
        engine.update_weights_from_tensor(changed.state_dict().items())
        before = reference(changed)


def test_paused_requests_go_on_with_the_new_weights(engine: Engine) -> None:
    engine.pause_generation("keep")
    found: list[list[list[int]]] = []
    waiting = threading.Thread(target=lambda: found.append(outputs(engine)))
    waiting.start()
    changed = make_model("llama", 2, torch.float32)
    engine.update_weights_from_tensor(changed.state_dict().items())
    assert not found
    engine.continue_generation()
    waiting.join()
    assert found == [reference(changed)]
