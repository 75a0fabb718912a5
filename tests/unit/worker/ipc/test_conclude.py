"""Many ends, one cause: the table of what the agent concludes."""

from __future__ import annotations

import signal

import pytest

from ratchet_contract.exit_codes import EXIT_USER_ERROR, exit_code_of
from ratchet_contract.phases import Cause, Desired, Outcome
from ratchet_contract.protocol.messages import Control, RankEnd, RankResult
from ratchet_worker.ipc.result_files import Ended, Evidence, conclude

KILL, SEGV, ABRT, TERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGTERM


def end(rank: int, code: int | None, cause: Cause | None = None, at: float = 0.0) -> Ended:
    result = (
        None if cause is None else RankResult(rank=rank, cause=cause, at="", last_step=7, message=f"{rank} {cause}")
    )
    return Ended(RankEnd(rank=rank, exit_code=code, last_step=7, result=result), at)


@pytest.mark.parametrize(
    ("ends", "cause", "rank"),
    [
        # survivors of a killed rank may write their result before the death itself is noticed
        ([end(0, 1, Cause.EXCEPTION, at=1.000), end(1, KILL, at=1.050)], Cause.RANK_KILLED, 1),
        ([end(0, 74, Cause.CHECKPOINT_ERROR, at=1.0), end(1, SEGV, at=1.2)], Cause.RANK_KILLED, 1),
        # NCCL aborts a survivor: an abort is a consequence unless it came first
        ([end(0, 1, Cause.EXCEPTION, at=1.0), end(1, ABRT, at=1.2)], Cause.EXCEPTION, 0),
        ([end(0, 1, Cause.EXCEPTION, at=1.2), end(1, ABRT, at=1.0)], Cause.RANK_KILLED, 1),
        # the first exception is the cause, whatever its rank
        ([end(0, 1, Cause.EXCEPTION, at=2.0), end(1, 1, Cause.EXCEPTION, at=1.0)], Cause.EXCEPTION, 1),
        ([end(0, 1, Cause.EXCEPTION, at=1.0), end(1, 74, Cause.CHECKPOINT_ERROR, at=1.5)], Cause.EXCEPTION, 0),
        # at the same moment, precedence decides
        ([end(0, 1, Cause.EXCEPTION, at=1.0), end(1, 74, Cause.CHECKPOINT_ERROR, at=1.001)], Cause.CHECKPOINT_ERROR, 1),
        # nobody runs out of memory, or cannot import, because of a broken connection
        ([end(0, 1, Cause.EXCEPTION, at=1.0), end(1, 1, Cause.OOM, at=1.1)], Cause.OOM, 1),
        ([end(0, 1, Cause.EXCEPTION, at=1.0), end(1, EXIT_USER_ERROR, at=1.1)], Cause.USER_ERROR, 1),
        # a failure beats an agreed stop and a completion
        ([end(0, 143, Cause.SIGTERM), end(1, 1, Cause.EXCEPTION)], Cause.EXCEPTION, 1),
        ([end(0, 0, Cause.COMPLETED), end(1, 1, Cause.EXCEPTION)], Cause.EXCEPTION, 1),
        # a clean end without a result is no success; a bad exit after a result does not undo it
        ([end(0, 0, Cause.COMPLETED), end(1, 0)], Cause.EXCEPTION, 1),
        ([end(0, 0, Cause.COMPLETED), end(1, SEGV, Cause.COMPLETED)], Cause.COMPLETED, 0),
        ([end(0, None, Cause.COMPLETED), end(1, 0, Cause.COMPLETED)], Cause.COMPLETED, 0),
        # stops
        ([end(0, 143, Cause.SIGTERM), end(1, 143, Cause.API_SUSPEND)], Cause.API_SUSPEND, 1),
        ([end(0, 0, Cause.COMPLETED), end(1, 143, Cause.API_PREEMPT)], Cause.API_PREEMPT, 1),
        # SIGTERM met a rank before its handler stood; the agent killed the one that waited for it
        ([end(0, TERM), end(1, None)], Cause.SIGTERM, 0),
        ([end(0, 0, Cause.COMPLETED), end(1, None)], Cause.UNKNOWN, None),
        ([end(0, TERM), end(1, TERM)], Cause.SIGTERM, 0),
        # codes of programs that leave no result
        ([end(0, 3), end(1, None)], Cause.EXCEPTION, 0),
        ([end(0, 74), end(1, None)], Cause.CHECKPOINT_ERROR, 0),
        ([end(0, None), end(1, None)], Cause.UNKNOWN, None),
        ([], Cause.UNKNOWN, None),
    ],
)
def test_conclude_selects_one_cause_from_rank_ends(ends: list[Ended], cause: Cause, rank: int | None) -> None:
    for order in (ends, ends[::-1]):
        found = conclude(order)
        assert (found.cause, found.rank) == (cause, rank)
        assert found.message


def test_conclude_uses_agent_evidence_over_rank_ends() -> None:
    killed = [end(0, None), end(1, KILL)]
    assert conclude(killed, Evidence(oom=frozenset({1}))).cause is Cause.OOM
    assert conclude(killed, Evidence(fenced="409")).cause is Cause.LEASE_LOST
    hung = conclude(killed, Evidence(hung=(1, 0), hang_message="rank 1 stands"))
    assert hung[:3] == (Cause.HANG, 1, KILL)


def test_conclude_marks_peer_caused_failure_secondary_with_start_time() -> None:
    survivors = [end(2, 1, Cause.EXCEPTION, at=7.0), end(3, None)]
    told = conclude(survivors, Evidence(peer_end="node 0 has ended with oom", killed_at=8.0))
    assert (told.cause, told.secondary, told.began_at) == (
        Cause.UNKNOWN,
        True,
        8.0,
    ) and "ended with oom" in told.message
    alone = conclude(survivors)
    assert (alone.cause, alone.secondary, alone.began_at) == (Cause.EXCEPTION, False, 7.0)
    hung = conclude(survivors, Evidence(hung=(3,), hang_message="rank 3 stands", hung_since=2.0, peer_end="node 0"))
    assert (hung.cause, hung.secondary, hung.began_at) == (Cause.HANG, False, 2.0)
    stop = Control(desired=Desired.SUSPEND, cause=Cause.API_SUSPEND)
    assert conclude([end(0, None)], Evidence(stop=stop, overdue=True, killed_at=5.0)).began_at == 5.0


@pytest.mark.parametrize(
    ("stop", "moved", "cause"),
    [
        (Control(desired=Desired.PREEMPT, cause=Cause.SIGTERM), True, Cause.SIGTERM),
        (Control(desired=Desired.PREEMPT, cause=Cause.HIGHER_PRIORITY), False, Cause.HANG),
        (Control(desired=Desired.SUSPEND, cause=Cause.API_SUSPEND), False, Cause.API_SUSPEND),
        (Control(desired=Desired.CANCEL), False, Cause.API_CANCEL),
    ],
)
def test_conclude_overdue_stop_keeps_stop_cause_unless_no_rank_moved(stop: Control, moved: bool, cause: Cause) -> None:
    ends = [end(0, None), end(1, 143, Cause.SIGTERM)]
    found = conclude(ends, Evidence(stop=stop, overdue=True, progressed=moved))
    assert found.cause is cause and "no agreed stop" in found.message and "ranks 0;" in found.message


def test_exit_code_distinguishes_success_stop_and_failure() -> None:
    for cause in Cause:
        code = exit_code_of(cause)
        assert (code == 0) == (cause is Cause.COMPLETED)
        stopped = cause.outcome in (Outcome.PREEMPTED, Outcome.SUSPENDED, Outcome.CANCELLED)
        assert (code == 143) == stopped
