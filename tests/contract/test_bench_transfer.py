"""`diptych bench transfer` runs, over real NIXL and two processes, and reports every row."""

from __future__ import annotations

import json

import pytest

from diptych.cli import bench_transfer

pytest.importorskip("nixl_cu13")


def test_a_short_run_reports_all_rows(capsys):
    assert bench_transfer.run(["--mib", "1", "--repeats", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["transport"] in ("shm", "shm or rdma", "tcp")
    rows = {(row["layout"], row["page_nbytes"]): row["num_pieces"] for row in report["bandwidth"]}
    assert rows[("page-major", 2**20)] == 1 and rows[("layer-major", 2**20)] == 32 and len(rows) == 8
    assert all(row["gb_per_s"] > 0 and row["bare_gb_per_s"] > 0 for row in report["bandwidth"])
    scattered, adjacent = report["host"]
    assert adjacent["num_descriptors"] == 1 < scattered["num_descriptors"]
    assert scattered["plan_us"] > 0 and scattered["hand_over_us"] > 0 and scattered["prepare_us"] > 0
