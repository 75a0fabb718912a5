"""Every action in every phase over HTTP: the answer is what the transition table says, and the row follows."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import sqlalchemy as sa

from ratchet_contract.errors import Conflict
from ratchet_contract.phases import Cause, Desired, Event, JobPhase, next_step
from ratchet_service.db import models
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import apply
from tests.support.api import Api

ACTIONS = (Event.SUSPEND, Event.RESUME, Event.CANCEL, Event.PREEMPT, Event.CHECKPOINT)
STATES = [(phase, Desired.RUN) for phase in JobPhase if phase is not JobPhase.STOPPING] + [
    (JobPhase.STOPPING, wish) for wish in (Desired.SUSPEND, Desired.CANCEL, Desired.PREEMPT)
]


@pytest.mark.parametrize(("phase", "desired"), STATES, ids=[f"{p.value}-{d.value}" for p, d in STATES])
def test_job_actions_in_every_phase_follow_the_transition_table(api: Api, phase: JobPhase, desired: Desired) -> None:
    for action in ACTIONS:
        job_id = api.submit()
        api.set_phase(job_id, phase, desired, preemptions=2, failures=1, attempts_without_progress=1)
        cell = next_step(phase, action, desired)
        answer = api.client.post(f"/v1/jobs/{job_id}/{action.value}")
        job = api.job(job_id)
        if cell.phase is None:
            assert (answer.status_code, answer.json()["code"]) == (409, cell.code), action
            assert (job["phase"], job["desired"]) == (phase.value, desired.value), action
            continue
        assert answer.status_code in (200, 202), (action, answer.text)
        wish = desired if cell.desired is None else cell.desired
        assert (job["phase"], job["desired"]) == (cell.phase.value, wish.value), action
        assert answer.json() == job, action
        budgets = job["budgets"]
        spent = (budgets["preemptions"], budgets["failures"], budgets["attempts_without_progress"])
        assert spent == ((0, 0, 0) if cell.reset_budgets else (2, 1, 1)), action
        under_way = wish is not Desired.RUN or action is Event.CHECKPOINT
        assert answer.status_code == (202 if under_way else 200), action


@pytest.mark.parametrize("phase", list(JobPhase))
def test_patch_fork_and_delete_in_every_phase_follow_the_transition_table(api: Api, phase: JobPhase) -> None:
    job_id = api.submit()
    api.set_phase(job_id, phase)
    assert api.client.patch(f"/v1/jobs/{job_id}", json={"priority": 3}).status_code == 200
    fork = api.client.post(f"/v1/jobs/{job_id}/fork")  # allowed everywhere, but there is nothing to fork from
    assert (fork.status_code, fork.json()["code"]) == (404, "checkpoint-not-found")
    cell = next_step(phase, Event.DELETE)
    answer = api.client.delete(f"/v1/jobs/{job_id}")
    if cell.phase is None:
        assert (answer.status_code, answer.json()["code"]) == (409, cell.code)
    else:
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("action", "cause"), [("suspend", "api-suspend"), ("cancel", "api-cancel"), ("preempt", "api-preempt")]
)
def test_desired_state_is_sent_to_the_agent_with_its_cause(api: Api, action: str, cause: str) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    assert api.report(job_id).json()["control"] == {"desired": "run", "checkpoint_request": 0}
    assert api.client.post(f"/v1/jobs/{job_id}/checkpoint").status_code == 202
    assert api.client.post(f"/v1/jobs/{job_id}/{action}").status_code == 202
    control = api.report(job_id).json()["control"]
    assert control == {"desired": action, "cause": cause, "checkpoint_request": 1}


def test_repeated_suspend_writes_one_event(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    first = api.client.post(f"/v1/jobs/{job_id}/suspend")
    again = api.client.post(f"/v1/jobs/{job_id}/suspend")
    assert first.json() == again.json()
    assert first.headers["etag"] == again.headers["etag"]
    types = [e["type"] for e in api.client.get(f"/v1/jobs/{job_id}/events").json()["items"]]
    assert types.count("suspend") == 1


def test_checkpoint_requests_are_counted_and_keep_the_jobs_reason(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    api.set_phase(job_id, JobPhase.RUNNING, reason="why", message="words")
    for _ in range(3):
        assert api.client.post(f"/v1/jobs/{job_id}/checkpoint").status_code == 202
    assert api.report(job_id).json()["control"]["checkpoint_request"] == 3
    assert (api.job(job_id)["reason"], api.job(job_id)["message"]) == ("why", "words")


def test_transition_of_a_stale_attempt_is_refused(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id, number=2)
    with pytest.raises(Conflict) as caught, api.database.write() as session:
        apply(session, job_id, Event.TRAINING, expected_attempt=1)
    assert caught.value.code == "stale-attempt"
    assert api.job(job_id)["phase"] == "STARTING"


def test_transition_from_an_outdated_phase_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a caller that saw an old row cannot write: the UPDATE itself names the phase."""
    job_id = api.submit()
    with api.database.read() as session:
        seen = session.get_one(Job, job_id)
    api.set_phase(job_id, JobPhase.CANCELLED)
    monkeypatch.setattr("ratchet_service.db.transitions.lock_job", lambda *_: seen)
    with pytest.raises(Conflict) as caught, api.database.write() as session:
        apply(session, job_id, Event.LAUNCH)
    assert caught.value.code == "changed-meanwhile"
    assert api.job(job_id)["phase"] == "CANCELLED"


def test_transition_and_its_event_are_committed_atomically(api: Api) -> None:
    job_id = api.submit()
    with pytest.raises(RuntimeError), api.database.write() as session:
        apply(session, job_id, Event.LAUNCH)
        session.flush()
        raise RuntimeError
    assert api.job(job_id)["phase"] == "QUEUED"
    with api.database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(models.Event)) == 1


def test_preemption_cause_other_than_api_reaches_the_agent(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    with api.database.write() as session:
        apply(session, job_id, Event.PREEMPT, cause=Cause.HIGHER_PRIORITY)
    assert api.report(job_id).json()["control"]["cause"] == "higher-priority"


def test_concurrent_job_actions_leave_a_consistent_event_history(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    start = threading.Barrier(8)
    answers = []

    def act(action: str) -> None:
        start.wait(10)
        answers.append(api.client.post(f"/v1/jobs/{job_id}/{action}").status_code)

    threads = [threading.Thread(target=act, args=(a,)) for a in ("suspend", "cancel", "preempt", "resume") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(answers) <= {200, 202, 409}
    assert api.job(job_id)["desired"] == "cancel"
    events = api.client.get(f"/v1/jobs/{job_id}/events").json()["items"][1:]
    for before, after in pairwise(events):
        assert before["data"]["to"] == after["data"]["from"]
