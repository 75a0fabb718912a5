"""Combines the results of one attempt's agents and the engine's reports into one end."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

from ratchet_contract.phases import CAUSE_PRECEDENCE, Cause, Outcome
from ratchet_contract.protocol.messages import AttemptResult

_MAX_CLOCK_SKEW_SECONDS: Final = 0.5
"""Seconds by which the clocks of two nodes may differ (NTP on one network keeps them within milliseconds)."""

_ROOT_CAUSES: Final = frozenset({Cause.USER_ERROR, Cause.LEASE_LOST, Cause.OOM, Cause.RANK_KILLED})
"""Causes that a broken connection cannot produce: where one node ended by such a cause, the others' exceptions and hangs follow
from it."""


class EndSeen(NamedTuple):
    """The end of a node, or of the whole attempt if ``node`` is None. ``rank``: the rank that caused the end, if known."""

    cause: Cause
    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    message: str | None = None


def combine_ends(
    results: Sequence[AttemptResult], nodes: int, engine: Sequence[EndSeen] = (), *, killed: bool = False
) -> EndSeen | None:
    """Return the single end of an attempt on ``nodes`` nodes; None if nothing is known. ``results``: the results of its agents.
    ``engine``: the engine's reports from before any kill, earliest first. ``killed``: True if the caller killed the remaining
    processes, after it had waited for them in vain."""
    results = _without_fenced(results, engine, killed=killed)
    # A node without a result has lost its agent, which no event on another node can cause: the engine's report on it decides.
    silent = sorted(set(range(nodes)) - {r.node for r in results})
    lost = _first_report(engine, silent)
    if lost is not None:
        return lost
    if silent and killed and results:
        return _network_partition_end(results, silent, nodes)
    if silent and results:
        text = f"the agent of node {', '.join(map(str, silent))} was killed: it left no result.json"
        return EndSeen(Cause.UNKNOWN, _only(silent), message=text)
    if not results:
        return None
    # ``secondary``: the node was ended because another node failed.
    primary = [r for r in results if not r.secondary] or list(results)
    failures = [r for r in primary if r.cause.is_failure]
    if failures:
        return _end_of(_root_failure(failures), nodes)
    chosen = min(primary, key=lambda r: (CAUSE_PRECEDENCE.index(r.cause), r.node))
    if chosen.cause is Cause.SIGTERM and engine:
        # The engine sent the signal.
        word = _first_report(engine, [chosen.node]) or engine[0]
        return EndSeen(word.cause, chosen.node, chosen.rank, chosen.exit_code, f"{word.message}; {chosen.message}")
    return _end_of(chosen, nodes)


def _without_fenced(
    results: Sequence[AttemptResult], engine: Sequence[EndSeen], *, killed: bool
) -> Sequence[AttemptResult]:
    """Return the results without those of cause lease-lost, if another reason for the end of these nodes is known."""
    others = [r for r in results if r.cause is not Cause.LEASE_LOST]
    fenced = [r.node for r in results if r.cause is Cause.LEASE_LOST]
    return others if _first_report(engine, fenced) is not None or (killed and others) else results


def _network_partition_end(results: Sequence[AttemptResult], silent: Sequence[int], nodes: int) -> EndSeen:
    """Return the end of an attempt whose nodes ``silent`` were cut off: node-lost, unless the results show an end that a broken
    connection cannot produce."""
    told = combine_ends(results, 0)
    assert told is not None
    if (told.cause in _ROOT_CAUSES and told.exit_code != -signal.SIGABRT) or told.cause.outcome not in (
        Outcome.FAILED,
        Outcome.LOST,
    ):
        return told
    where = ", ".join(map(str, silent))
    text = f"node {where} is cut off: its agent did not end when the others did; their result: {told.message}"
    return EndSeen(Cause.NODE_LOST, _only(silent), message=text)


def _only(nodes: Sequence[int]) -> int | None:
    """Return the one node; None if there are several, any of which may have caused the end."""
    return nodes[0] if len(nodes) == 1 else None


def _first_report(engine: Sequence[EndSeen], nodes: Sequence[int]) -> EndSeen | None:
    """Return the engine's earliest report on one of ``nodes`` or on the whole attempt; None if there is none, or ``nodes`` is
    empty."""
    return next((word for word in engine if nodes and (word.node is None or word.node in nodes)), None)


def _root_failure(failures: Sequence[AttemptResult]) -> AttemptResult:
    """Return the failure that caused the others. If there are failures that a broken connection cannot produce, only these are
    considered. The earliest failure is chosen; among failures within half a second of it, ``CAUSE_PRECEDENCE`` decides."""
    candidates = [r for r in failures if r.cause in _ROOT_CAUSES and not _is_nccl_abort(r)] or list(failures)
    first = min(_begin_time(r) for r in candidates)
    # Clocks of nodes differ.
    tied = [r for r in candidates if _begin_time(r) <= first + _MAX_CLOCK_SKEW_SECONDS]
    return min(tied, key=lambda r: (CAUSE_PRECEDENCE.index(r.cause), _begin_time(r), r.node))


def _is_nccl_abort(result: AttemptResult) -> bool:
    """True if SIGABRT ended the rank, as when NCCL's watchdog aborts it because a connection to another rank broke."""
    return result.cause is Cause.RANK_KILLED and result.exit_code == -signal.SIGABRT


def _begin_time(result: AttemptResult) -> float:
    """Return when the failure began, in Unix seconds; 0 if unknown."""
    return result.began_at if result.began_at is not None else 0.0


def _end_of(result: AttemptResult, nodes: int) -> EndSeen:
    """Return a result as the attempt's end; with several nodes the message names the node."""
    where = f"node {result.node}: " if nodes > 1 and result.message else ""
    return EndSeen(
        result.cause, result.node, result.rank, result.exit_code, f"{where}{result.message}" if result.message else None
    )
