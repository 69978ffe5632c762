"""A real server whose weights are replaced and whose memory is released, over HTTP, while it is used."""

from __future__ import annotations

import base64
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from live_server import LiveServer, run_server, wait_for
from safetensors.torch import save
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

MIB = 1024 * 1024
PROMPT = [1, 5, 9, 11, 3]
GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def make_model(seed: int) -> PreTrainedModel:
    """Large enough that its memory shows: 60 MB of float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, PreTrainedModel]]:
    found = []
    for seed in (1, 2):
        folder, model = tmp_path_factory.mktemp(f"policy-{seed}"), make_model(seed)
        model.save_pretrained(folder)
        vocabulary = {f"t{index}": index for index in range(16000)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
        found.append((folder, model))
    return found


@pytest.fixture
def server(policies: list[tuple[Path, PreTrainedModel]], tmp_path: Path) -> Iterator[LiveServer]:
    arguments = ["--model-path", str(policies[0][0]), "--dtype", "float32", "--kv-cache-memory", "64MiB"]
    with run_server(tmp_path, *arguments, "--check-invariants", name="policy") as server:
        yield server


def generated(server: LiveServer) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    return answer


def reference(model: PreTrainedModel) -> list[int]:
    with torch.no_grad():
        token_ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return token_ids[0, len(PROMPT) :].tolist()


def rss(server: LiveServer) -> int:
    return int(psutil.Process(server.engine_pid).memory_info().rss)


def test_weights_over_http(server: LiveServer, policies: list[tuple[Path, PreTrainedModel]]) -> None:
    (path_a, model_a), (path_b, model_b) = policies
    assert generated(server)["output_ids"] == reference(model_a)
    state = {name: values.contiguous() for name, values in model_b.named_parameters()}
    names = list(state)
    for part, is_last in ((names[:3], False), (names[3:], True)):
        answer = httpx.post(
            f"{server.url}/update_weights_from_tensor",
            params={"update_id": "mine", "is_last": is_last, "weight_version": "b"},
            content=save({name: state[name].detach() for name in part}),
            headers={"Content-Type": "application/octet-stream"},
            timeout=60,
        ).json()
        assert answer["success"], answer
    answer = generated(server)
    assert answer["output_ids"] == reference(model_b) and answer["meta_info"]["weight_version"] == "b"
    assert server.get("/model_info")["weight_version"] == "b" == server.get("/server_info")["weight_version"]

    body = {"model_path": str(path_a), "weight_version": "a", "abort_all_requests": True}
    assert server.post("/update_weights_from_disk", body)["success"]
    answer = generated(server)
    assert answer["output_ids"] == reference(model_a) and answer["meta_info"]["weight_version"] == "a"
    rows = server.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 5})
    assert rows == pytest.approx(model_a.model.norm.weight[:5].tolist())

    norm = {"model.norm.weight": torch.full((512,), 0.25)}
    bodies = {"serialized_named_tensors": [base64.b64encode(save(norm)).decode()]}
    assert server.post("/update_weights_from_tensor", bodies)["success"]
    assert server.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 2}) == [0.25, 0.25]
    assert server.post("/update_weight_version", {"new_version": "a2"})["success"]
    assert server.get("/model_info")["weight_version"] == "a2"
    _ = path_b


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, "there is no model at /nowhere"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVpickle=="]}, "pickles are not read"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "no tensor was sent"),
    ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "no group"),
    ("/destroy_weights_update_group", {}, "no group"),
    ("/get_weights_by_name", {"name": "nothing"}, "no tensor 'nothing'"),
    ("/release_memory_occupation", {"tags": ["cuda_graph"]}, "tags must be among"),
]


def test_refusals_say_what_is_wrong(server: LiveServer) -> None:
    before = generated(server)["output_ids"]
    for path, body, message in REFUSALS:
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], path
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert httpx.post(f"{server.url}/sleep", headers=foreign, timeout=60).status_code == 400
    assert generated(server)["output_ids"] == before


def test_sleep_returns_memory_and_waking_is_right(
    server: LiveServer, policies: list[tuple[Path, PreTrainedModel]]
) -> None:
    expected = reference(policies[0][1])
    assert generated(server)["output_ids"] == expected
    before = rss(server)
    assert server.post("/sleep?level=2", None)["success"]
    assert server.get("/is_sleeping") == {"is_sleeping": True, "released": ["weights", "kv_cache"]}
    assert before - rss(server) > 40 * MIB
    refused = httpx.post(f"{server.url}/generate", json={"input_ids": PROMPT}, timeout=60)
    assert refused.status_code == 503 and "wake_up" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 503 and httpx.get(f"{server.url}/ping").status_code == 200
    assert server.post("/wake_up?tags=weights", None)["success"]
    assert server.get("/is_sleeping")["released"] == ["kv_cache"]
    assert server.post("/wake_up", None)["success"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert generated(server)["output_ids"] == expected

    httpx.post(f"{server.url}/release_memory_occupation", json={"tags": ["kv_cache"]}, timeout=60).raise_for_status()
    httpx.post(f"{server.url}/resume_memory_occupation", timeout=60).raise_for_status()
    assert generated(server)["output_ids"] == expected


def test_pauses(server: LiveServer) -> None:
    assert server.post("/pause_generation", {"mode": "in_place"})["status"] == "ok"
    assert server.get("/is_paused") == {"is_paused": True}
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(generated(server)))
    waiting.start()
    waiting.join(0.5)
    assert not answers
    assert server.post("/continue_generation", {})["status"] == "ok"
    waiting.join()
    assert len(answers[0]["output_ids"]) == 12 and server.get("/is_paused") == {"is_paused": False}


def test_a_storm_over_http_loses_nothing(server: LiveServer, policies: list[tuple[Path, PreTrainedModel]]) -> None:
    """Clients generate all the while; each answer is whole and of one model, aborted, or a 503 that says why."""
    valid = [reference(model) for _, model in policies]
    is_over = threading.Event()
    outcomes: list[str] = []

    def generate() -> None:
        while not is_over.is_set():
            body = {"input_ids": PROMPT, "sampling_params": GREEDY}
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
            if answer.status_code == 503:
                outcomes.append("refused" if "released" in answer.json()["error"]["message"] else answer.text)
            elif answer.json()["meta_info"]["finish_reason"]["type"] == "abort":
                outcomes.append("aborted")
            else:
                outcomes.append("right" if answer.json()["output_ids"] in valid else answer.text)

    clients = [threading.Thread(target=generate) for _ in range(4)]
    for client in clients:
        client.start()
    rng = random.Random(3)
    actions: list[Callable[[], Any]] = [
        lambda: server.post("/update_weights_from_disk", {"model_path": str(rng.choice(policies)[0])}),
        lambda: server.post(
            "/update_weights_from_disk", {"model_path": str(rng.choice(policies)[0]), "abort_all_requests": True}
        ),
        lambda: [server.post("/sleep?level=2&mode=abort", None), server.post("/wake_up", None)],
        lambda: [server.post("/pause_generation", {"mode": "wait"}), server.post("/continue_generation", {})],
    ]
    for _ in range(3):
        for action in rng.sample(actions, len(actions)):
            action()
    wait_for(lambda: outcomes.count("right") > 20, 60, "no request got through")
    is_over.set()
    for client in clients:
        client.join()
    assert set(outcomes) <= {"right", "aborted", "refused"}
    load = server.wait_until_idle()
    assert load["memory"]["num_free_pages"] + load["memory"]["num_cached_pages"] == load["memory"]["num_pages"]
