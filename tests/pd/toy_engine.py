"""A real engine process with the toy worker: real scheduler, sockets, NIXL; no weights. `python toy_engine.py
--endpoint ...`.

Speaks to its server as `diptych.engine.process` does; the configuration comes on standard input. The page size is the
configuration's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import msgspec
import zmq

from diptych.config import EngineConfig
from diptych.core.batch import StepOutput
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import EngineInfo, FromEngine, ToEngine
from diptych.engine.engine import EngineCore
from diptych.engine.toy import ToyExecutor
from diptych.log import setup_logging

VOCAB = 50
EOS = (7,)
NUM_KV_TOKENS = 2048


class PacedExecutor(ToyExecutor):
    """A toy whose steps take a while, so that things happen between them."""

    step_s = float(os.environ.get("TOY_STEP_S", "0.002"))

    def poll(self) -> StepOutput | None:
        time.sleep(self.step_s if self.has_work else 0.0)
        return super().poll()


def toy_info(config: EngineConfig) -> EngineInfo:
    page_size = config.cache.page_size
    return EngineInfo(
        model_path="toy",
        architecture="Toy",
        dtype="float32",
        vocab_size=VOCAB,
        max_model_len=1024,
        eos_token_ids=EOS,
        page_size=page_size,
        num_pages=NUM_KV_TOKENS // page_size,
        page_nbytes=8 * page_size,
        max_num_seqs=config.scheduler.max_num_seqs or 64,
        device="cpu",
        attention_backend="none",
        load_s=0.0,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        fingerprint=os.environ.get("TOY_FINGERPRINT", "toy"),
    )


def toy_executor(config: EngineConfig) -> ToyExecutor:
    return PacedExecutor(toy_info(config))


def main(create: Callable[[EngineConfig], ToyExecutor] = toy_executor) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    endpoint = parser.parse_args().endpoint
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    setup_logging("engine", "info")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel: Channel[FromEngine, ToEngine] = Channel(open_socket(context, endpoint, bind=False), ToEngine)
    try:
        return EngineCore(config, create(config), channel).run()
    finally:
        context.term()


if __name__ == "__main__":
    sys.exit(main())
