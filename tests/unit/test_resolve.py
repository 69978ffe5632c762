"""Sizes, ranges and paths."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
    TransferConfig,
)
from diptych.errors import ConfigError
from diptych.resolve import parse_size, resolve, validate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("500MB", 500_000_000),
        ("64k", 64 * 1024),
        ("1.5G", 3 * 2**29),
        (" 3TiB ", 3 * 2**40),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "0.1", "2 GB of it", "1e9", "2PiB", "nan", "1,5G"])
def test_parse_size_refuses(text):
    with pytest.raises(ConfigError, match="kv_cache_memory must be"):
        parse_size(text, name="kv_cache_memory")


@given(number=st.integers(1, 2**20), unit=st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_parse_size_is_exact(number, unit):
    assert parse_size(f"{number}{unit[0]}") == number << unit[1]


def test_the_defaults_are_valid():
    validate(EngineConfig())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelConfig(max_model_len=1), "max_model_len must be at least 2, got 1"),
        (ModelConfig(num_threads=0), "num_threads must be at least 1, got 0"),
        (ModelConfig(model_path=""), "model_path must name"),
        (ModelConfig(dtype="float8"), r"Invalid enum value 'float8' - at `\$.model.dtype`"),
        (CacheConfig(page_size="16"), r"Expected `int`, got `str` - at `\$.cache.page_size`"),
        (CacheConfig(page_size=0), "page_size must be a power of two"),
        (CacheConfig(page_size=24), "page_size must be a power of two from 1 to 256, got 24"),
        (CacheConfig(page_size=512), "page_size must be a power of two"),
        (CacheConfig(mem_fraction=0.0), "mem_fraction must be above 0"),
        (CacheConfig(mem_fraction=float("nan")), "mem_fraction"),
        (CacheConfig(kv_cache_memory="lots"), "kv_cache_memory must be a size"),
        (SchedulerConfig(max_num_seqs=0), "max_num_seqs must be at least 1"),
        (SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens must be at least 1"),
        (SchedulerConfig(max_inflight_steps=0), "max_inflight_steps must be at least 1"),
        (SchedulerConfig(max_queued_requests=0), "max_queued_requests must be at least 1"),
        (SchedulerConfig(request_timeout=0.0), "request_timeout must be above 0 seconds"),
        (ParallelConfig(tp_size=0), "tp_size is 0; it must be at least 1"),
        (ParallelConfig(tp_size=4, ep_size=3), "ep_size 3 does not divide tp_size 4"),
        (ParallelConfig(dist_timeout=0.0), "dist_timeout must be at least 1 second, got 0.0"),
        (TransferConfig(role="both"), "Invalid enum value 'both'"),
        (TransferConfig(peer_port=-1), "peer_port must be from 0 to 65535, got -1"),
        (TransferConfig(disaggregation_bootstrap_port=70000), "disaggregation_bootstrap_port must be from 0 to 65535"),
        (TransferConfig(max_rooms=0), "max_rooms must be at least 1"),
        (TransferConfig(room_timeout=0.0), "room_timeout must be above 0 seconds"),
        (TransferConfig(transfer_timeout=float("nan")), "transfer_timeout must be above 0 seconds"),
        (TransferConfig(heartbeat_timeout=0.5), "heartbeat_timeout must be at least twice heartbeat_interval"),
        (TransferConfig(cluster_key=""), "cluster_key must not be empty"),
        (TransferConfig(peer_host="10.0.0.1"), "others can reach: set --cluster-key"),
        (ServerConfig(port=65536), "port must be from 0 to 65535, got 65536"),
        (ServerConfig(host=""), "host must be an address"),
        (ServerConfig(api_key=""), "api_key must not be empty"),
        (ServerConfig(drain_timeout=-1.0), "drain_timeout must be 0 or more"),
        (ServerConfig(max_body_size="0"), "max_body_size must be at least one byte"),
    ],
)
def test_what_cannot_be_served_is_named(section, message):
    name = type(section).__name__.removesuffix("Config").lower()
    config = replace(EngineConfig(), **{name: section})
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config_for(path: Path, **model) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model_path=str(path), **model))


def test_a_folder_brings_its_tokenizer_and_name(model_folder):
    resolved = resolve(config_for(model_folder))
    assert resolved.model.tokenizer_path == str(model_folder)
    assert resolved.server.served_model_name == "Tiny-Llama"


def test_resolving_twice_changes_nothing(model_folder):
    once = resolve(config_for(model_folder))
    assert resolve(once) == once


def test_a_gguf_holds_its_tokenizer_unless_one_lies_beside_it(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    assert resolve(config_for(path)).model.tokenizer_path == str(path)
    assert resolve(config_for(path)).server.served_model_name == "tiny"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve(config_for(path)).model.tokenizer_path == str(tmp_path / "tokenizer.json")


def test_a_missing_tokenizer_matters_only_to_real_weights(model_folder):
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; name one with --tokenizer-path"):
        resolve(config_for(model_folder))
    assert resolve(config_for(model_folder, load_format="dummy")).model.tokenizer_path is None


def test_wrong_paths_are_named(model_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer path .*nowhere does not exist"):
        resolve(config_for(model_folder, tokenizer_path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"model path .*nowhere does not exist"):
        resolve(config_for(tmp_path / "nowhere"))
    (model_folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config.json; for GGUF name the .gguf file itself"):
        resolve(config_for(model_folder))


def test_the_demo_is_assembled(monkeypatch, tmp_path):
    path = tmp_path / "demo.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr("diptych.resolve.demo_model_path", lambda: path)
    resolved = resolve(EngineConfig())
    assert resolved.model.model_path == str(path)
    assert resolved.server.served_model_name == "demo"


def test_api_key_comes_from_the_environment_unless_given(model_folder, monkeypatch):
    monkeypatch.setenv("DIPTYCH_API_KEY", "from-environment")
    config = config_for(model_folder)
    assert resolve(config).server.api_key == "from-environment"
    given = replace(config, server=ServerConfig(api_key="given"))
    assert resolve(given).server.api_key == "given"


def test_cluster_key_comes_from_the_environment_unless_given(model_folder, monkeypatch):
    monkeypatch.setenv("DIPTYCH_CLUSTER_KEY", "from-environment")
    config = replace(config_for(model_folder), transfer=TransferConfig(peer_host="10.0.0.1"))
    assert resolve(config).transfer.cluster_key == "from-environment"
    given = replace(config, transfer=TransferConfig(cluster_key="given"))
    assert resolve(given).transfer.cluster_key == "given"


@pytest.mark.parametrize(
    ("host", "warns"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True)]
)
def test_an_open_door_is_mentioned(model_folder, caplog, host, warns):
    with caplog.at_level(logging.WARNING, "diptych"):
        resolve(replace(config_for(model_folder), server=ServerConfig(host=host)))
    assert ("without an API key" in caplog.text) == warns


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tp_size=3, nnodes=2, dist_init_addr="127.0.0.1:7000"), "3 ranks cannot be dealt to nnodes 2"),
        (ParallelConfig(tp_size=2, nnodes=2), "2 nodes need dist_init_addr"),
        (ParallelConfig(tp_size=2, nnodes=2, dist_init_addr="127.0.0.1"), "must be host:port"),
        (ParallelConfig(tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:65535"), "a port from 1 to 65534"),
        (ParallelConfig(tp_size=2, nnodes=2, dist_init_addr="node0:7000"), "others can reach: set --cluster-key"),
        (ParallelConfig(node_rank=1), "node_rank 1 is not below nnodes 1"),
    ],
)
def test_nodes_that_cannot_meet_are_named(model_folder, parallel, message):
    with pytest.raises(ConfigError, match=message):
        resolve(replace(config_for(model_folder), parallel=parallel))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": ParallelConfig(tp_size=2, dp_size=2, pp_size=2)}, "dp_size 2 with pp_size 2"),
        ({"scheduler": SchedulerConfig(max_inflight_steps=2)}, "max_inflight_steps is 2, but dp_size 2"),
        ({"lora": LoraConfig(lora_paths=("a=b",))}, "adapters with dp_size 2"),
        ({"speculative": SpeculativeConfig(speculative_algorithm="NGRAM")}, "speculation with dp_size 2"),
    ],
)
def test_what_does_not_go_with_groups_is_named(sections, message):
    config = replace(EngineConfig(parallel=ParallelConfig(tp_size=2, dp_size=2)), **sections)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_leader_worker_set_says_where_the_nodes_are(model_folder, monkeypatch):
    for name, value in (("LEADER_ADDRESS", "leader.pods"), ("GROUP_SIZE", "2"), ("WORKER_INDEX", "1")):
        monkeypatch.setenv(f"LWS_{name}", value)
    config = replace(
        config_for(model_folder), parallel=ParallelConfig(tp_size=4), transfer=TransferConfig(cluster_key="k")
    )
    once = resolve(config)
    assert (once.parallel.nnodes, once.parallel.node_rank) == (2, 1)
    assert once.parallel.dist_init_addr == "leader.pods:20000"
    assert resolve(once) == once


@pytest.mark.parametrize(
    ("speculative", "scheduler", "message"),
    [
        ({"speculative_algorithm": "STANDALONE"}, {}, "STANDALONE needs a speculative_draft_model_path"),
        ({"speculative_algorithm": "EAGLE"}, {}, "EAGLE needs a speculative_draft_model_path"),
        ({"speculative_draft_model_path": "x"}, {}, "none has no use for a speculative_draft_model_path"),
        ({"speculative_num_draft_tokens": 0}, {}, "speculative_num_draft_tokens must be at least 1, got 0"),
        ({"speculative_algorithm": "NGRAM"}, {"max_inflight_steps": 2}, "leave it out, or use 1"),
        ({"speculative_algorithm": "MEDUSA"}, {}, "invalid configuration"),
    ],
)
def test_speculation_that_cannot_be_is_named(speculative, scheduler, message):
    config = EngineConfig(speculative=SpeculativeConfig(**speculative), scheduler=SchedulerConfig(**scheduler))
    with pytest.raises(ConfigError, match=message):
        validate(config)
