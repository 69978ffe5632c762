"""A toy engine with weights, as its own process: `python salted_engine.py --endpoint ...`."""

from __future__ import annotations

import sys
import time

from toy_engine import main, toy_info

from diptych.config import EngineConfig
from diptych.core.batch import StepOutput
from diptych.core.calls import CallDone
from diptych.engine.salted import SaltedExecutor


class PacedSalted(SaltedExecutor):
    """Its steps take a while, so that things happen between them."""

    def poll(self) -> StepOutput | CallDone | None:
        time.sleep(0.002 if self.has_work else 0.0)
        return super().poll()


def salted_executor(config: EngineConfig) -> PacedSalted:
    return PacedSalted(toy_info(config))


if __name__ == "__main__":
    sys.exit(main(salted_executor))
