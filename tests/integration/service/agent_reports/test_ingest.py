"""Reports of agents: fenced, exactly once, never stuck on a strange message."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.phases import AttemptPhase, JobPhase
from ratchet_contract.protocol.messages import RankBatch
from ratchet_service.agent_reports.ingest import ingest_batches
from ratchet_service.agent_reports.metric_series import thin_samples
from ratchet_service.agent_reports.report_pacing import Agent, Pacing
from ratchet_service.db.models import Attempt, AttemptNode, HookSample
from ratchet_service.db.transitions import lock_job
from tests.support.api import Api, checkpoint_message, message, training_message

BASE = {"step": 0, "attempt": None, "digest": None}


@pytest.fixture
def job(api: Api) -> str:
    job_id = api.submit()
    api.attempt(job_id)
    return job_id


def hook_message(step: int, rank: int = 0, **fields: Any) -> dict[str, Any]:
    summary = {
        "name": "powerSGD", "rank": rank, "step": step, "phase": "compressing", "iteration": step, "compression_rate": 8.0,
        "elements_before": 800, "elements_after": 100, "bytes_before": 3200, "bytes_after": 400, "residual_norm": 0.5 + rank,
        "memory_bytes": 4096,
    }  # fmt: skip
    return message("hook", rank, summary=summary | fields)


def event_types(api: Api, job_id: str) -> list[str]:
    return [e["type"] for e in api.client.get(f"/v1/jobs/{job_id}/events").json()["items"]]


def test_reports_of_a_complete_attempt_update_job_checkpoints_and_hook(api: Api, job: str) -> None:
    report = {"verdict": "fresh", "base": BASE, "world_size": 2}
    ack = api.report(
        job,
        (0, 1, [
            message("started", pid=11, host="here", device="cpu", torch="2.13"),
            message("resumed", report=report),
            training_message(total_steps=40),
            message("progress", step=7, data_epoch=1),
            message("metrics", step=7, values={"loss": 2.5}),
            hook_message(7),
            checkpoint_message(5),
        ]),
        (1, 1, [message("started", 1, pid=12, host="here", device="cpu", torch="2.13"), hook_message(7, rank=1)]),
    ).json()  # fmt: skip
    assert ack["acked"] == {"0": 7, "1": 2}
    found = api.job(job)
    assert found["phase"] == "RUNNING"
    progress = {"step": 7, "total_steps": 40, "data_epoch": 1, "steps_at_risk": 2, "steps_per_second": None}
    assert found["progress"] == progress
    assert found["last_checkpoint"] == "step-000000000005.a0001"
    attempt = api.client.get(f"/v1/jobs/{job}/attempts/1").json()
    assert attempt["base"] == {"step": 0, "attempt": None, "digest": None}
    assert (attempt["last_step"], attempt["steps_done"], attempt["committed_step"]) == (7, 7, 5)
    assert attempt["resume_report"]["verdict"] == "fresh"
    assert attempt["training_at"] == "2030-01-01T00:00:00Z"
    stored = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert [(c["id"], c["state"], c["digest"], c["size"]) for c in stored] == [
        ("step-000000000005.a0001", "committed", "d5", 1000)
    ]
    hook = api.client.get(f"/v1/jobs/{job}/hook").json()
    assert (hook["phase"], hook["iteration"], hook["compression_rate"]) == ("compressing", 7, 8.0)
    assert hook["residual_norm"] == {"0": 0.5, "1": 1.5}
    assert hook["checkpoint_id"] == "step-000000000005.a0001"
    assert event_types(api, job) == ["submitted", "rank-started", "resumed", "training", "checkpoint", "rank-started"]


def test_unmanaged_attempt_has_no_base_until_a_session_reports_one(api: Api, job: str) -> None:
    unmanaged = {"verdict": "unmanaged", "base": BASE, "world_size": 2, "notes": ["why"]}
    api.report(job, (0, 1, [message("resumed", report=unmanaged)]))
    found = api.job(job)
    assert (found["phase"], found["progress"]["step"], found["last_checkpoint"]) == ("RUNNING", 0, None)
    attempt = api.client.get(f"/v1/jobs/{job}/attempts/1").json()
    assert (attempt["base"], attempt["resume_report"]["verdict"]) == (None, "unmanaged")
    assert attempt["training_at"] == "2030-01-01T00:00:00Z"

    fresh = {"verdict": "fresh", "base": BASE, "world_size": 2}
    api.report(job, (0, 2, [message("resumed", report=fresh), training_message(total_steps=40)]))
    found = api.job(job)
    assert (found["phase"], found["progress"]["total_steps"]) == ("RUNNING", 40)
    attempt = api.client.get(f"/v1/jobs/{job}/attempts/1").json()
    assert (attempt["base"]["step"], attempt["resume_report"]["verdict"]) == (0, "fresh")
    api.client.post(f"/v1/jobs/{job}/cancel")
    api.report(job, (0, 4, [message("resumed", report=unmanaged)]))
    assert api.job(job)["phase"] == "STOPPING"


def test_repeated_report_lines_are_stored_once(api: Api, job: str) -> None:
    lines = [training_message(), *(message("note", type="n", message=str(i)) for i in range(4))]
    for begin, end in ((0, 2), (0, 2), (0, 4), (1, 3), (3, 5), (0, 5)):
        ack = api.report(job, (0, begin + 1, lines[begin:end])).json()
    assert ack["acked"] == {"0": 5}
    events = api.client.get(f"/v1/jobs/{job}/events").json()["items"]
    assert [e["message"] for e in events if e["type"] == "note.n"] == ["0", "1", "2", "3"]
    assert [e["type"] for e in events].count("training") == 1


def test_report_with_a_sequence_gap_is_not_stored_nor_acknowledged(api: Api, job: str) -> None:
    assert api.report(job, (0, 3, [message("note", type="late", message="x")])).json()["acked"] == {}
    assert api.report(job, (0, 1, [training_message()])).json()["acked"] == {"0": 1}
    assert "note.late" not in event_types(api, job)


@pytest.mark.parametrize(("after", "header"), [(0.0, None), (4.25, "4.2")])
def test_busy_service_sends_report_after_header(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch, after: float, header: str | None
) -> None:
    told: list[tuple[Agent, float]] = []

    def reported(_: Pacing, agent: Agent, cpu_seconds: float) -> float:
        told.append((agent, cpu_seconds))
        return after

    monkeypatch.setattr(Pacing, "record_report", reported)
    assert api.report(job, (0, 1, [training_message()])).headers.get("Ratchet-Report-After") == header
    assert [agent for agent, _ in told] == [(job, 1, 0)] and 0.0 < told[0][1] < 5.0


def test_concurrent_identical_reports_are_stored_once(api: Api, job: str) -> None:
    start = threading.Barrier(6)
    lines = [message("note", type="n", message=str(i)) for i in range(20)]
    statuses = []

    def send() -> None:
        start.wait(10)
        for size in (5, 10, 20):
            statuses.append(api.report(job, (0, 1, lines[:size])).status_code)

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(statuses) == {200}
    assert event_types(api, job).count("note.n") == 20


def test_empty_or_repeated_report_does_not_write_the_database(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message()]))
    with api.database.write():  # on SQLite nobody else can write now
        assert api.report(job).json()["acked"] == {"0": 1}
        assert api.report(job, (0, 1, [training_message()]), last_step=3).json()["acked"] == {"0": 1}


@pytest.mark.parametrize("how", ["newer", "ended"])
def test_report_of_a_fenced_attempt_is_refused_and_stores_nothing(api: Api, job: str, how: str) -> None:
    if how == "newer":
        api.attempt(job, number=2)
    else:
        with api.database.write() as session:
            session.get_one(Attempt, (job, 1)).phase = AttemptPhase.ENDED
    for batches in ((), ((0, 1, [checkpoint_message(5)]),)) * 6:
        answer = api.report(job, *batches)
        assert (answer.status_code, answer.json()["code"]) == (409, "stale-attempt")
    assert api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"] == []
    events = api.client.get(f"/v1/jobs/{job}/events").json()["items"]
    told = [(e["attempt"], e["data"]) for e in events if e["type"] == "stale-request"]
    assert told == [(1, {"refused": 1}), (1, {"refused": 10})], "told, and not in every case"
    assert api.report(job, token="another").status_code == 403
    with api.database.read() as session:
        assert session.get_one(Attempt, (job, 1)).late_requests == 12, "only who has the token is counted"


def test_metrics_of_a_fenced_attempt_are_refused_in_one_transaction(api: Api, job: str) -> None:
    """The service knows from its own last answer that the next report has news, and takes it in by one transaction."""

    def figures(step: int) -> tuple[int, int, list[dict[str, Any]]]:
        return (0, step, [message("metrics", step=step, values={"loss": float(step)})])

    assert [api.report(job, figures(step)).status_code for step in (1, 2)] == [200, 200]
    assert api.report(job, figures(3), token="another").status_code == 403
    assert api.report(job, figures(3), node=1).json()["code"] == "invalid-report"
    api.attempt(job, number=2)
    answer = api.report(job, figures(3))
    assert (answer.status_code, answer.json()["code"]) == (409, "stale-attempt")
    [loss] = api.client.get(f"/v1/jobs/{job}/metrics").json()["series"]
    assert [point["step"] for point in loss["points"]] == [1, 2]
    assert event_types(api, job).count("stale-request") == 1


def test_report_of_an_attempt_fenced_during_ingest_stores_nothing(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def between(*_: Any) -> dict[tuple[int, int], int]:  # after the first look, before the write
        api.attempt(job, number=2)
        return {}

    monkeypatch.setattr("ratchet_service.agent_reports.ingest.hook_iterations", between)
    answer = api.report(job, (0, 1, [checkpoint_message(5)]))
    assert (answer.status_code, answer.json()["code"]) == (409, "stale-attempt")
    assert api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"] == []


def test_checkpoint_report_of_another_attempt_is_not_recorded(api: Api, job: str) -> None:
    api.report(job, (0, 1, [checkpoint_message(5, attempt=7)]))
    assert api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"] == []
    assert "checkpoint-ignored" in event_types(api, job)
    assert api.job(job)["last_checkpoint"] is None


def test_report_of_many_saves_and_deletions_updates_checkpoints(api: Api, job: str) -> None:
    """A job that saves at every step deletes what it has just told, and the hook's iteration is known without its manifest."""
    steps = range(1, 6)
    told = [(hook_message(step), checkpoint_message(step, parent=step - 1)) for step in steps]
    gone = [message("checkpoint_deleted", step=step, attempt=1) for step in steps[:3]]
    api.report(job, (0, 1, [*(m for pair in told for m in pair), *gone]))
    api.report(job, (0, 14, [message("checkpoint_deleted", step=4, attempt=1), checkpoint_message(6, parent=5)]))
    every = {"state": ["committed", "deleted"]}
    stored = api.client.get(f"/v1/jobs/{job}/checkpoints", params=every).json()["items"]
    assert [(c["step"], c["state"], c["hook_iteration"]) for c in stored] == [
        (6, "committed", None),
        (5, "committed", 5),
        *((step, "deleted", step) for step in (4, 3, 2, 1)),
    ]
    events = api.client.get(f"/v1/jobs/{job}/events").json()["items"]
    assert [e["data"]["step"] for e in events if e["type"] == "checkpoint"] == [1, 2, 3, 4, 5, 6]
    assert api.job(job)["last_checkpoint"] == "step-000000000006.a0001"


def test_checkpoint_states_follow_the_workers_reports(api: Api, job: str) -> None:
    api.report(
        job, (0, 1, [checkpoint_message(5), checkpoint_message(10, parent=5), checkpoint_message(15, parent=10)])
    )
    api.report(
        job,
        (0, 4, [
            message("checkpoint_deleted", step=5, attempt=1),
            message("quarantined", step=15, attempt=1, error="bit flip"),
            message("checkpoint_failed", step=20, error="disk full"),
            checkpoint_message(10, parent=5, finished=True),
        ]),
    )  # fmt: skip
    stored = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert [(c["step"], c["state"], c["finished"]) for c in stored] == [
        (15, "quarantined", False),
        (10, "committed", True),
    ]
    gone = api.client.get(f"/v1/jobs/{job}/checkpoints", params={"state": "deleted"}).json()["items"]
    assert [c["step"] for c in gone] == [5]
    assert {"checkpoint-quarantined", "checkpoint-failed"} <= set(event_types(api, job))
    events = api.client.get(f"/v1/jobs/{job}/events").json()["items"]
    told = {event["message"] for event in events if event["type"] == "checkpoint" and event["data"]["step"] == 10}
    name = "checkpoint step-000000000010.a0001"
    assert told == {f"{name} committed (schedule)", f"{name} is the job's last"}


def test_progress_is_never_before_the_last_checkpoint(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), message("progress", step=9), checkpoint_message(12)]))
    found = api.job(job)
    assert found["progress"]["step"] == 12 and found["progress"]["steps_at_risk"] == 0


def test_training_report_of_the_next_attempt_resets_progress_to_its_base(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), checkpoint_message(5), message("progress", step=9)]))
    assert api.job(job)["progress"]["steps_at_risk"] == 4
    api.attempt(job, number=2)
    api.report(job, (0, 1, [training_message(5, 1)]), number=2)
    assert api.job(job)["progress"]["step"] == 5
    assert api.job(job)["progress"]["steps_at_risk"] == 0
    assert api.job(job)["last_checkpoint"] == "step-000000000005.a0001"


def test_reported_result_is_stored_and_leaves_phases_to_the_reconciler(api: Api, job: str) -> None:
    wakes = api.submission.wakes
    result = {
        "job_id": job, "attempt": 1, "cause": "exception", "rank": 1, "exit_code": 1, "message": "boom", "last_step": 12,
        "started_at": "2030-01-01T00:00:00Z", "ended_at": "2030-01-01T00:01:00Z", "ranks": [],
    }  # fmt: skip
    for _ in range(2):
        last = (0, 1, [checkpoint_message(10), checkpoint_message(12)])
        assert api.report(job, last, phase="ENDED", result=result, last_step=12).status_code == 200
    assert api.submission.wakes > wakes
    assert event_types(api, job)[-3:] == ["checkpoint", "checkpoint", "result"]
    with api.database.read() as session:
        attempt = session.get_one(Attempt, (job, 1))
        assert attempt.phase is AttemptPhase.RUNNING
        assert attempt.results["0"]["cause"] == "exception"
        assert attempt.last_step == 12
    assert api.job(job)["phase"] == "STARTING"
    assert event_types(api, job).count("result") == 1


def test_phases_of_an_attempt_only_go_forward(api: Api, job: str) -> None:
    for told, node in (("STOPPING", "STOPPING"), ("LAUNCHING", "STOPPING"), ("ENDED", "ENDED")):
        api.report(job, phase=told)
        attempt = api.client.get(f"/v1/jobs/{job}/attempts/1").json()
        assert attempt["nodes"][0]["phase"] == node
        assert attempt["phase"] == "STOPPING"  # only the reconciler ends an attempt


def test_training_report_of_a_stopping_job_leaves_the_phase_stopping(api: Api, job: str) -> None:
    api.client.post(f"/v1/jobs/{job}/suspend")
    control = api.report(job, (0, 1, [training_message()])).json()["control"]
    assert control["desired"] == "suspend"
    assert api.job(job)["phase"] == "STOPPING"


def test_note_with_large_data_is_stored_without_the_data(api: Api, job: str) -> None:
    """Pages of events are put together in memory, and events stay: a rank is to fill neither."""
    large = {f"key-{i}": "x" * 1000 for i in range(100)}
    small = {"key": "x" * 1000}
    notes = [message("note", type="told", message="m", data=data) for data in (large, small)]
    assert api.report(job, (0, 1, notes)).json()["acked"] == {"0": 2}
    events = api.client.get(f"/v1/jobs/{job}/events").json()["items"]
    first, second = (event["data"]["data"] for event in events if event["type"] == "note.told")
    assert first == {"left_out": len(json.dumps(large))} and second == small


STRANGE: list[dict[str, Any]] = [
    message("note", type="a\0b", message="nul \0", data={"k\0": ["\ud800", {"\udfff": 1e999}, 10**40]}),
    message("note", type="deep", message="x", data={"x": json.loads("[" * 700 + "]" * 700)}),
    message("metrics", step=1, values={"lo\0ss": 1.0, "x" * 500: 2.0, "nan": "NaN", "inf": "Infinity"}),
    message("metrics", step=-5, values={"loss": 1.0}),
    message("progress", step=2**70),
    message("progress", step=1) | {"at": "not a time"},
    message("progress", step=2) | {"at": "9999-12-31T23:59:59.999999-23:59"},
    message("metrics", step=2, values={"early": 1.0}) | {"at": "0001-01-01T00:00:00+14:00"},
    message("metrics", step=2, values={"late": 1.0}) | {"at": "9999-12-31T23:59:59.999999-23:59"},
    checkpoint_message(2) | {"at": "9999-12-31T23:59:59.999999-23:59"},
    hook_message(3, compression_rate="NaN", residual_norm="Infinity", name="a\0"),
    hook_message(2**70),
    message("started", pid=1, host="h\0", device="\0", torch=""),
    message("quarantined", step=1, attempt=99, error="\0"),
    message("checkpoint_deleted", step=1, attempt=2**80),
    checkpoint_message(3, digest="\0" * 200, seconds="NaN"),
    checkpoint_message(4, size=2**70),
    training_message() | {"base": {"step": 2**80}},
    message("resumed", report={
        "verdict": "not-exact", "base": BASE, "world_size": 2, "notes": ["\0"],
        "differences": [{"key": "x", "recorded": "NaN", "current": None}],
    }),
]  # fmt: skip


def test_malformed_spool_messages_are_dropped_and_do_not_block_ingest(api: Api, job: str) -> None:
    """As the reconciler hands them in, past the checks of the door."""
    for number, line in enumerate(STRANGE, 1):
        batch = RankBatch.model_validate({"rank": 0, "from_seq": number, "messages": [line]})
        with api.database.write() as session:
            node = session.get_one(AttemptNode, (job, 1, 0))
            stored = ingest_batches(session, lock_job(session, job), session.get_one(Attempt, (job, 1)), node, [batch])
        assert stored == 1, line
    for part in ("", "/events", "/attempts", "/attempts/1", "/metrics", "/hook", "/hook/history", "/checkpoints"):
        assert api.client.get(f"/v1/jobs/{job}{part}").status_code == 200, part
    assert event_types(api, job).count("message-dropped") == 6
    series = {s["name"][:10]: s["points"] for s in api.client.get(f"/v1/jobs/{job}/metrics").json()["series"]}
    assert [p["value"] for p in series["nan"]] == ["NaN"]
    assert [p["value"] for p in series["inf"]] == ["Infinity"]
    assert api.client.get(f"/v1/jobs/{job}/hook").json()["compression_rate"] == "NaN"


def test_malformed_messages_over_http_are_acknowledged(api: Api, job: str) -> None:
    """JSON may carry all of it, except halves of surrogate pairs, which no message model takes."""
    sent = [line for line in STRANGE if "ud800" not in json.dumps(line)]
    answer = api.report(job, (0, 1, sent))
    assert (answer.status_code, answer.json()["acked"]) == (200, {"0": len(sent)})


def test_steps_per_second_is_the_newest_value_of_the_training_attempt(api: Api, job: str) -> None:
    def rate() -> float | None:
        value: float | None = api.job(job)["progress"]["steps_per_second"]
        return value

    def progress(step: int, **fields: Any) -> dict[str, Any]:
        return message("progress", step=step, **fields)

    api.report(job, (0, 1, [training_message(), progress(1), progress(9, steps_per_second=16.5)]))
    assert rate() == 16.5
    api.report(job, (0, 4, [progress(9)]))  # no step done since: still the newest
    api.report(job, (0, 5, [progress(9, steps_per_second=value) for value in ("NaN", "Infinity", -1.0)]))
    assert rate() == 16.5
    api.attempt(job, number=2)
    api.report(job, (0, 1, [training_message(4, 1)]), number=2)
    assert rate() is None, "the first attempt's speed is not the second one's"
    api.report(job, (0, 2, [progress(6, steps_per_second=3.0)]), number=2)
    assert rate() == 3.0
    api.client.post(f"/v1/jobs/{job}/cancel")
    assert rate() is None


def test_late_report_of_an_older_attempt_does_not_change_the_job(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), message("progress", step=4)]))
    api.attempt(job, number=2)
    later = [training_message(4, 1), message("progress", step=4), message("metrics", step=9, values={"loss": 2.0})]
    api.report(job, (0, 1, [*later, hook_message(9, residual_norm=2.0)]), number=2)
    lines = [
        hook_message(9),
        message("progress", step=9),
        checkpoint_message(9),
        message("metrics", step=9, values={"loss": 1.0}),
    ]
    batch = RankBatch.model_validate({"rank": 0, "from_seq": 3, "messages": lines})
    with api.database.write() as session:
        node = session.get_one(AttemptNode, (job, 1, 0))
        ingest_batches(session, lock_job(session, job), session.get_one(Attempt, (job, 1)), node, [batch])
    assert api.job(job)["progress"]["step"] == 4
    assert api.job(job)["last_checkpoint"] == "step-000000000004.a0001"
    assert api.client.get(f"/v1/jobs/{job}/attempts/1").json()["last_step"] == 9
    (loss,) = api.client.get(f"/v1/jobs/{job}/metrics").json()["series"]
    assert [(p["step"], p["attempt"], p["value"]) for p in loss["points"]] == [(9, 2, 2.0)]
    assert api.client.get(f"/v1/jobs/{job}/hook").json()["residual_norm"] == {"0": 2.0}


def test_hook_history_is_thinned_and_keeps_its_first_and_last_samples(api: Api, job: str) -> None:
    api.report(job, *((rank, 1, [hook_message(s, rank) for s in range(1, 101)]) for rank in (0, 1)))
    with api.database.write() as session:
        thin_samples(session, job, 0, limit=60)
    with api.database.read() as session:
        query = sa.select(HookSample.step).where(HookSample.job_id == job, HookSample.rank == 0)
        steps = list(session.scalars(query.order_by(HookSample.step)))
    assert len(steps) == 50
    assert steps[-1] == 100
    assert steps[0] <= 2
    assert len(api.client.get(f"/v1/jobs/{job}/hook/history", params={"rank": 1}).json()["items"]) == 100


def test_training_report_does_not_revive_a_cancelled_job(api: Api, job: str) -> None:
    """Training told after the job was ended by the reconciler must not bring it back."""
    api.set_phase(job, JobPhase.CANCELLED)
    assert api.report(job, (0, 1, [training_message()])).status_code == 200
    assert api.job(job)["phase"] == "CANCELLED"
