"""An engine without a model: a real peer on a real socket that speaks `core.messages` and says what it is told to say.

Runs on a thread of a test, or as a process: `python fake_engine.py --endpoint ipc://...`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq

from diptych.core.batch import FinishReason, TokenLogprobs
from diptych.core.channel import Channel, open_socket
from diptych.core.messages import (
    AbortRequests,
    AdapterInfo,
    AddAdapter,
    AddRequest,
    Drain,
    EngineInfo,
    EngineLoad,
    Fatal,
    FlushCache,
    FromEngine,
    GetLoad,
    Loading,
    PeerFacts,
    Ready,
    RemoveAdapter,
    Reply,
    RequestFailed,
    RequestOutput,
    RequestOutputs,
    Stopped,
    ToEngine,
    TransferLoad,
)
from diptych.core.request import HandTo, Request

EOS = 256
INFO = EngineInfo(
    model_path="fake",
    architecture="FakeForCausalLM",
    dtype="float32",
    vocab_size=258,
    max_model_len=4096,
    eos_token_ids=(EOS,),
    page_size=16,
    num_pages=512,
    page_nbytes=1024,
    max_num_seqs=8,
    device="cpu",
    attention_backend="fake",
    load_s=0.5,
)


def info_of(role: str | None) -> EngineInfo:
    """What an engine of this role says of itself; None: one without peers."""
    if role in (None, "unified"):
        return INFO
    peer = PeerFacts(role=role, instance_id=f"fake-{uuid.uuid4().hex}", address="127.0.0.1:9", fingerprint="f1")
    return msgspec.structs.replace(INFO, peer=peer, fingerprint="f1", num_layers=2, num_kv_heads=1, head_dim=8)


def echo(request: Request) -> list[int]:
    """The prompt, again and again, so that only the limit ends it."""
    prompt = request.prompt_token_ids
    return (prompt * (request.sampling.max_tokens // len(prompt) + 1))[: request.sampling.max_tokens]


class FakeEngine:
    """Answers every request with `script(request)`, one token a step, then EOS unless the limit comes first.

    What is to be handed over ends after its first token.

    step_s: pause between steps. is_holding: take requests, but say nothing. failure: refuse requests with
    (kind, message, param).
    """

    def __init__(
        self, endpoint: str, *, script: Callable[[Request], list[int]] = echo, info: EngineInfo = INFO
    ) -> None:
        self.script = script
        self.info = info
        self.step_s = 0.0
        self.is_holding = False
        self.failure: tuple[str, str, str | None] | None = None
        self.is_idle_for_flush = True
        self.transfer: TransferLoad | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.adapters: dict[str, AdapterInfo] = {}
        self.flushes = 0
        self.drained = False
        self.open: dict[str, tuple[Request, list[int], int]] = {}
        self._context: zmq.Context = zmq.Context()
        self._channel: Channel[FromEngine, ToEngine] = Channel(
            open_socket(self._context, endpoint, bind=False), ToEngine
        )
        self._is_stopping = False
        self._drain_at: float | None = None
        self._outbox: list[FromEngine] = []

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def die(self, message: str) -> None:
        """Say that the engine breaks, as a broken engine does."""
        self._outbox.append(Fatal(message))

    def run(self) -> None:
        self._channel.send(Loading("weights", 1, 2))
        self._channel.send(Loading("weights", 2, 2))
        self._channel.send(Ready(self.info))
        while not self._is_stopping:
            self._channel.socket.poll(0 if self.open and not self.is_holding else 5)
            for message in self._channel.receive_all():
                self._obey(message)
            while self._outbox:
                self._channel.send(self._outbox.pop())
            if self.open and not self.is_holding:
                self._step()
                if self.step_s:
                    time.sleep(self.step_s)
            if self._drain_at is not None and (not self.open or time.monotonic() > self._drain_at):
                self._abort(list(self.open))
                self._channel.send(Stopped())
                self.drained = True
                break
        self._channel.close()
        self._context.term()

    def _obey(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                self.requests.append(request)
                if self.failure is not None:
                    kind, text, param = self.failure
                    self._channel.send(RequestFailed(request.request_id, kind, text, param))
                else:
                    self.open[request.request_id] = (request, self.script(request), 0)
            case AbortRequests(request_ids):
                self._abort(list(self.open) if request_ids is None else request_ids)
            case FlushCache(call_id):
                self.flushes += 1
                self._channel.send(Reply(call_id, self.is_idle_for_flush, "" if self.is_idle_for_flush else "busy"))
            case GetLoad(call_id):
                self._channel.send(Reply(call_id, True, "", self.load()))
            case Drain(timeout_s):
                self._drain_at = time.monotonic() + timeout_s
            case AddAdapter(call_id, name, path, pinned):
                self.adapters[name] = AdapterInfo(name, path, f"digest of {path}", 8, pinned)
                self._reply_adapters(call_id)
            case RemoveAdapter(call_id, name):
                self.adapters.pop(name, None)
                self._reply_adapters(call_id)
            case _:
                self._channel.send(Reply(message.call_id, False, "no such thing here", error_kind="Unsupported"))

    def _reply_adapters(self, call_id: int) -> None:
        value = msgspec.msgpack.encode(list(self.adapters.values()))
        self._channel.send(Reply(call_id, True, value=value))

    def load(self) -> EngineLoad:
        return EngineLoad(
            timestamp=time.time(),
            num_running=len(self.open),
            num_waiting=2,
            num_pages=512,
            num_free_pages=400,
            num_owned_pages=64,
            page_size=16,
            num_slots=8,
            num_free_slots=6,
            prompt_tokens_total=100,
            cached_tokens_total=25,
            prefix_queries_total=100,
            generation_tokens_total=77,
            transfer=self.transfer,
        )

    def _abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        outputs = [
            RequestOutput(request_id, [], FinishReason.ABORT)
            for request_id in request_ids
            if self.open.pop(request_id, None)
        ]
        self._channel.send(RequestOutputs(outputs))

    def _step(self) -> None:
        outputs = []
        for request_id, (request, tokens, position) in list(self.open.items()):
            outputs.append(self._output(request, tokens, position))
            if outputs[-1].finish_reason is None:
                self.open[request_id] = (request, tokens, position + 1)
            else:
                del self.open[request_id]
        self._channel.send(RequestOutputs(outputs))

    def _output(self, request: Request, tokens: list[int], position: int) -> RequestOutput:
        sampling = request.sampling
        token = tokens[position] if position < len(tokens) else EOS
        reason, matched = None, None
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            reason, matched = FinishReason.STOP, token
        elif position + 1 >= sampling.max_tokens or isinstance(request.handoff, HandTo):
            reason = FinishReason.LENGTH
        is_first = position == 0
        prompt_logprobs = []
        if is_first and sampling.prompt_logprobs is not None:
            prompt = request.prompt_token_ids[max(sampling.prompt_logprobs_start, 1) :]
            prompt_logprobs = [self._logprobs(request, token_id, sampling.prompt_logprobs) for token_id in prompt]
        return RequestOutput(
            request.request_id,
            [token],
            reason,
            matched,
            3 if is_first else 0,
            [] if sampling.logprobs is None else [self._logprobs(request, token, sampling.logprobs)],
            prompt_logprobs,
            0.001 if is_first else None,
        )

    def _logprobs(self, request: Request, token_id: int, num_top: int) -> TokenLogprobs:
        top = [((token_id + rank) % 256, -0.5 - rank) for rank in range(num_top)]
        extra = [(extra_id, -7.0) for extra_id in request.sampling.logprob_token_ids]
        return TokenLogprobs(token_id, -0.5, 1, top, extra)


def main() -> int:
    """As a process. The model's path in the configuration says how to behave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    arguments = parser.parse_args()
    config = sys.stdin.read()
    if "refuse-to-start" in config:
        context: zmq.Context = zmq.Context()
        channel: Channel[FromEngine, ToEngine] = Channel(open_socket(context, arguments.endpoint, bind=False), ToEngine)
        channel.send(Fatal("no such model", "ConfigError"))
        channel.close()
        context.term()
        return 1
    if "die-at-once" in config:
        return 7
    engine = FakeEngine(arguments.endpoint, info=info_of(json.loads(config).get("transfer", {}).get("role")))
    engine.step_s = 0.02
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
