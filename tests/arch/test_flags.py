"""The frozen list of flags. A new flag is a field in the owning dataclass, a line here, and a reason."""

from __future__ import annotations

from collections import Counter

from diptych.cli.flags import flag_names

FLAGS = [
    "--model-path",
    "--tokenizer-path",
    "--load-format",
    "--dtype",
    "--quantization",
    "--max-model-len",
    "--device",
    "--num-threads",
    "--cuda-graphs",
    "--seed",
    "--page-size",
    "--kv-cache-memory",
    "--mem-fraction",
    "--mem-sharers",
    "--prefix-caching",
    "--attention-backend",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-inflight-steps",
    "--schedule-policy",
    "--max-queued-requests",
    "--request-timeout",
    "--check-invariants",
    "--tp-size",
    "--pp-size",
    "--dp-size",
    "--ep-size",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--dist-timeout",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-draft-tokens",
    "--speculative-adaptive",
    "--lora-paths",
    "--max-loras",
    "--max-lora-rank",
    "--role",
    "--disaggregation-bootstrap-port",
    "--peer-host",
    "--peer-port",
    "--allowed-bootstrap-hosts",
    "--local-prefill",
    "--local-prefill-tokens",
    "--max-rooms",
    "--room-timeout",
    "--transfer-timeout",
    "--write-timeout",
    "--heartbeat-interval",
    "--heartbeat-timeout",
    "--cluster-key",
    "--host",
    "--port",
    "--served-model-name",
    "--api-key",
    "--chat-template",
    "--tool-call-parser",
    "--reasoning-parser",
    "--metrics-prefix",
    "--drain-timeout",
    "--max-body-size",
    "--log-level",
    "--log-requests",
]

# 14 of them are for prefill and decode apart: where peers meet, what a deployment may wait for, and one secret.
# 8 are for more than one rank, 4 for speculation, 3 for adapters.
MAX_FLAGS = 64


def test_flags_are_the_frozen_ones():
    assert flag_names() == FLAGS


def test_flat_names_are_unique():
    assert [name for name, count in Counter(flag_names()).items() if count > 1] == []


def test_flags_are_few():
    assert len(FLAGS) <= MAX_FLAGS
