"""Pipeline stages: what passes between the ranks that hold a model's layers one after the other.

Owns the sends under way. A stage computes a step, begins to send what came out, and goes on with the next step: up to
as many steps are under way as there are stages. Tokens do not travel here: the engine puts them into the batches.
Worker's thread.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from diptych.attention.backend import AttentionBackend
from diptych.core.batch import Batch, RowOutput, SequenceStep, StepOutput
from diptych.models.transformer import Transformer
from diptych.parallel.groups import Sending
from diptych.parallel.layer_groups import LayerGroups
from diptych.worker.inputs import build_inputs
from diptych.worker.rows import Rows
from diptych.worker.runner import FinishedStep, PendingStep
from diptych.worker.slots import SlotTable

_HIDDEN = "hidden"


class StageLink:
    """The residual stream, from the stage before and to the next one.

    The ranks of a stage all hold the same: each sends its share, and the receivers put the shares together.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self._stages, self._same = groups.pipeline, groups.attention
        self._under_way: deque[Sending] = deque()

    def send(self, hidden: torch.Tensor) -> None:
        """Begin to send [T, hidden], which must not be written to any more. Raises: RankLost."""
        if len(self._under_way) == self._stages.size:
            self._under_way.popleft().wait()
        self._under_way.append(self._stages.send_tensor_dict({_HIDDEN: hidden}, all_gather_group=self._same))

    def receive(self) -> torch.Tensor:
        """The next [T, hidden] of the stage before, once it is there. Raises: RankLost."""
        hidden = self._stages.recv_tensor_dict(all_gather_group=self._same)[_HIDDEN]
        assert isinstance(hidden, torch.Tensor), "a stage sends tensors"
        return hidden


class LastStage:
    """A `StepModel` of the last stage, whose input comes from the stage before."""

    def __init__(self, model: Transformer, attention: AttentionBackend, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._device = device
        self._link = StageLink(model.groups)

    def hidden(self, steps: list[SequenceStep], slots: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = build_inputs(steps, slots, self._device)
        wants_all = any(slots.occupant(step.slot).sampling.prompt_logprobs is not None for step in steps)
        wanted = None if wants_all else inputs.logit_rows
        model = self._model
        hidden = model.norm(model.run_layers(self._link.receive(), inputs, self._attention, wanted=wanted))
        return hidden, inputs.logit_rows if wants_all else torch.arange(hidden.shape[0], device=hidden.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._model.likeliest(hidden)


class StageRunner:
    """A `Runner` of a stage before the last: it embeds or receives, computes its layers, and passes the result on.

    Its outputs are empty; the last stage's ranks sample, and the engine hears from them.
    """

    def __init__(self, model: Transformer, attention: AttentionBackend, rows: Rows, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._device = device
        self._link = StageLink(model.groups)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Compute this stage's part of a step."""
        started = time.perf_counter()
        self._rows.update(batch)
        for confirmed in batch.tokens:
            for token_id in confirmed.token_ids:
                self._rows.slots.append_token(confirmed.slot, token_id)
        live = self._rows.live(batch.steps)
        if live:
            inputs = build_inputs(live, self._rows.slots, self._device)
            is_first = self._model.groups.pipeline.is_first
            hidden = self._model.embed_tokens(inputs.token_ids) if is_first else self._link.receive()
            self._link.send(self._model.run_layers(hidden, inputs, self._attention))
        rows = [RowOutput([]) for _ in batch.steps]
        return FinishedStep(StepOutput(batch.step_id, rows, time.perf_counter() - started))
