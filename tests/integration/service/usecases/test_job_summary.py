"""The summaries in a list of jobs: right for each job, at a number of statements that does not grow with the jobs."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from ratchet_contract.phases import AttemptPhase, Cause, Outcome
from ratchet_service.db.engine import utc_now
from ratchet_service.db.models import Metric, MetricSeries
from tests.integration.service.agent_reports.test_ingest import hook_message
from tests.support.api import Api, checkpoint_message, message, training_message
from tests.support.statements import recorded_queries


def summaries(api: Api) -> dict[str, Any]:
    answer = api.client.get("/v1/jobs", params={"include": "summary"})
    assert answer.status_code == 200, answer.text
    return {job["id"]: job["summary"] for job in answer.json()["items"]}


def log(api: Api, job_id: str, name: str, steps: range, value: float = 1.0, attempt: int = 1) -> None:
    with api.database.write() as session:
        session.add(MetricSeries(job_id=job_id, name=name, points=len(steps), newest=steps[-1]))
        facts = {"job_id": job_id, "name": name, "attempt": attempt, "value": value, "at": utc_now()}
        session.add_all(Metric(step=step, **facts) for step in steps)


def test_job_list_has_summaries_only_on_request(api: Api) -> None:
    job = api.submit()
    assert api.client.get("/v1/jobs").json()["items"][0]["summary"] is None
    assert summaries(api)[job] == {
        "metric": None, "attempts": [], "hook": None, "last_checkpoint_at": None, "goodput": 0.0
    }  # fmt: skip
    assert api.client.get("/v1/jobs", params={"include": "everything"}).json()["code"] == "invalid-parameter"


def test_summary_curve_is_loss_or_the_first_metric_in_forty_evenly_spaced_points(api: Api) -> None:
    jobs = [api.submit(name=name) for name in ("with-loss", "without-loss", "short")]
    for name in ("accuracy", "loss", "zeta"):
        log(api, jobs[0], name, range(10, 4001, 10))
    for name in ("lr", "zeta"):
        log(api, jobs[1], name, range(100))
    log(api, jobs[2], "loss", range(5, 20, 5), math.nan)
    found = summaries(api)
    assert [found[job]["metric"]["name"] for job in jobs] == ["loss", "lr", "loss"]
    steps = [[step for step, _ in found[job]["metric"]["points"]] for job in jobs]
    assert (len(steps[0]), steps[0][0], steps[0][-1]) == (40, 10, 4000) and (len(steps[1]), steps[1][-1]) == (40, 99)
    gaps = {b - a for a, b in zip(steps[0], steps[0][1:], strict=False)}
    assert gaps <= {100, 110}
    assert found[jobs[2]]["metric"]["points"] == [[5, "NaN"], [10, "NaN"], [15, "NaN"]]


def test_summary_curve_of_steps_that_are_far_apart_has_first_and_last(api: Api) -> None:
    job = api.submit()
    log(api, job, "loss", range(0, 2**62 + 1, 2**62))
    points = summaries(api)[job]["metric"]["points"]
    assert [step for step, _ in points] == [0, 2**62]


def test_summary_curve_leaves_out_an_abandoned_branch(api: Api) -> None:
    job = api.submit()
    api.attempt(job)
    log(api, job, "loss", range(1, 201))
    api.attempt(job, 2, base_step=50)
    points = summaries(api)[job]["metric"]["points"]
    assert (points[0], points[-1], len(points)) == ([1, 1.0], [50, 1.0], 40)


def test_summary_has_newest_attempts_with_their_proof(api: Api) -> None:
    job = api.submit()
    report = {"verdict": "exact", "base": {"step": 5, "attempt": 1, "digest": "d"}, "world_size": 1}
    redone = {"world_size": 1, "steps": 3, "reason": None, "ranks": {"0": [3, 3]}, "first_difference": None}
    for number in range(1, 25):
        ended = {"outcome": Outcome.FAILED, "cause": Cause.OOM, "resume_report": report, "redone": redone}
        api.attempt(job, number, AttemptPhase.ENDED, **(ended if number < 24 else {}))
    found = summaries(api)[job]["attempts"]
    assert [one["number"] for one in found] == list(range(5, 25))
    assert found[-1] == {"number": 24, "outcome": None, "cause": None, "proof": None}
    assert found[0] | {"number": 5} == {
        "number": 5, "outcome": "failed", "cause": "oom", "proof": "exact, proved (3 of 3 redone steps)"
    }  # fmt: skip
    one = api.client.get(f"/v1/jobs/{job}/attempts/5").json()
    assert {key: one[key] for key in found[0]} == found[0]


def test_summary_has_live_hook_figures_checkpoint_time_and_goodput(api: Api) -> None:
    job = api.submit()
    api.attempt(job, begun_at=utc_now() - timedelta(seconds=50), created_at=utc_now() - timedelta(seconds=100))
    messages = [training_message(), hook_message(step=10, iteration=10, phase="warm-up")]
    api.report(
        job, (0, 1, [*messages, hook_message(step=20, iteration=20, phase="compressing"), checkpoint_message(20)])
    )
    found = summaries(api)[job]
    hook = api.client.get(f"/v1/jobs/{job}/hook").json()
    assert found["hook"] == {key: hook[key] for key in ("phase", "compression_rate", "iteration")}
    assert found["hook"]["iteration"] == 20
    (checkpoint,) = api.client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert found["last_checkpoint_at"] == checkpoint["created_at"]
    assert abs(found["goodput"] - api.client.get(f"/v1/jobs/{job}").json()["goodput"]["goodput"]) < 0.05
    api.attempt(job, 2)
    assert summaries(api)[job]["hook"] is None, "of the attempt before"


def test_statements_of_a_job_list_with_summaries_do_not_grow_with_the_jobs(api: Api) -> None:
    def fill(number: int) -> int:
        for _ in range(number):
            job = api.submit()
            api.attempt(job)
            api.report(job, (0, 1, [training_message(), message("metrics", step=1, values={"loss": 1.0, "lr": 1.0})]))
        with recorded_queries(api.database) as seen:
            assert all(found["metric"] for found in summaries(api).values())
        return len(seen)

    assert fill(1) == fill(20)


def test_search_finds_jobs_by_the_beginning_of_name_or_id(api: Api) -> None:
    jobs = {
        name: api.submit(name=name, labels={"team": "a"}) for name in ("vision-a", "vision-b", "visual", "job-like")
    }

    def found(search: str, **query: Any) -> set[str]:
        answer = api.client.get("/v1/jobs", params={"search": search, **query})
        assert answer.status_code == 200, answer.text
        return {job["name"] for job in answer.json()["items"]}

    assert found("vis") == {"vision-a", "vision-b", "visual"} and found("vision-") == {"vision-a", "vision-b"}
    assert found("ision") == found("VIS") == found("vi_") == found("vi%") == set()
    assert found(jobs["visual"]) == found(jobs["visual"][:14]) == {"visual"}
    assert found("job-") == set(jobs) and found("job-l") >= {"job-like"}
    assert found("vision", name="vision-b") == {"vision-b"} and found("vision", label="team=b") == set()
