"""Why an engine has no adapters: the reason that no flag of theirs would change goes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diptych.config import LoraConfig
from diptych.core.calls import ReadAdapter
from diptych.errors import Unsupported
from diptych.models.transformer import Transformer
from diptych.worker.adapters import create_adapters


@pytest.mark.parametrize(
    ("pipeline_size", "data_size", "reason"),
    [(1, 1, "start with --max-loras above 0"), (2, 1, "over pipeline stages"), (1, 2, "data parallel groups")],
)
def test_the_reason_helps(pipeline_size: int, data_size: int, reason: str) -> None:
    groups = SimpleNamespace(pipeline=SimpleNamespace(size=pipeline_size), data=SimpleNamespace(size=data_size))
    model = cast("Transformer", SimpleNamespace(device=torch.device("cpu"), groups=groups))
    with pytest.raises(Unsupported, match=reason):
        create_adapters(LoraConfig(max_loras=0), model).obey(ReadAdapter(1, "/one"))
