"""The history of a job as ``ratchet events`` prints it: checkpoints in a row are one line, and so is the end of an attempt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ratchet_client.cli.commands.logs import EventFold, event_line
from ratchet_contract.api.views import EventView

KILLED = "rank-killed: rank 0 was killed by SIGKILL after step 314"


def event(type_: str, message: str, attempt: int = 1, **data: Any) -> EventView:
    at = "2026-01-31T12:00:00Z"
    return EventView.model_validate(
        {"id": 1, "job_id": "j", "at": at, "type": type_, "attempt": attempt, "message": message, "data": data}
    )


def saved(step: int, attempt: int = 1) -> EventView:
    return event("checkpoint", f"checkpoint step-{step:012d}.a{attempt:04d} committed (schedule)", attempt, step=step)


def ended(attempt: int = 1) -> list[EventView]:
    """What the service stores of an attempt whose rank was killed."""
    again = f"The last attempt ended with {KILLED}. Tried again at once."
    return [
        event("result", "the agent ended: rank-killed", attempt, cause="rank-killed"),
        event("attempt-ended", f"attempt {attempt} ended: {KILLED}", attempt, cause="rank-killed", rank=0),
        event("end-requeue", again, attempt, **{"from": "RUNNING", "to": "QUEUED"}),
    ]


def folded(events: Iterable[EventView]) -> list[EventView]:
    fold = EventFold()
    return [*(shown for event in events for shown in fold.add(event)), *fold.flush()]


def shown(*events: EventView) -> list[str]:
    return [f"{e.attempt} {e.type}: {e.message}" for e in folded(events)]


def test_consecutive_checkpoint_events_fold_into_one_line_per_attempt() -> None:
    first, second = [saved(step) for step in (50, 100, 150)], [saved(step, 2) for step in (200, 250)]
    assert shown(*first, *second, event("preempt", "RUNNING -> STOPPING", 2), saved(300, 2)) == [
        "1 checkpoint: 3 checkpoints from step 50 on, newest: step-000000000150.a0001 committed (schedule)",
        "2 checkpoint: 2 checkpoints from step 200 on, newest: step-000000000250.a0002 committed (schedule)",
        "2 preempt: RUNNING -> STOPPING",
        "2 checkpoint: checkpoint step-000000000300.a0002 committed (schedule)",
    ]


def test_attempt_end_events_fold_into_one_line() -> None:
    [line] = folded(ended())
    assert line.message == f"attempt 1 ended: {KILLED}; the job is QUEUED: Tried again at once."
    assert (line.type, line.data["cause"], line.data["to"]) == ("attempt-ended", "rank-killed", "QUEUED")
    done = [
        event("result", "the agent ended: completed", cause="completed"),
        event("attempt-ended", "attempt 1 ended: completed: all ranks completed", cause="completed"),
        event("end-succeeded", "RUNNING -> SUCCEEDED", **{"from": "RUNNING", "to": "SUCCEEDED"}),
    ]
    assert shown(*done) == ["1 attempt-ended: attempt 1 ended: completed: all ranks completed; the job is SUCCEEDED"]
    broken = [
        event("attempt-ended", "attempt 1 ended: user-error: TypeError: batch", cause="user-error"),
        event("end-failed", "TypeError: batch", **{"from": "RUNNING", "to": "FAILED"}),
    ]
    assert shown(*broken) == ["1 attempt-ended: attempt 1 ended: user-error: TypeError: batch; the job is FAILED"]


def test_incomplete_or_interrupted_end_events_are_all_shown() -> None:
    result, over, requeue = ended()
    adopted = event("checkpoint-adopted", "checkpoint was found valid on disk; its report was lost")
    assert shown(saved(1), result) == [
        "1 checkpoint: checkpoint step-000000000001.a0001 committed (schedule)",
        "1 result: the agent ended: rank-killed",
    ]
    assert [line.partition(" ended")[0] for line in shown(result, adopted, over, requeue)] == [
        f"1 checkpoint-adopted: {adopted.message}",
        "1 attempt-ended: attempt 1",
    ]
    assert shown(over) == [f"1 attempt-ended: attempt 1 ended: {KILLED}"]
    assert shown(over, saved(400, 2), result) == [
        f"1 attempt-ended: attempt 1 ended: {KILLED}",
        "2 checkpoint: checkpoint step-000000000400.a0002 committed (schedule)",
        "1 result: the agent ended: rank-killed",
    ]


def test_event_fold_emits_streamed_events_as_soon_as_complete() -> None:
    fold = EventFold()
    result, over, requeue = ended()
    told = [len(fold.add(e)) for e in (saved(1), saved(2), result, over, requeue, event("launch", "STARTING", 2))]
    assert told == [0, 0, 0, 1, 1, 1] and fold.flush() == []


def test_followed_checkpoints_show_first_at_once_and_rest_as_summary() -> None:
    fold = EventFold(follow=True)
    come = [saved(1), saved(2), saved(3), event("preempt", "RUNNING -> STOPPING"), saved(4), saved(5, 2), saved(6, 2)]
    assert [[e.message.removesuffix(" committed (schedule)") for e in fold.add(one)] for one in come] == [
        ["checkpoint step-000000000001.a0001"],
        [],
        [],
        ["3 checkpoints from step 1 on, newest: step-000000000003.a0001", "RUNNING -> STOPPING"],
        ["checkpoint step-000000000004.a0001"],
        ["checkpoint step-000000000005.a0002"],
        [],
    ]
    assert [e.message.partition(",")[0] for e in fold.flush()] == ["2 checkpoints from step 5 on"]


def test_event_lines_have_single_punctuation_and_short_digests() -> None:
    error = "exception: TypeError: unsupported operand for batch (train.py line 3)."
    first, second = (event("attempt-ended", f"attempt {n} ended: {error}", n) for n in (1, 2))
    again = event("end-requeue", f"The last attempt ended with {error}  Tried again at once.  Mend it.", to="QUEUED")
    one, two = folded([first, again, second, again])
    assert one.message == f"attempt 1 ended: {error[:-1]}; the job is QUEUED: Tried again at once. Mend it."
    assert two.message == "attempt 2 ended: exception: (as above); the job is QUEUED: Tried again at once. Mend it."
    killed = [
        event("attempt-ended", f"attempt {n} ended: rank-killed: rank 0 was killed after step {s}", n)
        for n, s in ((1, 34), (2, 340))
    ]
    requeue = event("end-requeue", "Tried again at once.", to="QUEUED")
    assert "after step 340" in folded([killed[0], requeue, killed[1], requeue])[1].message, (
        "another step is another error"
    )
    line = event_line(event("code-changed", f"code: {'a' * 64} -> {'b' * 64}"))
    assert line.endswith("code: aaaaaaaaaaaa… -> bbbbbbbbbbbb…")
