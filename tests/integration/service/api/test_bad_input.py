"""Bad requests: each gets its status and its stable code as problem+json, on both databases; nothing answers 500."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.support.api import TOKEN, Api, message, spec

JSON = {"Content-Type": "application/json"}
YAML = {"Content-Type": "application/yaml"}


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and code, once the shape is checked."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["type"] == f"urn:ratchet:problem:{body['code']}"
    assert body["detail"]
    assert "Traceback" not in answer.text
    for error in body["errors"]:
        assert error["pointer"] == "" or error["pointer"].startswith("/")
    return answer.status_code, body["code"]


def deep(levels: int) -> str:
    return '{"name": "x", "task": {"entrypoint": "a:b", "args": {"x": ' + "[" * levels + "]" * levels + "}}}"


def raw(**changes: str) -> bytes:
    """A spec whose values are given as JSON text."""
    parts = {k: json.dumps(v) for k, v in spec().items()} | changes
    return ("{" + ", ".join(f'"{k}": {v}' for k, v in parts.items()) + "}").encode()


SUBMISSIONS: list[tuple[str, bytes, dict[str, str], int, str, str | None]] = [
    ("empty", b"", JSON, 422, "invalid-spec", None),
    ("no-json", b"{", JSON, 400, "invalid-json", None),
    ("trailing", b"{} {}", JSON, 400, "invalid-json", None),
    ("not-utf8", b'{"name": "\xff"}', JSON, 400, "invalid-json", None),
    ("nan", raw(priority="NaN"), JSON, 400, "invalid-json", None),
    ("list", b"[]", JSON, 422, "invalid-spec", None),
    ("null", b"null", JSON, 422, "invalid-spec", None),
    ("text", b'"x"', JSON, 422, "invalid-spec", None),
    ("no-type", raw(), {}, 415, "unsupported-media-type", None),
    ("form", b"name=x", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported-media-type", None),
    ("odd-type", raw(), {"Content-Type": ";;;"}, 415, "unsupported-media-type", None),
    ("too-deep", deep(100).encode(), JSON, 422, "invalid-value", None),
    ("far-too-deep", deep(100_000).encode(), JSON, 400, "invalid-json", None),
    ("too-large", b'{"name": "' + b"x" * (1 << 20) + b'"}', JSON, 413, "body-too-large", None),
    ("huge-int", raw(seed="9" * 30), JSON, 422, "invalid-value", "/seed"),
    ("endless-int", raw(seed="9" * 10_000), JSON, 400, "invalid-json", None),
    ("huge-float", raw(ttl="1e999"), JSON, 422, "invalid-value", "/ttl"),
    ("nul-name", raw(name='"a\\u0000b"'), JSON, 422, "invalid-value", "/name"),
    ("nul-arg", raw(task='{"entrypoint": "a:b", "args": {"x": ["a\\u0000"]}}'), JSON, 422, "invalid-value", "/task/args/x/0"),
    ("nul-key", raw(labels='{"a\\u0000b": "c"}'), JSON, 422, "invalid-value", "/labels"),
    ("surrogate", raw(labels='{"a": "\\ud800"}'), JSON, 422, "invalid-value", "/labels/a"),
    ("surrogate-key", raw(labels='{"\\udfff": "a"}'), JSON, 422, "invalid-value", "/labels"),
    ("unknown-key", raw(wrold="{}"), JSON, 422, "invalid-spec", "/wrold"),
    ("unknown-hook", raw(hook='"powerSDG"'), JSON, 422, "invalid-spec", "/hook/name"),
    ("unknown-wrapper", raw(hook='{"name": "allreduce", "wrapper": "fp8"}'), JSON, 422, "invalid-spec", "/hook/wrapper"),
    ("hook-rule", raw(hook='{"name": "powerSGD", "start_powerSGD_iter": 1}'), JSON, 422, "invalid-spec", "/hook"),
    ("memory-uri", raw(checkpoint='{"uri": "memory://b"}'), JSON, 422, "invalid-spec", "/checkpoint/uri"),
    ("bad-name", raw(name='"A B"'), JSON, 422, "invalid-spec", "/name"),
    ("bad-label", raw(labels='{"-": "x"}'), JSON, 422, "invalid-spec", "/labels/-"),
    ("reserved-env", raw(env='{"RANK": "1"}'), JSON, 422, "invalid-spec", "/env/RANK"),
    ("yaml-syntax", b"name: [", YAML, 400, "invalid-yaml", None),
    ("yaml-tag", b"name: !!python/object/apply:os.system [id]", YAML, 400, "invalid-yaml", None),
    ("yaml-date", b"name: 2024-01-01", YAML, 422, "invalid-value", "/name"),
    ("yaml-no-date", b"name: 2024-13-45", YAML, 400, "invalid-yaml", None),
    ("yaml-nan", b"priority: .nan", YAML, 422, "invalid-value", "/priority"),
    ("yaml-set", b"labels: !!set {a}", YAML, 422, "invalid-value", "/labels"),
    ("yaml-binary", b"name: !!binary aGk=", YAML, 422, "invalid-value", "/name"),
    ("yaml-int-key", b"labels: {1: a}", YAML, 422, "invalid-value", "/labels"),
    ("yaml-list-key", b"? [a]\n: b", YAML, 400, "invalid-yaml", None),
    ("yaml-hex", b"seed: 0x" + b"f" * 20_000, YAML, 422, "invalid-value", "/seed"),
    ("yaml-deep", b"[" * 50_000, YAML, 400, "invalid-yaml", None),
    ("yaml-two", b"a: 1\n---\nb: 2", YAML, 400, "invalid-yaml", None),
    (
        "yaml-bomb",
        b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)),
        YAML, 422, "invalid-value", None,
    ),
    ("yaml-itself", b"a: &a [*a]", YAML, 422, "invalid-value", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "headers", "status", "code", "pointer"),
    [row[1:] for row in SUBMISSIONS],
    ids=[r[0] for r in SUBMISSIONS],
)
def test_submit_of_an_invalid_spec_answers_with_status_code_and_pointer(
    api: Api, content: bytes, headers: dict[str, str], status: int, code: str, pointer: str | None
) -> None:
    answer = api.client.post("/v1/jobs", content=content, headers=headers)
    assert problem(answer) == (status, code)
    if pointer is not None:
        assert answer.json()["errors"][0]["pointer"] == pointer
    assert api.client.get("/v1/jobs").json()["items"] == []


def test_body_with_thousands_of_bad_keys_lists_ten_problems(api: Api) -> None:
    body = "{" + ", ".join(f"{number}: 0" for number in range(5000)) + "}"
    answer = api.client.post("/v1/jobs", content=body, headers={"Content-Type": "application/yaml"})
    assert (answer.status_code, len(answer.json()["errors"])) == (422, 10)


def test_chunked_body_above_the_limit_is_refused(api: Api) -> None:
    answer = api.client.post("/v1/jobs", content=(b" " * 65536 for _ in range(64)), headers=JSON)
    assert problem(answer) == (413, "body-too-large")


def cursor_of(data: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


REQUESTS: list[tuple[str, str, int, str]] = [
    ("GET", "/jobs", 404, "no-such-route"),
    ("GET", "/v1/jobs/", 404, "no-such-route"),
    ("GET", "/v2/jobs", 404, "no-such-route"),
    ("GET", "/%00", 404, "no-such-route"),
    ("PUT", "/v1/jobs", 405, "method-not-allowed"),
    ("GET", "/v1/jobs/{job}/suspend", 405, "method-not-allowed"),
    ("BREW", "/v1/jobs", 405, "method-not-allowed"),
    ("GET", "/v1/jobs/nope", 404, "job-not-found"),
    ("GET", "/v1/jobs/job-000000000000", 404, "job-not-found"),
    ("GET", "/v1/jobs/%00", 404, "job-not-found"),
    ("GET", "/v1/jobs/job-0000%ff000000", 404, "job-not-found"),
    ("GET", "/v1/jobs/" + "x" * 5000, 404, "job-not-found"),
    ("POST", "/v1/jobs/%00/suspend", 404, "job-not-found"),
    ("POST", "/v1/jobs/job-000000000000/cancel", 404, "job-not-found"),
    ("POST", "/v1/jobs/job-000000000000/fork", 404, "job-not-found"),
    ("POST", "/v1/jobs/job-000000000000/checkpoints/step-000000000001.a0001/verify", 404, "job-not-found"),
    ("DELETE", "/v1/jobs/job-000000000000", 404, "job-not-found"),
    ("DELETE", "/v1/jobs/..%2f..", 404, "no-such-route"),
    ("GET", "/v1/jobs/job-000000000000/events", 404, "job-not-found"),
    ("GET", "/v1/jobs/job-000000000000/logs?follow=true", 404, "job-not-found"),
    ("GET", "/v1/jobs/job-000000000000/metrics", 404, "job-not-found"),
    ("GET", "/v1/jobs/{job}/attempts/0", 404, "attempt-not-found"),
    ("GET", "/v1/jobs/{job}/attempts/x", 404, "attempt-not-found"),
    ("GET", "/v1/jobs/{job}/attempts/-1", 404, "attempt-not-found"),
    ("GET", "/v1/jobs/{job}/attempts/" + "9" * 40, 404, "attempt-not-found"),
    ("GET", "/v1/jobs/{job}/attempts/%D9%A3", 404, "attempt-not-found"),
    ("GET", "/v1/jobs/{job}/checkpoints/x", 404, "checkpoint-not-found"),
    ("GET", "/v1/jobs/{job}/checkpoints/step-000000000001.a0001", 404, "checkpoint-not-found"),
    ("GET", "/v1/jobs/{job}/checkpoints/step-000000000001.a" + "9" * 5000, 404, "checkpoint-not-found"),
    ("GET", "/v1/jobs/{job}/checkpoints/%00", 404, "checkpoint-not-found"),
    ("POST", "/v1/jobs/{job}/checkpoints/step-000000000001.a0001/pin", 404, "checkpoint-not-found"),
    ("GET", "/v1/hooks/powerSDG", 404, "hook-not-found"),
    ("GET", "/v1/hooks/%00", 404, "hook-not-found"),
    ("GET", "/v1/jobs?phase=SLEEPING", 422, "invalid-parameter"),
    ("GET", "/v1/jobs?sort=size", 422, "invalid-parameter"),
    ("GET", "/v1/jobs?limit=0", 422, "invalid-parameter"),
    ("GET", "/v1/jobs?limit=101", 422, "invalid-parameter"),
    ("GET", "/v1/jobs?limit=" + "9" * 5000, 422, "invalid-parameter"),
    ("GET", "/v1/jobs?label=x", 422, "invalid-parameter"),
    ("GET", "/v1/jobs?label=%3Dx", 422, "invalid-parameter"),
    ("GET", "/v1/jobs?" + "&".join(["label=a=b"] * 1200), 422, "invalid-parameter"),
    ("GET", "/v1/jobs?name=%00", 400, "invalid-character"),
    ("GET", "/v1/jobs?phse=RUNNING", 422, "unknown-parameter"),
    ("POST", "/v1/jobs?dryrun=true", 422, "unknown-parameter"),
    ("POST", "/v1/jobs?dry_run=perhaps", 422, "invalid-parameter"),
    ("DELETE", "/v1/jobs/{job}?checkpoints=keep", 422, "unknown-parameter"),
    ("GET", "/v1/jobs?cursor=x", 400, "bad-cursor"),
    ("GET", "/v1/jobs?cursor=%F0%9F%98%80", 400, "bad-cursor"),
    ("GET", "/v1/jobs?cursor=" + cursor_of({}), 400, "bad-cursor"),
    ("GET", "/v1/jobs?cursor=" + cursor_of([1, 2, 3]), 400, "bad-cursor"),
    ("GET", "/v1/jobs?cursor=" + "W" * 1001, 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/events?cursor=" + cursor_of(["x", 1]), 400, "bad-cursor"),
    ("GET", "/v1/jobs/{job}/logs?cursor=AAAA", 400, "bad-cursor"),
    ("GET", "/v1/jobs/{job}/metrics?max_points=1", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?limit=1001", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/files?limit=1001", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?tail=-1", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?since=yesterday", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?since=2030-01-01T00:00:00", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?since=9999-12-31T23:59:59-23:59", 200, ""),
    ("GET", "/v1/jobs/{job}/logs?since=1e300", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?attempt=0", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?attempt=%D9%A3", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/logs?grep=%00", 400, "invalid-character"),
    ("GET", "/v1/jobs/{job}/logs?rank=-1", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/hook/history?rank=x", 422, "invalid-parameter"),
    ("GET", "/v1/jobs/{job}/checkpoints?state=lost", 422, "invalid-parameter"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), REQUESTS, ids=[f"{m} {p[:60]}" for m, p, *_ in REQUESTS])
def test_invalid_requests_answer_with_status_and_error_code(
    api: Api, method: str, path: str, status: int, code: str
) -> None:
    job_id = api.submit()
    answer = api.client.request(method, path.replace("{job}", job_id))
    if code:
        assert problem(answer) == (status, code)
    else:
        assert answer.status_code == status, answer.text


BODIES: list[tuple[str, str, Any, int, str]] = [
    ("resume", "/resume", {"from_step": -1}, 422, "invalid-body"),
    ("resume-text", "/resume", {"from_step": "x"}, 422, "invalid-body"),
    ("resume-huge", "/resume", {"from_step": 10**30}, 422, "invalid-value"),
    ("resume-key", "/resume", {"form_step": 1}, 422, "invalid-body"),
    ("resume-list", "/resume", [], 422, "invalid-body"),
    ("resume-no-such", "/resume", {"from_step": 2**62}, 404, "checkpoint-not-found"),
    ("suspend-body", "/suspend", {"now": True}, 422, "invalid-body"),
    ("checkpoint-body", "/checkpoint", [1], 422, "invalid-body"),
    ("fork-spec", "/fork", {"spec": 3}, 422, "invalid-body"),
    ("fork-id", "/fork", {"checkpoint_id": "x"}, 404, "checkpoint-not-found"),
    ("fork-nul", "/fork", {"checkpoint_id": "\0"}, 422, "invalid-value"),
    ("pin", "/checkpoints/step-000000000001.a0001/pin", {"pinned": "perhaps"}, 422, "invalid-body"),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES])
def test_job_actions_with_invalid_bodies_are_refused(api: Api, path: str, body: Any, status: int, code: str) -> None:
    job_id = api.submit()
    assert problem(api.client.post(f"/v1/jobs/{job_id}{path}", json=body)) == (status, code)
    assert api.job(job_id)["phase"] == "QUEUED"


PATCHES: list[tuple[Any, int, str]] = [
    ({"priority": 1001}, 422, "invalid-body"),
    ({"priority": None, "labels": {"a": 1}}, 422, "invalid-body"),
    ({"labels": {"-": "x"}}, 422, "invalid-body"),
    ({"labels": {"a": "x" * 256}}, 422, "invalid-body"),
    ({"labels": {"a\0": "x"}}, 422, "invalid-value"),
    ({"phase": "RUNNING"}, 422, "invalid-body"),
    ("x", 422, "invalid-body"),
]


@pytest.mark.parametrize(("body", "status", "code"), PATCHES)
def test_patch_with_an_invalid_body_is_refused(api: Api, body: Any, status: int, code: str) -> None:
    job_id = api.submit()
    assert problem(api.client.patch(f"/v1/jobs/{job_id}", json=body)) == (status, code)


@pytest.mark.parametrize("accept", ["image/png", "text/html;q=1", "*/*;q=0", ";;;,,,q=", "text/plain;q=x"])
def test_unsatisfiable_accept_header_answers_406(api: Api, accept: str) -> None:
    job_id = api.submit()
    for path in ("events", "logs"):
        answer = api.client.get(f"/v1/jobs/{job_id}/{path}", headers={"Accept": accept})
        assert problem(answer) == (406, "not-acceptable")


@pytest.mark.parametrize("last", ["x", "-1", "1" * 40, "1.2", "1.0.5,x"])
def test_invalid_last_event_id_answers_422(api: Api, last: str) -> None:
    job_id = api.submit()
    headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
    paths = ("logs",) if last == "1.2.3" else ("events", "logs")
    for path in paths:
        assert problem(api.client.get(f"/v1/jobs/{job_id}/{path}", headers=headers)) == (422, "invalid-parameter")


REPORTS: list[tuple[str, dict[str, Any], str | None, int, str]] = [
    ("no-token", {}, None, 401, "token-missing"),
    ("wrong-token", {}, "Bearer wrong", 403, "token-wrong"),
    ("basic", {}, "Basic abc", 401, "token-missing"),
    ("odd-token", {}, "Bearer \u00e9", 403, "token-wrong"),
    ("other-attempt", {"attempt": 2}, f"Bearer {TOKEN}", 404, "attempt-not-found"),
    ("other-job", {"job_id": "job-000000000000"}, f"Bearer {TOKEN}", 404, "attempt-not-found"),
    ("protocol", {"protocol": 2}, f"Bearer {TOKEN}", 400, "protocol-mismatch"),
    ("protocol-and-key", {"protocol": 2, "x": 1, "phase": "?"}, f"Bearer {TOKEN}", 400, "protocol-mismatch"),
    ("rank", {"batches": [{"rank": 7, "from_seq": 1, "messages": [message("progress", step=1)]}]},
     f"Bearer {TOKEN}", 422, "invalid-report"),
    ("negative-rank", {"batches": [{"rank": -1, "from_seq": 1, "messages": [message("progress", step=1)]}]},
     f"Bearer {TOKEN}", 422, "invalid-report"),
    ("kind", {"batches": [{"rank": 0, "from_seq": 1, "messages": [{"kind": "x"}]}]}, f"Bearer {TOKEN}", 422, "invalid-body"),
    ("huge-attempt", {"attempt": 10**30}, f"Bearer {TOKEN}", 404, "attempt-not-found"),
    ("node", {"node": 1}, f"Bearer {TOKEN}", 422, "invalid-report"),
    ("huge-node", {"node": 10**30}, f"Bearer {TOKEN}", 422, "invalid-report"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "token", "status", "code"), [r[1:] for r in REPORTS], ids=[r[0] for r in REPORTS])
def test_invalid_agent_reports_answer_with_status_and_error_code(
    api: Api, changes: dict[str, Any], token: str | None, status: int, code: str
) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    body = {"job_id": job_id, "attempt": 1, "phase": "RUNNING"} | changes
    headers: list[tuple[bytes, bytes]] = [] if token is None else [(b"Authorization", token.encode("latin-1"))]
    answer = api.client.post(f"/v1/jobs/{job_id}/attempts/1/reports", json=body, headers=headers)
    assert problem(answer) == (status, code)
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


def test_405_names_every_method_of_the_path(api: Api) -> None:
    answer = api.client.put("/v1/jobs/x")
    assert answer.headers["allow"] == "DELETE, GET, PATCH"
