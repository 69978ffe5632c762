"""A toy worker with weights, for tests of their replacement: one number, the salt, that is in every key that it writes
and in every token that it samples.

Pages written under one salt and read under another give other tokens than either. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from diptych.core.batch import Batch, StepOutput
from diptych.core.calls import CommitWeights, FreeMemory, RestoreMemory, StageCheckpoint, StageWeights, WorkerCall
from diptych.core.messages import EngineInfo
from diptych.core.request import Request
from diptych.engine.toy import ToyExecutor, ToyWorker, next_token
from diptych.errors import RequestError

_KEY_STEP = 1000


def salted_output(request: Request, salt: int, *, vocab_size: int, said: Sequence[int] = ()) -> list[int]:
    """Greedy output up to max_tokens, EOS ignored: `said`, and what follows when all is computed under one salt."""
    token_ids = [*request.prompt_token_ids, *said]
    while len(token_ids) < len(request.prompt_token_ids) + (request.sampling.max_tokens or 0):
        token_ids.append(next_token([token_id + salt for token_id in token_ids], vocab_size))
    return token_ids[len(request.prompt_token_ids) :]


class SaltedWorker(ToyWorker):
    """Its tensors are called "salt" (one byte), its checkpoints are numbers. released: memory that must not be used."""

    def __init__(self, num_pages: int, page_size: int, *, vocab_size: int) -> None:
        super().__init__(num_pages, page_size, vocab_size=vocab_size)
        self.salt = 0
        self.staged: dict[str, int] = {}
        self.released: set[str] = set()

    def step(self, batch: Batch) -> StepOutput:
        """Run one batch. Raises: AssertionError while memory is released."""
        if self.released:
            raise AssertionError(f"a step while {self.released} are released")
        return super().step(batch)

    def store(self, pages: list[int], start: int, token_ids: list[int]) -> None:
        """Write the KV of these tokens under the salt of now."""
        super().store(pages, start, [token_id + _KEY_STEP * self.salt for token_id in token_ids])

    def load(self, pages: list[int], num_tokens: int) -> list[int]:
        """Read the tokens back, salted."""
        return [key - _KEY_STEP * self.salt + self.salt for key in super().load(pages, num_tokens)]

    def obey(self, call: WorkerCall) -> bytes:
        """Stage and commit a salt, release and restore memory; other calls do nothing."""
        match call:
            case StageWeights(update_id, tensors):
                if tensors[0].name != "salt":
                    raise RequestError(f"the model has no tensor {tensors[0].name!r}", param="named_tensors")
                self.staged[update_id] = int.from_bytes(tensors[0].data, "little")
            case StageCheckpoint(update_id, path):
                if not path.isdigit():
                    raise RequestError(f"{path} cannot take the loaded model's place", param="model_path")
                self.staged[update_id] = int(path)
            case CommitWeights(update_id):
                if update_id not in self.staged:
                    raise RequestError(f"nothing is staged for update {update_id!r}")
                self.salt = self.staged.pop(update_id)
                return msgspec.msgpack.encode(f"salt-{self.salt}")
            case FreeMemory(tags):
                self.released |= set(tags)
                if "kv_cache" in tags:
                    self.memory.fill(-1)
            case RestoreMemory(tags):
                self.released -= set(tags)
        return b""


class SaltedExecutor(ToyExecutor):
    """Runs a salted worker of the shape that `info` says."""

    def __init__(self, info: EngineInfo) -> None:
        worker = SaltedWorker(info.num_pages, info.page_size, vocab_size=info.vocab_size)
        super().__init__(info, worker, obey=worker.obey)
