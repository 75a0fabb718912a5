"""Several results of one attempt become one cause: what the nodes' agents said, and what the engine says of those that fell
silent. ``CAUSE_PRECEDENCE`` orders what happened at the same time; what made the others comes before all of that.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

from ratchet_contract.messages import AttemptResult
from ratchet_contract.phases import CAUSE_PRECEDENCE, Cause, Outcome

_CLOCKS: Final = 0.5
"""Seconds that the clocks of two nodes may differ (NTP on one network keeps them within milliseconds)."""

_ROOTS: Final = frozenset({Cause.USER_ERROR, Cause.LEASE_LOST, Cause.OOM, Cause.RANK_KILLED})
"""No broken connection makes these: where one node has such an end, the others' exceptions and hangs are its consequence."""


class EndSeen(NamedTuple):
    """One node's end, or an engine's word on one. ``node`` None: of the whole attempt."""

    cause: Cause
    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    message: str | None = None


def combine(
    results: Sequence[AttemptResult], nodes: int, engine: Sequence[EndSeen] = (), *, killed: bool = False
) -> EndSeen | None:
    """The one end of an attempt on ``nodes`` nodes; None when neither agents nor engine said anything.

    A node without a result has lost its agent. Nothing that happens on another node does that, so it comes first, with the
    engine's cause where the engine knows one, else as unknown. Where the caller has ``killed`` what was left, after it had
    waited for it in vain, such a node is cut off: a broken connection is what the others tell of then. (``engine`` is what was
    said before the kill.) An agent that tells only of the fence (lease-lost) counts as silent, where the end has another reason:
    the engine's word on its node, or the kill that the fence is part of. Then the failures, those that make others before
    those that may be made by others, the earliest first; then stops and completions by precedence. A result that tells of a
    SIGTERM takes the engine's cause, if it has one: the engine sent it.
    """
    results = _beside_the_fence(results, engine, killed=killed)
    silent = sorted(set(range(nodes)) - {r.node for r in results})
    lost = _first(engine, silent)
    if lost is not None:
        return lost
    if silent and killed and results:
        return _cut_off(results, silent, nodes)
    if silent and results:
        text = f"the agent of node {', '.join(map(str, silent))} was killed: it left no result.json"
        return EndSeen(Cause.UNKNOWN, silent[0], message=text)
    if not results:
        return None
    primary = [r for r in results if not r.secondary] or list(results)
    failures = [r for r in primary if r.cause.outcome in (Outcome.FAILED, Outcome.LOST)]
    if failures:
        return _seen(_root(failures), nodes)
    chosen = min(primary, key=lambda r: (CAUSE_PRECEDENCE.index(r.cause), r.node))
    if chosen.cause is Cause.SIGTERM and engine:
        word = _first(engine, [chosen.node]) or engine[0]
        return EndSeen(word.cause, chosen.node, chosen.rank, chosen.exit_code, f"{word.message}; {chosen.message}")
    return _seen(chosen, nodes)


def _beside_the_fence(
    results: Sequence[AttemptResult], engine: Sequence[EndSeen], *, killed: bool
) -> Sequence[AttemptResult]:
    others = [r for r in results if r.cause is not Cause.LEASE_LOST]
    fenced = [r.node for r in results if r.cause is Cause.LEASE_LOST]
    return others if _first(engine, fenced) is not None or (killed and others) else results


def _cut_off(results: Sequence[AttemptResult], silent: Sequence[int], nodes: int) -> EndSeen:
    told = combine(results, 0)
    assert told is not None
    if (told.cause in _ROOTS and told.exit_code != -signal.SIGABRT) or told.cause.outcome not in (
        Outcome.FAILED,
        Outcome.LOST,
    ):
        return told
    where = ", ".join(map(str, silent))
    text = f"node {where} is cut off: its agent did not end when the others did, which tell: {told.message}"
    return EndSeen(Cause.NODE_LOST, silent[0], message=text)


def _first(engine: Sequence[EndSeen], nodes: Sequence[int]) -> EndSeen | None:
    """The engine's earliest word on one of ``nodes``, or on the whole attempt."""
    return next((word for word in engine if nodes and (word.node is None or word.node in nodes)), None)


def _root(failures: Sequence[AttemptResult]) -> AttemptResult:
    candidates = [r for r in failures if r.cause in _ROOTS and not _aborted(r)] or list(failures)
    first = min(_began(r) for r in candidates)
    tied = [r for r in candidates if _began(r) <= first + _CLOCKS]
    return min(tied, key=lambda r: (CAUSE_PRECEDENCE.index(r.cause), _began(r), r.node))


def _aborted(result: AttemptResult) -> bool:
    """NCCL's watchdog aborts a rank whose peer has broken the connection."""
    return result.cause is Cause.RANK_KILLED and result.exit_code == -signal.SIGABRT


def _began(result: AttemptResult) -> float:
    return result.began_at if result.began_at is not None else 0.0


def _seen(result: AttemptResult, nodes: int) -> EndSeen:
    where = f"node {result.node}: " if nodes > 1 and result.message else ""
    return EndSeen(
        result.cause, result.node, result.rank, result.exit_code, f"{where}{result.message}" if result.message else None
    )
