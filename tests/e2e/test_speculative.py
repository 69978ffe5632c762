"""Speculation over HTTP: the same text, streamed in larger pieces, and what was accepted where clients and dashboards
look for it.
"""

from __future__ import annotations

import json
import re
import time

import httpx
import pytest

PROMPT = "one two three one two three one two three one two"
BODY = {
    "text": PROMPT,
    "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True},
    "return_logprob": True,
    "top_logprobs_num": 2,
}


def wait_for_metric(url: str, name: str) -> float:
    """Its value once it is above 0: the engine reports twice a second."""
    for _ in range(100):
        reading = re.search(rf"^{name}{{.*}} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
        if reading is not None and float(reading[1]) > 0:
            return float(reading[1])
        time.sleep(0.1)
    raise AssertionError(f"{name} stayed 0")


@pytest.mark.parametrize("family", ["vllm", "sglang"])
def test_the_same_text_and_what_was_accepted(start_tiny, tiny_server, family) -> None:
    flags = ("--speculative-algorithm", "NGRAM", "--no-speculative-adaptive", "--metrics-prefix", family)
    expected = tiny_server.post("/generate", BODY)
    with start_tiny(*flags) as live:
        found = live.post("/generate", BODY)
        with httpx.stream("POST", f"{live.url}/generate", json=BODY | {"stream": True}, timeout=60) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
        name = "spec_accept_length" if family == "sglang" else "spec_decode_num_accepted_tokens_total"
        accepted = wait_for_metric(live.url, f"{family}:{name}")
    last = json.loads(lines[-1])
    for answer in (found, last):
        assert answer["text"] == expected["text"]
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["completion_tokens"] == 48
        tokens = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in tokens] == expected["output_ids"]
        assert len(answer["meta_info"]["output_top_logprobs"]) == 48
    meta = found["meta_info"]
    assert meta["spec_accept_token_num"] > 10
    assert meta["spec_accept_length"] == pytest.approx(1 + meta["spec_accept_token_num"] / meta["spec_verify_ct"])
    assert len(lines) <= 48 - meta["spec_accept_token_num"] + 1
    assert "spec_verify_ct" not in expected["meta_info"]
    assert accepted > 1.0


def test_stop_strings_end_a_stream_in_the_middle_of_what_was_guessed(start_tiny, tiny_server) -> None:
    text = tiny_server.post("/generate", BODY)["text"]
    with start_tiny("--speculative-algorithm", "NGRAM") as live:
        for place in range(12, 20):
            params = BODY["sampling_params"] | {"stop": [text[place : place + 2]]}
            body = {"text": PROMPT, "sampling_params": params}
            assert live.post("/generate", body)["text"] == tiny_server.post("/generate", body)["text"]
        live.wait_until_idle()
