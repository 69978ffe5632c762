"""Adapters over HTTP: loaded at start and while requests run, named by model or lora_path, and through a router."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from live_server import LiveServer, run_server
from lora_folders import save_adapter
from test_pd import ENGINE_FLAGS, engine_url, rooms_done, run_cluster
from transformers import AutoModelForCausalLM

IDS = list(range(40, 90))
SAMPLING = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Folders:
    """Adapters by name, and the greedy output that peft has with each; "" is the base model."""

    root: Path
    outputs: dict[str, list[int]]

    def path(self, name: str) -> str:
        return str(self.root / name)


@torch.inference_mode()
def greedy(model: Any, count: int = 12) -> list[int]:
    ids = list(IDS)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(IDS) :]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(str(tiny_model))
    outputs = {"": greedy(model)}
    for seed, (name, rank) in enumerate({"one": 4, "two": 9, "three": 4}.items()):
        outputs[name] = greedy(save_adapter(copy.deepcopy(model), root / name, rank=rank, seed=seed, std=0.3))
    assert len({tuple(output) for output in outputs.values()}) == 4, "adapters that change nothing prove nothing"
    return Folders(root, outputs)


def generate(url: str, adapter: str) -> list[int]:
    body = {"input_ids": IDS, "sampling_params": SAMPLING, "lora_path": adapter}
    found: list[int] = httpx.post(url + "/generate", json=body, timeout=60).raise_for_status().json()["output_ids"]
    return found


@pytest.fixture(scope="module")
def live(tiny_model: Path, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that has "one" from its start, and room for two on the device."""
    flags = (*ENGINE_FLAGS, "--max-loras", "2", "--lora-paths", f"one={folders.path('one')}", "--check-invariants")
    with run_server(tmp_path_factory.mktemp("lora"), str(tiny_model), *flags, name="tiny-llama") as live:
        yield live
        live.wait_until_idle()


def test_openai_sdk_names_an_adapter_by_model(live: LiveServer, folders: Folders) -> None:
    live.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": folders.path("two"), "pinned": True})
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        cards = {card.id: card.model_dump() for card in client.models.list()}
        assert list(cards) == ["tiny-llama", "one", "two"]
        assert cards["two"]["parent"] == "tiny-llama" and cards["two"]["root"] == folders.path("two")
        for name in ("tiny-llama", "one", "two", "tiny-llama:two"):
            answer = client.completions.create(
                model=name, prompt=IDS, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
            )
            assert answer.model == name
            said = folders.outputs[name.removeprefix("tiny-llama").removeprefix(":")]
            assert answer.choices[0].model_dump()["token_ids"] == said
        with pytest.raises(openai.NotFoundError, match="'three' is not served here; use 'tiny-llama', 'one', 'two'"):
            client.completions.create(model="three", prompt=IDS)
    live.post("/v1/unload_lora_adapter", {"lora_name": "two"})
    assert [card["id"] for card in live.get("/v1/models")["data"]] == ["tiny-llama", "one"]


def test_a_batch_mixes_adapters(live: LiveServer, folders: Folders) -> None:
    live.post("/load_lora_adapter", {"lora_name": "two", "lora_path": folders.path("two")})
    names = ["one", None, "two", "one"]
    body = {"input_ids": [IDS] * 4, "sampling_params": SAMPLING, "lora_path": names}
    outputs = [answer["output_ids"] for answer in live.post("/generate", body)]
    assert outputs == [folders.outputs[name or ""] for name in names]
    assert live.post("/unload_lora_adapter", {"lora_name": "two"})["loaded_adapters"] == {"one": folders.path("one")}


def test_pages_of_a_name_are_not_those_of_other_weights(live: LiveServer, folders: Folders) -> None:
    for name in ("two", "three", "two"):
        live.post("/load_lora_adapter", {"lora_name": "changing", "lora_path": folders.path(name)})
        for _ in range(2):
            assert generate(live.url, "changing") == folders.outputs[name]
        live.post("/unload_lora_adapter", {"lora_name": "changing"})
    body = {"input_ids": IDS, "sampling_params": SAMPLING, "extra_key": "\0adapter\0one\0"}
    assert live.post("/generate", body)["output_ids"] == folders.outputs[""]


def test_what_is_wrong_is_said_and_changes_nothing(live: LiveServer, folders: Folders, tmp_path: Path) -> None:
    refused = {
        "lora_path": ({"lora_name": "x", "lora_path": str(tmp_path)}, "has no adapter_config.json"),
        "name": ({"lora_name": "one", "lora_path": folders.path("two")}, "'one' is loaded already"),
        "model": ({"lora_name": "tiny-llama", "lora_path": folders.path("two")}, "name of the model itself"),
    }
    for body, text in refused.values():
        answer = httpx.post(live.url + "/load_lora_adapter", json=body)
        assert answer.status_code == 400
        assert answer.json()["success"] is False and text in answer.json()["error_message"]
        assert answer.json()["error"]["message"] == answer.json()["error_message"]
        assert list(answer.json()["loaded_adapters"]) == ["one"]
    answer = httpx.post(live.url + "/unload_lora_adapter", json={"lora_name": "two"})
    assert answer.status_code == 404 and "loaded are: 'one'" in answer.json()["error_message"]
    assert generate(live.url, "one") == folders.outputs["one"]


def test_loads_and_unloads_under_load(live: LiveServer, folders: Folders) -> None:
    """Whoever is served is served right; who comes too early or too late is told so; nothing is left over."""

    def ask(index: int) -> bool:
        name = ("", "one", "two", "three")[index % 4]
        body = {"input_ids": IDS, "sampling_params": SAMPLING, "lora_path": name}
        answer = httpx.post(live.url + "/generate", json=body, timeout=60)
        if answer.status_code == 404:
            assert name in ("two", "three") and "loaded are" in answer.json()["error"]["message"]
            return False
        assert answer.raise_for_status().json()["output_ids"] == folders.outputs[name]
        return True

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, index) for index in range(120)]
        for _ in range(4):
            for path in ("/load_lora_adapter", "/unload_lora_adapter"):
                for name in ("two", "three"):
                    live.post(path, {"lora_name": name, "lora_path": folders.path(name)})
        results = [each.result() for each in asked]
        assert any(results)
    live.wait_until_idle()
    assert [card["id"] for card in live.get("/v1/models")["data"]] == ["tiny-llama", "one"]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with run_cluster(tiny_model, tmp_path_factory.mktemp("lora-pd")) as live:
        yield live


def test_apart_with_the_same_adapter(cluster: LiveServer, folders: Folders) -> None:
    """Loaded by the router at both; the prompt is computed by the one and goes on at the other."""
    answer = cluster.post("/load_lora_adapter", {"lora_name": "one", "lora_path": folders.path("one")})
    assert answer["success"] and len(answer["engines"]) == 2
    before = rooms_done(cluster)
    for name in ("one", "", "one"):
        assert generate(cluster.url, name) == folders.outputs[name]
    assert rooms_done(cluster) > before
    assert cluster.post("/unload_lora_adapter", {"lora_name": "one"})["loaded_adapters"] == {}


def test_all_engines_or_none(cluster: LiveServer, folders: Folders) -> None:
    prefill = engine_url(cluster, "prefill")
    body = {"lora_name": "two", "lora_path": folders.path("two")}
    httpx.post(prefill + "/load_lora_adapter", json=body).raise_for_status()
    answer = httpx.post(cluster.url + "/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert prefill in answer.json()["error_message"] and "loaded already" in answer.json()["error_message"]
    decode = httpx.get(engine_url(cluster, "decode") + "/v1/models").json()["data"]
    assert [card["id"] for card in decode] == ["tiny-llama"]
    answer = httpx.post(cluster.url + "/unload_lora_adapter", json={"lora_name": "two"})
    assert answer.status_code == 404 and engine_url(cluster, "decode") in answer.json()["error_message"]
    assert "two" in [card["id"] for card in httpx.get(prefill + "/v1/models").json()["data"]]
    httpx.post(prefill + "/unload_lora_adapter", json={"lora_name": "two"}).raise_for_status()


@pytest.mark.parametrize("at_prefill", [None, "three"])
def test_never_another_adapters_kv(cluster: LiveServer, folders: Folders, at_prefill: str | None) -> None:
    """A prefill engine without the adapter, or with another of its name: decode computes the prompt itself."""
    engines = {role: engine_url(cluster, role) for role in ("prefill", "decode")}
    load = {"lora_name": "two", "lora_path": folders.path("two")}
    httpx.post(engines["decode"] + "/load_lora_adapter", json=load).raise_for_status()
    if at_prefill is not None:
        other = load | {"lora_path": folders.path(at_prefill)}
        httpx.post(engines["prefill"] + "/load_lora_adapter", json=other).raise_for_status()
    before, num_logged = rooms_done(cluster), len(cluster.log.read_text())
    assert generate(cluster.url, "two") == folders.outputs["two"]
    assert rooms_done(cluster) == before
    said = cluster.log.read_text()[num_logged:]
    assert ("at the prefill engine and" if at_prefill else "the prefill engine lacks what decode has") in said
    for url in engines.values():
        httpx.post(url + "/unload_lora_adapter", json={"lora_name": "two"})
