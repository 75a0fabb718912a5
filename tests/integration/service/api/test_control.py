"""Agents that wait for a changed request to their job."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ratchet_contract.phases import AttemptPhase, JobPhase
from ratchet_service.db.models import Job
from tests.support.api import TOKEN, Api

LONG = 60
"""Longer than the client waits for an answer."""


def wait(api: Api, job_id: str, seconds: float = LONG, *, number: int = 1, token: str = TOKEN, **known: Any) -> Any:
    """The answer to an agent that waits at most ``seconds``; ``known``: what it knows, by default that it goes on."""
    params = {"desired": "run", "checkpoint_request": 0, "wait": seconds} | known
    headers = {"Authorization": f"Bearer {token}"}
    return api.client.get(f"/v1/jobs/{job_id}/attempts/{number}/control", params=params, headers=headers)


def training(api: Api) -> str:
    """A job whose first attempt trains."""
    job_id = api.submit()
    api.attempt(job_id)
    api.set_phase(job_id, JobPhase.RUNNING)
    return job_id


@pytest.mark.parametrize("action", ["suspend", "cancel", "preempt", "checkpoint"])
def test_waiting_agent_learns_of_a_request_at_once(api: Api, action: str) -> None:
    job_id = training(api)
    answers: list[Any] = []
    agent = threading.Thread(target=lambda: answers.append(wait(api, job_id)))
    agent.start()
    assert wait(api, job_id, 0.5).json() == {"changed": False}
    assert agent.is_alive()
    assert api.client.post(f"/v1/jobs/{job_id}/{action}").status_code < 300
    agent.join(25)
    assert [answer.json() for answer in answers] == [{"changed": True}]
    control = api.report(job_id).json()["control"]
    known = {"desired": control["desired"], "checkpoint_request": control["checkpoint_request"]}
    assert wait(api, job_id, 0.5, **known).json() == {"changed": False}, "what it knows by now is no news"


def test_attempt_that_is_over_does_not_wait(api: Api) -> None:
    job_id = training(api)
    api.attempt(job_id, 2)
    assert wait(api, job_id).json() == {"changed": True}
    assert wait(api, job_id, 0.5, number=2).json() == {"changed": False}
    with api.database.write() as session:
        session.get_one(Job, job_id).phase = JobPhase.SUSPENDED
    assert wait(api, job_id, number=2).json() == {"changed": True}


def test_only_the_attempt_itself_may_wait(api: Api) -> None:
    job_id = training(api)
    api.attempt(job_id, 2, AttemptPhase.RUNNING, report_token_hash="0" * 64)
    for answer in (wait(api, job_id, token="another"), wait(api, job_id, number=2), wait(api, job_id, number=3)):
        assert answer.status_code in (401, 403, 404), answer.text


def test_times_beyond_a_minute_are_refused(api: Api) -> None:
    for seconds in (61, -1):
        assert wait(api, training(api), seconds).status_code == 422
