"""Which engine gets a request: pure functions of what is known about the candidates. A new policy is a row in POLICIES.

Candidates are never empty, stand in a stable order, and are all able to take the request; who they are is `pool`'s
business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.router.config import PolicyName

# Prefix-aware: an engine may be this much busier than the idlest before its cache no longer counts.
MAX_LEAD = 4.0
MAX_LEAD_RATIO = 1.5
# Less of the prompt than this is what every chat has in common: no reason to prefer an engine.
MIN_MATCHED = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take the request.

    load: requests that it runs or has waiting. pending_tokens: prompt tokens that we sent and it has not answered yet.
    matched: share of this prompt that it probably has in its prefix cache, 0 to 1.
    """

    url: str
    load: float = 0.0
    pending_tokens: int = 0
    matched: float = 0.0


@dataclass(frozen=True, slots=True)
class Draw:
    """What makes one choice differ from the next. turn: counts choices. noise: uniform in [0, 1)."""

    turn: int = 0
    noise: float = 0.0


Policy = Callable[[Sequence[Candidate], Draw], Candidate]


def round_robin(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """One after the other."""
    return candidates[draw.turn % len(candidates)]


def random_choice(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """Any, evenly."""
    return candidates[int(draw.noise * len(candidates)) % len(candidates)]


def least_loaded(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """The one with the fewest requests, then the fewest prompt tokens ahead; ties take turns."""
    lowest = min((candidate.load, candidate.pending_tokens) for candidate in candidates)
    idlest = [candidate for candidate in candidates if (candidate.load, candidate.pending_tokens) == lowest]
    return round_robin(idlest, draw)


def prefix_aware(candidates: Sequence[Candidate], draw: Draw) -> Candidate:
    """The one that has most of the prompt in its cache, unless it is much busier than the idlest."""
    best = max(candidate.matched for candidate in candidates)
    if best < MIN_MATCHED:
        return least_loaded(candidates, draw)
    warm = least_loaded([candidate for candidate in candidates if candidate.matched == best], draw)
    idlest = min(candidate.load for candidate in candidates)
    if warm.load > idlest + MAX_LEAD and warm.load > idlest * MAX_LEAD_RATIO:
        return least_loaded(candidates, draw)
    return warm


POLICIES: dict[PolicyName, Policy] = {
    "round_robin": round_robin,
    "random": random_choice,
    "least_loaded": least_loaded,
    "prefix_aware": prefix_aware,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes. prefill: None means that `target` computes the prompt itself. num_new_tokens: of it, that
    `target` probably lacks.
    """

    target: str
    prefill: str | None = None
    num_new_tokens: int = 0


def choose(
    policy: Policy,
    draw: Draw,
    *,
    unified: Sequence[Candidate],
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    num_tokens: int,
    local_prefill_tokens: int,
) -> Choice | None:
    """One engine or a pair for a prompt of `num_tokens`; None if nobody can take it.

    Decode engines compete with unified ones for the client's side. A decode engine prefills by itself if no prefill
    engine is left, or if what it lacks of the prompt is less than `local_prefill_tokens`.
    """
    targets = [*unified, *decode]
    if not targets:
        return None
    target = policy(targets, draw)
    num_new = num_tokens * (1.0 - target.matched)
    if target not in decode or not prefill or num_new < local_prefill_tokens:
        return Choice(target.url, None, round(num_new))
    return Choice(target.url, policy(prefill, draw).url, round(num_new))
