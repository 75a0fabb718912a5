"""Weak ETags of JSON answers, and 304 for a client that already has the answer."""

from __future__ import annotations

import pytest

from tests.support.api import Api, message


def test_unchanged_json_answer_is_304_without_a_body_until_it_changes(api: Api) -> None:
    job = api.submit()
    for path in ("/v1/jobs", "/v1/hooks", f"/v1/jobs/{job}/metrics"):
        first = api.client.get(path)
        etag = first.headers["etag"]
        assert first.status_code == 200 and etag.startswith('W/"')
        again = api.client.get(path, headers={"If-None-Match": etag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert "content-type" not in again.headers and "x-request-id" in again.headers
        assert api.client.get(path, headers={"If-None-Match": 'W/"0"'}).content == first.content
    seen = api.client.get("/v1/jobs").headers["etag"]
    api.client.patch(f"/v1/jobs/{job}", json={"priority": 3})
    changed = api.client.get("/v1/jobs", headers={"If-None-Match": seen})
    assert changed.status_code == 200 and changed.json()["items"][0]["priority"] == 3


@pytest.mark.parametrize("sent", ['"{}"', 'W/"{}"', '"a", W/"{}"', "*"])
def test_if_none_match_compares_weakly_with_each_etag_of_a_list(api: Api, sent: str) -> None:
    etag = api.client.get("/v1/hooks").headers["etag"].removeprefix('W/"').removesuffix('"')
    assert api.client.get("/v1/hooks", headers={"If-None-Match": sent.format(etag)}).status_code == 304


def test_job_keeps_its_own_etag_and_is_always_sent(api: Api) -> None:
    job = api.submit()
    etag = api.client.get(f"/v1/jobs/{job}").headers["etag"]
    again = api.client.get(f"/v1/jobs/{job}", headers={"If-None-Match": etag})
    assert etag == '"1"' and again.status_code == 200 and again.json()["id"] == job


def test_streams_text_errors_and_other_methods_have_no_etag(api: Api) -> None:
    job = api.submit()
    api.attempt(job)
    api.report(job, (0, 1, [message("note", type="n", message="x")]))
    path = api.settings.paths.job(job).attempt(1).log(0)
    path.parent.mkdir(parents=True)
    path.write_text("a line\n")
    logs = f"/v1/jobs/{job}/logs"
    for media_type in ("text/plain", "application/x-ndjson"):
        answer = api.client.get(logs, headers={"Accept": media_type, "If-None-Match": "*"})
        assert answer.status_code == 200 and "a line" in answer.text and "etag" not in answer.headers
    with api.client.stream("GET", f"/v1/jobs/{job}/events?follow=true", headers={"If-None-Match": "*"}) as events:
        assert events.status_code == 200 and next(events.iter_lines())
    missing = api.client.get("/v1/jobs/job-000000000000", headers={"If-None-Match": "*"})
    assert missing.status_code == 404 and missing.json()["code"] == "job-not-found" and "etag" not in missing.headers
    assert "etag" not in api.client.get("/healthz").headers
