"""Result files of ranks, and how the ends of all ranks become the one cause of an attempt's end."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.phases import CAUSE_PRECEDENCE, Cause, Desired, Outcome
from ratchet_contract.protocol.messages import Control, RankEnd, RankResult

TRACEBACK_LIMIT: Final = 16 * 1024
_TIE: Final = 0.01  # seconds; the kernel's clock for file times is no finer than 4 ms


def write_rank_result(path: Path, result: RankResult) -> None:
    """Write a rank's result to ``path``. Call it before the rank leaves the process group. Raises ``OSError``."""
    if result.traceback is not None and len(result.traceback) > TRACEBACK_LIMIT:
        result = result.model_copy(update={"traceback": result.traceback[-TRACEBACK_LIMIT:]})
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file times show which rank failed first.
    write_atomic(path, result.model_dump_json().encode(), durable=False)


def read_rank_result(path: Path) -> tuple[RankResult, float] | None:
    """Return a rank's result, and the Unix time at which it was written; None if it cannot be read."""
    try:
        return RankResult.model_validate_json(path.read_bytes()), path.stat().st_mtime
    except (OSError, ValidationError):
        return None


@dataclass(frozen=True)
class Ended:
    """The end of one rank. ``end``: its result and exit code. ``at``: Unix time of its result or of its process's end."""

    end: RankEnd
    at: float


@dataclass(frozen=True)
class Evidence:
    """What the agent knows in addition to the ranks' ends. Times are Unix seconds."""

    # Why the attempt must not continue: its attempt number is no longer the current one.
    fenced: str | None = None
    hung: tuple[int, ...] = ()
    hang_message: str = ""
    # When the hung ranks last made progress.
    hung_since: float | None = None
    # A message about the failure of another node because of which the agent killed the ranks.
    peer_end: str | None = None
    # When the agent began to kill the ranks, for any reason.
    killed_at: float | None = None
    # Ranks that died while the kernel's out-of-memory killer was active.
    oom: frozenset[int] = field(default_factory=frozenset)
    # The last desired state that the agent acted on, RUN or a stop request.
    stop: Control | None = None
    # The grace period of the stop has expired, and the agent killed ranks.
    overdue: bool = False
    # Some rank made progress after the stop request.
    progressed: bool = True
    # A text that says which ranks aborted their process groups before they were killed.
    aborts: str = ""


class Conclusion(NamedTuple):
    """Why an attempt ended. ``rank``: the rank whose end or hang decided it; None: no single rank. ``began_at``: when the end,
    hang or kill began (Unix seconds), if known. ``secondary``: this node's part ended only because another node had failed."""

    cause: Cause
    rank: int | None
    exit_code: int | None
    message: str
    began_at: float | None = None
    secondary: bool = False


class NotStarted(Exception):
    """Raised if the attempt ends before any rank is started. ``conclusion``: why."""

    def __init__(self, conclusion: Conclusion) -> None:
        super().__init__(conclusion.message)
        self.conclusion = conclusion


def conclude(ends: Sequence[Ended], evidence: Evidence = Evidence()) -> Conclusion:
    """Return the one cause of the attempt's end on this node, and its rank. The first that applies decides: fencing, a hang,
    another node's failure, a failure of a rank, an overdue stop, other stops and completion. Otherwise the cause is unknown."""
    codes = {e.end.rank: e.end.exit_code for e in ends}
    if evidence.fenced is not None:
        return Conclusion(Cause.LEASE_LOST, None, None, evidence.fenced)
    if evidence.hung:
        first = evidence.hung[0]
        return Conclusion(Cause.HANG, first, codes.get(first), evidence.hang_message, evidence.hung_since)
    if evidence.peer_end is not None:
        return peer_failure(evidence.peer_end, evidence.killed_at)
    causes = [(cause, e) for e in ends if (cause := cause_of(e.end, oom=e.end.rank in evidence.oom)) is not None]
    failures = [(c, e) for c, e in causes if c.is_failure]
    if failures:
        return _conclusion(*_root_failure(failures))
    if evidence.overdue and evidence.stop is not None:
        killed = [e.end.rank for e in ends if e.end.result is None]
        return _overdue_conclusion(evidence.stop, evidence.progressed, killed)._replace(began_at=evidence.killed_at)
    alone = any(
        e.end.result is None for _, e in causes
    )  # SIGTERM ended it before its handler was installed, and the agent killed the ranks that waited for it
    if not causes or (len(causes) < len(ends) and not alone):
        return Conclusion(Cause.UNKNOWN, None, None, "ranks ended without reporting a cause")
    return _conclusion(*min(causes, key=lambda item: (CAUSE_PRECEDENCE.index(item[0]), item[1].end.rank)))


def cause_of(end: RankEnd, *, oom: bool = False) -> Cause | None:
    """Return the cause of one rank's end, from its result or else its exit code; None if it has neither. ``oom``: the kernel was
    killing processes for lack of memory, so that a SIGKILL means the cause ``oom``."""
    if end.result is not None:
        return end.result.cause
    if end.exit_code is None:
        return None
    if end.exit_code == -signal.SIGTERM:  # it came before the rank had installed its handler: nothing was trained yet
        return Cause.SIGTERM
    if end.exit_code < 0:
        return Cause.OOM if oom and end.exit_code == -signal.SIGKILL else Cause.RANK_KILLED
    # No success: the process ended without the runtime's knowledge.
    if end.exit_code == 0:
        return Cause.EXCEPTION
    return CAUSE_OF_EXIT_CODE.get(end.exit_code, Cause.EXCEPTION)


def is_fine(end: RankEnd) -> bool:
    """True if the rank completed or was stopped; False if it failed, or its cause is not known."""
    cause = cause_of(end)
    return cause is not None and cause.outcome not in (Outcome.FAILED, Outcome.LOST)


def _root_failure(failures: Sequence[tuple[Cause, Ended]]) -> tuple[Cause, Ended]:
    """Return the failure that probably caused the others, with its cause. This is the earliest of those that a broken connection
    cannot cause; if there is none, the earliest of all. Among failures at nearly the same time, the cause decides."""
    # Survivors of a dead rank raise exceptions about broken connections (or abort, under NCCL), sometimes before the agent
    # notices the death itself.
    roots = [(c, e) for c, e in failures if c in (Cause.OOM, Cause.USER_ERROR) or is_killed(e.end)]
    candidates = roots or list(failures)
    first = min(e.at for _, e in candidates)
    tied = [(c, e) for c, e in candidates if e.at <= first + _TIE]
    return min(tied, key=lambda item: (CAUSE_PRECEDENCE.index(item[0]), item[1].at, item[1].end.rank))


def is_killed(end: RankEnd) -> bool:
    """True if the rank was killed by a signal other than SIGABRT, before it had written a result. A broken connection does not
    cause that."""
    return cause_of(end) is Cause.RANK_KILLED and end.result is None and end.exit_code != -signal.SIGABRT


def _overdue_conclusion(stop: Control, progressed: bool, ranks: Sequence[int]) -> Conclusion:
    """Return the conclusion for a stop whose grace period has expired. ``ranks``: those killed; ``progressed``: some rank made
    progress after the request."""
    cause = stop.cause or default_cause(stop.desired)
    names = ", ".join(map(str, ranks))
    text = f"no agreed stop within the grace (policy.stop_grace); killed ranks {names}; the last checkpoint counts"
    if stop.desired is Desired.PREEMPT and not progressed:
        return Conclusion(Cause.HANG, ranks[0] if ranks else None, None, f"{cause}: no rank made progress and {text}")
    return Conclusion(cause, None, None, f"{cause}: {text}")


def peer_failure(sentence: str, at: float | None) -> Conclusion:
    """Return the conclusion for a node whose part of the attempt another node's failure has ended. ``sentence``: about that
    failure; ``at``: when this node's part ended (Unix seconds)."""
    text = f"ended because another node had failed: {sentence}"
    return Conclusion(Cause.UNKNOWN, None, None, text[:4000], at, secondary=True)


def default_cause(desired: Desired) -> Cause:
    """Return the cause that is recorded for a stop request that names none."""
    return {
        Desired.CANCEL: Cause.API_CANCEL,
        Desired.SUSPEND: Cause.API_SUSPEND,
        Desired.PREEMPT: Cause.API_PREEMPT,
        Desired.RUN: Cause.UNKNOWN,
    }[desired]


def _conclusion(cause: Cause, ended: Ended) -> Conclusion:
    return Conclusion(cause, ended.end.rank, ended.end.exit_code, _end_message(cause, ended.end), ended.at)


def _end_message(cause: Cause, end: RankEnd) -> str:
    """Return the message about the attempt's end that follows from one rank's end with ``cause``."""
    if cause is Cause.COMPLETED:
        return "all ranks completed"
    if end.result is not None:
        return end.result.message or f"rank {end.rank}: {end.result.cause}"
    code, after = end.exit_code, f" after step {end.last_step}" if end.last_step else ""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = "; the kernel's out-of-memory killer was at work" if cause is Cause.OOM else ""
        return f"rank {end.rank} was killed by {name}{after}{why}"
    if cause is Cause.CHECKPOINT_ERROR:
        return (
            f"rank {end.rank} could not save after step {end.last_step}, nor record why: check whether the disk of "
            "the run directory is full (`ratchet doctor`), free space, then `ratchet resume JOB`"
        )
    return f"rank {end.rank} ended with exit code {code} and no result{after}; see its log"
