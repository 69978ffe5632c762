"""What an engine, its ranks and the other nodes of its ranks say to each other. Plain typed data; never imports torch.

A rank or a node is named by the identity of its socket: "rank-3", "node-1".
"""

from __future__ import annotations

import msgspec

from diptych.core.batch import Batch, StepOutput
from diptych.core.calls import CallDone, SubmittedCall
from diptych.core.messages import EngineInfo, Loading


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """Compute this batch after everything that came before."""

    batch: Batch


class End(msgspec.Struct, tag=True, frozen=True):
    """End; nothing more is asked."""


class AgentFrame(msgspec.Struct, tag=True, frozen=True):
    """What an engine and the transfer agent of a rank say to each other; `transfer.remote_agent` reads it."""

    body: bytes


ToRank = RunStep | SubmittedCall | AgentFrame | End


class RankProgress(msgspec.Struct, tag=True, frozen=True):
    """How far a rank is with loading."""

    progress: Loading


class RankLoaded(msgspec.Struct, tag=True, frozen=True):
    """A rank has its weights and its pool."""

    info: EngineInfo


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """The result of a step; only the rank that reports for all of them says so."""

    output: StepOutput


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A sign of life."""


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    """A rank cannot go on. kind: the name of a class of `diptych.errors`."""

    kind: str
    message: str


class ProcessLost(msgspec.Struct, tag=True, frozen=True):
    """A rank's process has ended or been stopped, as whoever started it sees. what: a sentence that names it."""

    rank: int
    what: str


class NodeHello(msgspec.Struct, tag=True, frozen=True):
    """A node offers to run its ranks. settings: what must be the same on all nodes, by name."""

    node_rank: int
    settings: dict[str, str]


class NodeLeaves(msgspec.Struct, tag=True, frozen=True):
    """A node has been told to end."""


FromRank = (
    RankProgress
    | RankLoaded
    | StepDone
    | CallDone
    | AgentFrame
    | Beat
    | RankFailed
    | ProcessLost
    | NodeHello
    | NodeLeaves
)


class StartRanks(msgspec.Struct, tag=True, frozen=True):
    """Start the node's ranks; they meet at `init_method`."""

    init_method: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The node cannot take part. reason: a sentence."""

    reason: str


ToNode = StartRanks | Refused | End
