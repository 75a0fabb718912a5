"""Jobs by name in the Python client, and the handle of one job, against a scripted server."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ratchet_client import RatchetClient
from ratchet_client.http.errors import AmbiguousName, RatchetError
from ratchet_client.resources.client import Job
from ratchet_contract.api.requests import ForkRequest, PatchRequest
from ratchet_contract.api.views import JobView
from ratchet_contract.errors import FieldProblem, NotFound, SpecError
from tests.support.scripted_server import JOB, Reply, ok, problem, serving

ID, OTHER = "job-000000000001", "job-000000000002"
ENDED = {**JOB, "name": "ended", "phase": "FAILED"}
JOBS = [{**JOB, "id": ID, "name": "digits"}, {**JOB, "id": OTHER, "name": "twice"},
        {**JOB, "id": "job-000000000003", "name": "twice"}, {**ENDED, "id": "job-000000000005"},
        {**ENDED, "id": "job-000000000004"}, {**ENDED, "id": "job-000000000006", "name": "digits"}]  # fmt: skip
ARGUMENTS = {
    "checkpoint_id": "c", "number": 1, "request": {"fork": ForkRequest(), "patch": PatchRequest()}, "path": "a",
    "with_job": "digits", "target": Path("out"), "file": Path("out"),
}  # fmt: skip


def listed(request: BaseHTTPRequestHandler, _: int) -> Reply:
    url = urlsplit(request.path)
    if url.path == "/v1/jobs":
        name = parse_qs(url.query).get("name", [None])[0]
        return ok({"items": [job for job in JOBS if name in (None, job["name"])]})
    return problem(404, "seen")


TAKE_A_JOB = [
    method
    for name, method in inspect.getmembers(RatchetClient, inspect.isfunction)
    if not name.startswith("_") and name != "job_id" and "job" in inspect.signature(method).parameters
]


@pytest.mark.parametrize("method", TAKE_A_JOB, ids=lambda method: str(method.__name__))
def test_client_methods_accept_job_name_in_place_of_id(
    method: Callable[..., Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    required = [
        p
        for p in inspect.signature(method).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    needed = [p.name for p in required[2:]]
    given = {name: ARGUMENTS[name] for name in needed}
    if "request" in given:
        given["request"] = ARGUMENTS["request"][method.__name__]
    with serving(listed) as server, RatchetClient(server.url, retry_for=0) as client:
        for named in ("digits", Job(client, JobView.model_validate(JOB | {"id": ID}))):
            with pytest.raises(RatchetError) as caught:
                list(method(client, job=named, **given))  # an iterator asks when it is read
            assert caught.value.code == "seen"
            last = urlsplit(server.requests[-1][1])
            assert ID in last.path + last.query and "digits" not in last.path + last.query


def test_unknown_or_ambiguous_job_name_raises() -> None:
    with serving(listed) as server, RatchetClient(server.url) as client:
        with pytest.raises(AmbiguousName, match=f"2 jobs have the name 'twice'(.|\n)*{OTHER}"):
            client.cancel("twice")
        with pytest.raises(AmbiguousName, match="2 jobs have the name 'ended'"):
            client.view("ended")
        with pytest.raises(NotFound, match="'digitz'; did you mean 'digits'"):
            client.job("digitz")


def test_job_handle_reads_waits_and_acts_on_job() -> None:
    phases = iter(["QUEUED", "RUNNING", "SUCCEEDED", "RUNNING"])

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        if request.command == "GET" and "metrics" in request.path:
            point = {"step": 3, "attempt": 1, "value": 0.5, "at": "2026-01-01T00:00:00Z"}
            return ok({"job_id": ID, "series": [{"name": "loss", "points": [point]}]})
        if "attempts" in request.path:
            items = [{"job_id": ID, "number": n, "phase": "ENDED", "created_at": JOB["created_at"]} for n in (2, 1)]
            return ok({"items": items})
        return ok({**JOB, "phase": next(phases)})

    with serving(script) as server, RatchetClient(server.url) as client:
        job = client.submit({"name": "n", "script": ["train.py"]})
        assert isinstance(job, Job) and (job.id, job.phase) == (ID, "QUEUED")
        assert job.refresh().phase == "RUNNING" and job.view.phase == "RUNNING"
        assert job.wait(deadline=10) is job and job.phase == "SUCCEEDED"
        assert job.metrics("loss")["loss"] == ([3], [0.5])
        assert [attempt.number for attempt in job.attempts()] == [1, 2], "as the command line shows them"
        assert job.resume().phase == "RUNNING"
        assert repr(job) == f"<Job {ID} 'n' RUNNING, step 0, attempt 1>"
    assert server.requests[-1][1] == f"/v1/jobs/{ID}/resume"


def test_spec_error_text_lists_every_mistake() -> None:
    wrong = [FieldProblem(pointer=f"/{key}", code="missing", detail="this key is required") for key in ("name", "task")]
    assert str(SpecError("/name: this key is required", errors=wrong[:1])) == "/name: this key is required"
    said = str(SpecError("/name: this key is required (and 1 more)", errors=wrong))
    assert said == "2 mistakes:\n  /name: this key is required [missing]\n  /task: this key is required [missing]"


def test_job_html_repr_is_a_short_escaped_table() -> None:
    with RatchetClient("http://127.0.0.1:9") as client:
        view = JobView.model_validate(JOB | {"spec": {"task": {"entrypoint": "a:B"}}, "message": "<b>lost</b>"})
        shown = Job(client, view)._repr_html_()
    assert shown.startswith("<table><caption>n</caption>") and 5 < shown.count("<tr>") <= 14
    assert ">RUNNING<" in shown and "&lt;b&gt;lost" in shown and "entrypoint" not in shown and "None" not in shown


def test_resume_refuses_nodes_without_world_and_include_without_code() -> None:
    """Neither has an effect alone: they are not ignored."""
    client = RatchetClient("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="nodes requires world"):
        client.resume("job", nodes=2)
    with pytest.raises(ValueError, match="include requires code"):
        client.resume("job", include=["data"])


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"on_hook_mismatch": "rest"}, "/on_hook_mismatch"),
        ({"world": 0}, "/world/ranks_per_node"),
        ({"world": 2, "nodes": 0}, "/world/nodes"),
        ({"from_step": -1}, "/from_step"),
        ({"hook": ["powerSGD"]}, "/hook"),
    ],
)
def test_resume_with_an_invalid_change_raises_spec_error_that_names_the_field(
    change: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(SpecError, match=f"^{pointer}: ") as caught:
        RatchetClient("http://127.0.0.1:1").resume(ID, **change)
    assert [problem.pointer for problem in caught.value.errors] == [pointer]
