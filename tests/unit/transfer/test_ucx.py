"""What UCX's transports mean, and what it logs of them."""

from __future__ import annotations

import pytest

from diptych.transfer.backend import MemoryKind
from diptych.transfer.ucx import carrier, carrier_of, parse_lanes

LOG = """
[1.2] [host:1:0] parser.c:2359 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info
[1.3] [host:1:0] ucp_worker.c:1916 UCX  INFO    agent self cfg#0 rma_am(self/memory)  am(self/memory cma/memory)
[1.4] [host:1:0] ucp_worker.c:1916 UCX  INFO    agent intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
"""


def test_the_log_names_transports_to_others():
    assert parse_lanes(LOG) == {"tcp", "cma"}
    assert parse_lanes("") == frozenset()


@pytest.mark.parametrize(
    ("lanes", "host", "gpu"),
    [
        ({"tcp", "cma"}, "shm", "tcp"),
        ({"tcp", "cma", "cuda_ipc"}, "shm", "cuda_ipc"),
        ({"rc_mlx5", "tcp"}, "rdma", "rdma"),
        ({"tcp"}, "tcp", "tcp"),
        (set(), "unknown", "unknown"),
    ],
)
def test_what_carries_memory_of_each_kind(lanes, host, gpu):
    assert carrier_of(MemoryKind.DRAM, frozenset(lanes)) == host
    assert carrier_of(MemoryKind.VRAM, frozenset(lanes)) == gpu


def test_a_write_that_shows_up_in_tcp_went_there():
    assert carrier(MemoryKind.DRAM, 1000, 600) == "tcp"
    assert carrier(MemoryKind.VRAM, 1000, 10).startswith("cuda_ipc")
