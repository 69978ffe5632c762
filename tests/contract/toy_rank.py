"""A rank's process with the toy worker, and what can go wrong in one. Run as `diptych.engine.rank` is.

Environment: TOY_STEP_S, how long a step takes; TOY_FAULT, "RANK:WHAT": fail-load, refuse-load, hang-load, fail-step,
refuse-call.
"""

from __future__ import annotations

import os
import time

from diptych.core.batch import Batch, StepOutput
from diptych.core.calls import CallDone, WorkerCall
from diptych.core.messages import EngineInfo, Loading
from diptych.engine.rank import main
from diptych.engine.rank_process import RankStart
from diptych.engine.toy import ToyExecutor
from diptych.errors import ConfigError, Unsupported, WorkerError


def toy_info(rank: int) -> EngineInfo:
    """Every rank has another number of pages, rank 1 the fewest."""
    return EngineInfo(
        model_path="toy",
        architecture="Toy",
        dtype="int32",
        vocab_size=50,
        max_model_len=128,
        eos_token_ids=(7,),
        page_size=4,
        num_pages=64 + 8 * abs(rank - 1),
        page_nbytes=16,
        max_num_seqs=8,
        device="cpu",
        attention_backend="none",
        load_s=float(rank),
    )


class ToyRank(ToyExecutor):
    """A toy that may fail."""

    def __init__(self, start: RankStart) -> None:
        self.rank = start.rank
        super().__init__(toy_info(start.rank), obey=self.obey)
        rank, _, what = os.environ.get("TOY_FAULT", "").partition(":")
        self._fault = what if rank == str(start.rank) else ""
        self._step_s = float(os.environ.get("TOY_STEP_S", "0"))
        self._progress = Loading("weights", 1, 2)

    def poll_loading(self) -> Loading | EngineInfo | None:
        match self._fault:
            case "fail-load":
                raise ValueError("no weights")
            case "refuse-load":
                raise ConfigError("the model is too large")
            case "hang-load":
                return None
        if self._progress is not None:
            progress, self._progress = self._progress, None
            return progress
        return super().poll_loading()

    def poll(self) -> StepOutput | CallDone | None:
        time.sleep(self._step_s if self.has_work else 0.0)
        return super().poll()

    def submit(self, batch: Batch) -> None:
        if self._fault == "fail-step":
            raise WorkerError("out of memory")
        super().submit(batch)

    def obey(self, call: WorkerCall) -> bytes:
        if self._fault == "refuse-call":
            raise Unsupported("not here")
        return bytes([self.rank])


if __name__ == "__main__":
    main(ToyRank)
