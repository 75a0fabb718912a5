"""What ranks tell of steps that they did again, as the service keeps and shows it."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet_service.observability.metrics import Instruments
from tests.integration.service.observability.test_metrics import samples
from tests.support.api import Api, message, training_message

pytestmark = pytest.mark.takes_turns

REPORT = {"verdict": "exact", "base": {"step": 10, "attempt": 1, "digest": "d10"}, "world_size": 2}


def redone(compared: int, equal: int, difference: tuple[int, str] | None = None, **fields: Any) -> dict[str, Any]:
    first = None if difference is None else {"step": difference[0], "rank": 0, "part": difference[1]}
    facts = {"world_size": 2, "steps": 37, "compared": compared, "equal": equal, "first_difference": first}
    return message("redone", **(facts | fields))


class Told:
    """The second attempt of a job, as its two ranks tell of it."""

    def __init__(self, api: Api) -> None:
        self.api, self.job, self.numbers = api, api.submit(), {0: 0, 1: 0}
        api.attempt(self.job, 1)
        api.attempt(self.job, 2)
        self.say(0, training_message(10, 1), message("resumed", report=REPORT))

    def say(self, rank: int, *messages: dict[str, Any]) -> None:
        answer = self.api.report(self.job, (rank, self.numbers[rank] + 1, list(messages)), number=2)
        assert answer.status_code == 200, answer.text
        self.numbers[rank] += len(messages)

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.client.get(f"/v1/jobs/{self.job}/attempts/2").json()
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        items = self.api.client.get(f"/v1/jobs/{self.job}/events?limit=100").json()["items"]
        return [event for event in items if event["type"] == kind]


@pytest.fixture
def told(api: Api) -> Told:
    return Told(api)


def test_redone_step_counts_as_compared_once_every_rank_compared_the_step(told: Told) -> None:
    nothing = {"steps": 0, "compared": 0, "equal": 0, "first_difference": None, "reason": None}
    assert (told.shown()["redone"], told.shown()["proof"]) == (nothing, "exact, no step compared")
    told.say(0, redone(37, 37))
    assert told.shown()["redone"] == nothing | {"steps": 37}
    assert told.shown()["proof"] == "exact, no step compared"
    told.say(1, redone(12, 12))
    assert told.shown()["proof"] == "exact, proved (12 of 37 redone steps)"
    told.say(1, redone(37, 37))
    assert told.shown()["redone"] == nothing | {"steps": 37, "compared": 37, "equal": 37}
    assert told.shown()["proof"] == "exact, proved (37 of 37 redone steps)"
    assert told.events("replay-difference") == []


def test_first_replay_difference_is_one_event_and_sets_verdict_not_exact(told: Told) -> None:
    instruments = Instruments()
    with instruments.count_commits(told.api.database):
        told.say(1, redone(9, 8, (19, "parameters")))
        told.say(0, redone(9, 8, (19, "generators")))
        told.say(1, redone(37, 8, (19, "parameters")))
        told.say(0, redone(37, 8, (19, "generators")))
    assert told.shown()["redone"]["first_difference"] == {"step": 19, "rank": 0, "part": "generators"}
    assert (told.shown()["redone"]["compared"], told.shown()["redone"]["equal"]) == (37, 8)
    (event,) = told.events("replay-difference")
    assert event["message"] == "step 19, done again, differs from its first execution (parameters of rank 1)"
    shown = told.shown()
    assert shown["proof"] == "not-exact (step 19, done again, differs from its first execution (generators of rank 0))"
    assert shown["resume_report"]["verdict"] == "not-exact" and "step 19" in shown["resume_report"]["notes"][-1]
    counted = samples(instruments.render(told.api.database).decode())
    assert counted["ratchet_replay_differences_total"] == 1


def test_redone_report_without_compared_steps_is_no_proof(told: Told) -> None:
    for rank in (0, 1):
        told.say(rank, redone(0, 0, reason="attempt 1 ran under other facts: hook (allreduce -> powerSGD)"))
    assert told.shown()["proof"] == "exact, no step compared"
    assert told.shown()["redone"]["reason"].startswith("attempt 1 ran under other facts")


def test_redone_report_with_too_large_numbers_is_dropped(told: Told) -> None:
    told.say(0, redone(2**64, 1))
    assert told.shown()["redone"]["steps"] == 0 and len(told.events("message-dropped")) == 1


class Logged(Told):
    """Both attempts log a loss, which is the same, and seconds, which never are."""

    def __init__(self, api: Api) -> None:
        self.api, self.job, self.numbers = api, api.submit(), {0: 0, 1: 0}
        api.attempt(self.job, 1)
        lines = [training_message(0), *(self.metrics(step, 1) for step in range(1, 21))]
        assert api.report(self.job, (0, 1, lines), number=1).status_code == 200
        api.attempt(self.job, 2)
        self.say(0, training_message(10, 1), message("resumed", report=REPORT))

    def metrics(self, step: int, attempt: int) -> dict[str, Any]:
        values: dict[str, Any] = {"loss": 1 / step, "seconds": step + attempt / 10, "gap": "NaN"}
        return message("metrics", step=step, values=values)

    def series(self, name: str) -> dict[str, Any]:
        (found,) = self.api.client.get(f"/v1/jobs/{self.job}/metrics?name={name}").json()["series"]
        return dict(found)


def test_metric_differing_in_equal_redone_steps_is_listed_with_old_values(api: Api) -> None:
    told = Logged(api)
    told.say(0, *(told.metrics(step, 2) for step in range(11, 21)))
    assert told.shown()["metrics_differ"] == []  # no fingerprints: nothing says that the steps are equal
    for rank in (0, 1):
        told.say(rank, redone(10, 10, steps=10))
    assert told.shown()["metrics_differ"] == ["seconds"]
    assert told.shown()["proof"] == "exact, proved (10 of 10 redone steps)"
    kept = told.series("seconds")
    assert [(p["step"], p["attempt"], p["value"]) for p in kept["superseded"]] == [
        (s, 1, s + 0.1) for s in range(11, 21)
    ]
    assert [p["attempt"] for p in kept["points"]] == [1] * 10 + [2] * 10
    assert told.series("loss")["superseded"] == []


def test_metrics_after_the_first_replay_difference_are_not_listed(api: Api) -> None:
    told = Logged(api)
    told.say(0, *(told.metrics(step, 2) for step in range(15, 21)))
    for rank in (0, 1):
        told.say(rank, redone(10, 2, (13, "parameters"), steps=10))
    assert told.shown()["metrics_differ"] == []


def test_superseded_metric_values_are_kept_up_to_a_bound(api: Api) -> None:
    told = Logged(api)
    for attempt in (3, 4, 5):
        api.attempt(told.job, attempt)
        lines = [training_message(0), *(told.metrics(step, attempt) for step in range(1, 901))]
        answer = api.report(told.job, *[(0, n + 1, lines[n : n + 500]) for n in (0, 500)], number=attempt)
        assert answer.status_code == 200, answer.text
    assert len(told.series("seconds")["superseded"]) == 1000
