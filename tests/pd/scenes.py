"""What tests of a pair say again and again: requests of one kind, their right answers, and a pair that serves."""

from __future__ import annotations

from collections.abc import Callable

from engines import EngineUnderTest, request
from toy_engine import EOS, VOCAB

from diptych.core.batch import FinishReason
from diptych.core.request import Request, TakeFrom
from diptych.engine.toy import expected_output

DETECTION_S = 3.0  # promised for the defaults
ANSWER_S = 2.0
SLOW = {"TOY_STEP_S": "0.05"}  # 25 steps of 16 tokens for LONG
LONG = 400
# Where the defaults are not what is tested.
QUICK = {"heartbeat_interval": 0.2, "heartbeat_timeout": 0.8}

Start = Callable[..., EngineUnderTest]


def expected(sent: Request) -> list[int]:
    return expected_output(sent, vocab_size=VOCAB, max_len=1024, eos_token_ids=EOS)


def prompt_of(length: int, start: int = 11) -> list[int]:
    return [(start + 3 * i) % VOCAB for i in range(length)]


def take(
    engine: EngineUnderTest, name: str, length: int = LONG, room: int | None = None, port: int | None = None
) -> Request:
    """A request that `engine` computes the prompt of; port: where it is reached, if not at its own."""
    address = engine.address.address if port is None else f"127.0.0.1:{port}"
    handoff = TakeFrom(address, engine.address.instance_id, room)
    return request(name, prompt_of(length, sum(name.encode()) % VOCAB), handoff, max_tokens=6, ignore_eos=True)


def check(decode: EngineUnderTest, sent: Request) -> None:
    assert decode.tokens(sent.request_id) == expected(sent)
    assert decode.reason(sent.request_id) is FinishReason.LENGTH


def wait_sending(prefill: EngineUnderTest) -> None:
    """Until pages are under way, and more is to come."""
    prefill.wait_until(lambda: prefill.load().transfer.bytes_sent_total > 500, "the first pages to be sent")


def serve_next(decode: EngineUnderTest, prefill: EngineUnderTest, name: str = "next", *, at_rest: bool = True) -> None:
    """A pair that serves as if nothing had been."""
    done = decode.load().transfer.rooms_done_total
    sent = take(prefill, name, 21)
    decode.send(sent)
    decode.wait(name)
    check(decode, sent)
    assert decode.load().transfer.rooms_done_total == done + 1
    if at_rest:
        prefill.wait_at_rest()
    decode.wait_at_rest()
