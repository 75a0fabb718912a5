"""Metrics, hook, events and logs: series without abandoned branches, streams that go on exactly where they stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service.job_files import rank_log
from ratchet_service.observability import disk_space
from ratchet_service.usecases import logs, metrics
from ratchet_service.usecases.pagination import encode, query_digest
from tests.integration.service.agent_reports.test_ingest import hook_message
from tests.support.api import Api, message, training_message
from tests.support.server import wait_for


@pytest.fixture
def job(api: Api) -> str:
    job_id = api.submit()
    api.attempt(job_id)
    return job_id


def metric(step: int, value: float, name: str = "loss") -> dict[str, Any]:
    return message("metrics", step=step, values={name: value})


def series(api: Api, job_id: str, **query: Any) -> dict[str, list[tuple[int, int, float]]]:
    answer = api.client.get(f"/v1/jobs/{job_id}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    return {s["name"]: [(p["step"], p["attempt"], p["value"]) for p in s["points"]] for s in answer.json()["series"]}


def test_metrics_of_redone_steps_replace_the_earlier_ones(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), *(metric(s, s / 10) for s in range(1, 9))]))
    api.attempt(job, number=2)
    api.report(job, (0, 1, [training_message(5, 1), metric(6, 60.0)]), number=2)
    assert series(api, job) == {"loss": [*((s, 1, s / 10) for s in range(1, 6)), (6, 2, 60.0)]}


def test_metric_series_are_filtered_by_name(api: Api, job: str) -> None:
    api.report(job, (0, 1, [metric(1, 1.0), metric(1, 2.0, "lr"), metric(1, 3.0, "acc")]))
    assert set(series(api, job)) == {"loss", "lr", "acc"}
    assert series(api, job, name=["lr", "nothing"]) == {"lr": [(1, 1, 2.0)], "nothing": []}


@pytest.mark.parametrize("points", [2, 3, 7, 50, 99, 100, 101])
def test_max_points_thins_a_metric_series_to_real_points_and_both_ends(api: Api, job: str, points: int) -> None:
    api.report(job, (0, 1, [metric(s * 3, s * 1.5) for s in range(100)]))
    found = series(api, job, max_points=points)["loss"]
    assert len(found) == min(points, 100)
    assert (found[0][0], found[-1][0]) == (0, 297)
    assert all(value == step / 3 * 1.5 for step, _, value in found)
    gaps = {b[0] - a[0] for a, b in pairwise(found)}
    assert max(gaps) - min(gaps) <= 3


def test_metrics_of_a_range_of_steps_show_more_points_and_their_number(api: Api, job: str) -> None:
    api.report(job, (0, 1, [training_message(), *(metric(step, 1.0) for step in range(100))]))
    api.attempt(job, 2)
    api.report(job, (0, 1, [training_message(50, 1), metric(50, 2.0), metric(60, 2.0)]), number=2)

    def shown(**query: Any) -> tuple[list[int], int, list[int]]:
        (found,) = api.client.get(f"/v1/jobs/{job}/metrics", params={"name": "loss", **query}).json()["series"]
        return [p["step"] for p in found["points"]], found["total"], [p["step"] for p in found["superseded"]]

    assert shown(max_points=3) == ([0, 26, 60], 52, [50, 60]) and shown(max_points=2) == ([0, 60], 52, [])
    assert shown(from_step=10, to_step=13) == shown(from_step=10, to_step=13, max_points=4) == ([10, 11, 12, 13], 4, [])
    assert shown(from_step=10, to_step=20, max_points=3) == ([10, 15, 20], 11, [])
    assert shown(from_step=55) == ([60], 1, [60]) and shown(from_step=61) == ([], 0, [])
    assert api.client.get(f"/v1/jobs/{job}/metrics", params={"from_step": 61}).json()["series"] == []
    assert api.client.get(f"/v1/jobs/{job}/metrics", params={"to_step": 2**63}).status_code == 422


def test_hook_history_of_evenly_spaced_steps_has_all_ranks_of_each(api: Api, job: str) -> None:
    for rank in (0, 1):
        api.report(job, (rank, 1, [hook_message(step, rank) for step in range(10, 101, 10)]))

    def shown(**query: Any) -> list[tuple[int, int]]:
        out, cursor = [], None
        while cursor is not None or not out:
            params = {**query, **({"cursor": cursor} if cursor else {})}
            page = api.client.get(f"/v1/jobs/{job}/hook/history", params=params).json()
            out += [(one["summary"]["step"], one["summary"]["rank"]) for one in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        return out

    assert shown(max_points=3) == shown(max_points=3, limit=1) == [(s, r) for s in (10, 60, 100) for r in (0, 1)]
    assert shown(from_step=25, to_step=40) == [(30, 0), (30, 1), (40, 0), (40, 1)]
    assert shown(from_step=20, max_points=2, rank=1) == [(20, 1), (100, 1)]
    assert len(shown()) == 20


def test_page_of_hook_history_has_up_to_1000_samples_and_ends_early_after_its_limit_of_bytes(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        api.report(job, (rank, 1, [hook_message(step, rank) for step in range(10, 801, 10)]))
    path = f"/v1/jobs/{job}/hook/history"
    assert len(api.client.get(path, params={"limit": 1000}).json()["items"]) == 160
    assert api.client.get(path, params={"limit": 1001}).status_code == 422
    monkeypatch.setattr(metrics, "MAX_PAGE_BYTES", 5000)
    sizes, seen, cursor = [], [], None
    while not sizes or cursor is not None:
        more = {"cursor": cursor} if cursor else {}
        page = api.client.get(path, params={"limit": 1000, **more}).json()
        seen += [(one["summary"]["step"], one["summary"]["rank"]) for one in page["items"]]
        sizes.append(len(page["items"]))
        cursor = page["next_cursor"]
    assert seen == [(step, rank) for step in range(10, 801, 10) for rank in (0, 1)]
    assert 5 < min(sizes[:-1]) == max(sizes[:-1]) < 20


def parse(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in lines:
        if line:
            field, _, value = line.partition(":")
            event[field] = value.strip()
        elif event:
            yield event
            event = {}


def stream(api: Api, path: str, stop: Any, last: str | None = None) -> list[dict[str, str]]:
    """Events until ``stop`` says so; the connection is then cut from here."""
    headers = {"Accept": "text/event-stream"} | ({} if last is None else {"Last-Event-ID": last})
    out: list[dict[str, str]] = []
    with api.client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for event in parse(answer.iter_lines()):
            if "data" in event:
                out.append(event)
                if event.get("event") == "end" or stop(out):
                    break
    return out


def never(_: Any) -> bool:
    return False


def test_events_are_paged_in_order_and_filtered_by_type_and_attempt(api: Api, job: str) -> None:
    api.report(job, (0, 1, [message("note", type="n", message=str(i)) for i in range(25)]))
    seen, cursor = [], None
    while True:
        query = {"limit": 10} | ({"cursor": cursor} if cursor else {})
        page = api.client.get(f"/v1/jobs/{job}/events", params=query).json()
        seen += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [e["message"] for e in seen[1:]] == [str(i) for i in range(25)]
    assert [e["id"] for e in seen] == sorted(e["id"] for e in seen)

    def some(**query: Any) -> list[str]:
        found = api.client.get(f"/v1/jobs/{job}/events", params={"limit": 2, **query}).json()["items"]
        return [e["message"] for e in found]

    assert some(type="note.n", attempt=1) == ["0", "1"] and some(type="note.n", attempt=2) == []
    assert [e["message"] for e in seen if e["type"] == "submitted"] == some(type="submitted") == some(attempt=0)
    assert some(type=["submitted", "note.n"]) == [e["message"] for e in seen[:2]]


@pytest.mark.parametrize("query", [{}, {"attempt": 1, "type": "note.n"}])
def test_events_newest_first_are_paged_while_new_ones_come(api: Api, job: str, query: dict[str, Any]) -> None:
    api.report(job, (0, 1, [message("note", type="n", message=str(i)) for i in range(25)]))
    path = f"/v1/jobs/{job}/events"
    ids = [e["id"] for e in api.client.get(path, params={"limit": 100, **query}).json()["items"]]
    seen, cursor = [], None
    while not seen or cursor is not None:
        more = {"cursor": cursor} if cursor else {}
        page = api.client.get(path, params={"sort": "-id", "limit": 10, **query, **more}).json()
        seen += [e["id"] for e in page["items"]]
        cursor = page["next_cursor"]
        api.report(job, (0, 2 + len(seen), [message("note", type="n", message="later")]))
    assert seen == ids[::-1]
    newest = {"sort": "-id", "limit": 2, **query}
    cursor = api.client.get(path, params=newest).json()["next_cursor"]
    for other in ({"sort": "id"}, {"attempt": 0}, {"type": ["note.n", "other"]}):
        wrong = api.client.get(path, params={**newest, **other, "cursor": cursor})
        assert (wrong.status_code, wrong.json().get("code")) == (400, "bad-cursor"), other


@pytest.mark.parametrize(("query", "accept"), [("follow=true&", "*/*"), ("", "text/event-stream")])
def test_event_stream_refuses_newest_first(api: Api, job: str, query: str, accept: str) -> None:
    answer = api.client.get(f"/v1/jobs/{job}/events?{query}sort=-id", headers={"Accept": accept})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-parameter")
    assert "Last-Event-ID" in answer.json()["detail"]


def test_event_stream_resumes_without_loss_or_repetition_after_reconnect(api: Api, job: str) -> None:
    path = f"/v1/jobs/{job}/events?follow=true"
    first = stream(api, path, lambda got: len(got) == 1)
    assert json.loads(first[0]["data"])["type"] == "submitted"
    api.report(job, (0, 1, [message("note", type="n", message="a")]))
    later = threading.Timer(0.1, lambda: api.report(job, (0, 2, [message("note", type="n", message="b")])))
    later.start()
    second = stream(api, path, lambda got: len(got) == 2, last=first[-1]["id"])
    later.join()
    assert [json.loads(e["data"])["message"] for e in second] == ["a", "b"]
    api.set_phase(job, JobPhase.SUCCEEDED)
    rest = stream(api, path, never, last=second[0]["id"])
    assert [json.loads(e["data"]).get("message") for e in rest[:-1]] == ["b"]
    assert rest[-1]["event"] == "end"


def test_event_stream_of_a_cancelled_job_ends(api: Api, job: str) -> None:
    ends: list[list[dict[str, str]]] = []
    thread = threading.Thread(target=lambda: ends.append(stream(api, f"/v1/jobs/{job}/events", never)))
    thread.start()
    api.set_phase(job, JobPhase.CANCELLED)
    thread.join(30)
    assert ends[0][-1]["event"] == "end"


def test_event_stream_without_events_sends_keepalive_comments(api: Api, job: str) -> None:
    with api.client.stream("GET", f"/v1/jobs/{job}/events?follow=true") as answer:
        assert any(line.startswith(":") for line in answer.iter_lines())


def write(api: Api, job_id: str, attempt: int, rank: int, text: str) -> None:
    path = api.settings.paths.job(job_id).attempt(attempt).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        handle.write(text)


def lines(api: Api, job_id: str, **query: Any) -> list[tuple[int, int, str]]:
    out, cursor = [], None
    while True:
        params = query | ({"cursor": cursor} if cursor else {})
        answer = api.client.get(f"/v1/jobs/{job_id}/logs", params=params)
        assert answer.status_code == 200, answer.text
        out += [(x["attempt"], x["rank"], x["text"]) for x in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return out


def test_logs_default_to_the_newest_attempt(api: Api, job: str) -> None:
    write(api, job, 1, 0, "one\ntwo\n")
    write(api, job, 1, 1, "uno\ndos")
    assert lines(api, job) == [(1, 0, "one"), (1, 0, "two"), (1, 1, "uno"), (1, 1, "dos")]
    api.attempt(job, number=2)
    write(api, job, 2, 0, "again\n")
    assert lines(api, job) == [(2, 0, "again")]
    assert lines(api, job, attempt=1, rank=1) == [(1, 1, "uno"), (1, 1, "dos")]
    assert lines(api, job, attempt="all", rank=0) == [(1, 0, "one"), (1, 0, "two"), (2, 0, "again")]
    missing = api.client.get(f"/v1/jobs/{job}/logs", params={"attempt": 9})
    assert missing.status_code == 404 and missing.json()["code"] == "attempt-not-found"
    query = query_digest(of="logs", job=job, range=[2, 2], rank=None, grep=None, since=None, tail=None)
    far = encode(query, [2, 0, 2**63 - 1])  # beyond what any file system can seek to
    assert api.client.get(f"/v1/jobs/{job}/logs", params={"cursor": far}).json()["items"] == []
    assert lines(api, job, attempt="all", limit=1, grep="o")[-1] == (1, 1, "dos")


def test_log_page_reads_a_bounded_number_of_bytes_and_its_cursor_goes_on(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_PAGE_BYTES", 1000)
    monkeypatch.setattr(rank_log, "_SEARCH_BLOCK", 400)
    texts = {rank: [*(f"{n:>8}: a line" for n in range(500)), f"the needle of {rank}", "end"] for rank in (0, 1)}
    for rank, written in texts.items():
        write(api, job, 1, rank, "\n".join(written))
    assert [text for _, _, text in lines(api, job, grep="needle")] == ["the needle of 0", "the needle of 1"]
    first = api.client.get(f"/v1/jobs/{job}/logs", params={"grep": "needle"}).json()
    assert first["items"] == [] and first["next_cursor"] is not None
    assert lines(api, job) == lines(api, job, limit=7) == [(1, rank, text) for rank in texts for text in texts[rank]]
    assert lines(api, job, grep="3: a line", rank=1) == [(1, 1, f"{n:>8}: a line") for n in range(3, 500, 10)]
    monkeypatch.setattr(logs, "MAX_PAGE_BYTES", 10**9)
    assert api.client.get(f"/v1/jobs/{job}/logs", params={"grep": "nowhere"}).json()["next_cursor"] is None


def test_log_page_cursor_with_another_tail_is_refused(api: Api, job: str) -> None:
    write(api, job, 1, 0, "one\ntwo\nthree\n")
    cursor = api.client.get(f"/v1/jobs/{job}/logs", params={"tail": 2, "limit": 1}).json()["next_cursor"]
    again = api.client.get(f"/v1/jobs/{job}/logs", params={"tail": 2, "cursor": cursor}).json()["items"]
    assert [line["text"] for line in again] == ["three"]
    other = api.client.get(f"/v1/jobs/{job}/logs", params={"tail": 3, "cursor": cursor})
    assert (other.status_code, other.json()["code"]) == (400, "bad-cursor")


@pytest.mark.parametrize("tail", [0, 1, 2, 3, 100])
def test_log_tail_returns_the_last_lines_of_each_rank(api: Api, job: str, tail: int) -> None:
    texts = [f"{i}: {'x' * (i * 700)}" for i in range(60)]  # longer than one block
    write(api, job, 1, 0, "\n".join(texts) + "\n")
    write(api, job, 1, 1, "a\n\nb")
    expected = [(1, 0, t) for t in texts[len(texts) - min(tail, 60) :]]
    expected += [(1, 1, t) for t in ["a", "", "b"][3 - min(tail, 3) :]]
    assert lines(api, job, tail=tail) == expected
    assert lines(api, job, tail=tail, limit=7) == expected


def test_log_format_follows_the_accept_header(api: Api, job: str) -> None:
    write(api, job, 1, 0, "fine\nbad byte \udcff\n".encode("utf-8", "surrogateescape").decode("latin-1"))
    path = f"/v1/jobs/{job}/logs"
    text = api.client.get(path, headers={"Accept": "text/plain"})
    assert text.text.splitlines()[0] == "[1.0] fine"
    assert api.client.get(path, params={"rank": 0}, headers={"Accept": "text/plain"}).text.startswith("fine\n")
    rows = api.client.get(path, headers={"Accept": "application/x-ndjson, text/plain;q=0.5"})
    assert rows.headers["content-type"].startswith("application/x-ndjson")
    assert json.loads(rows.text.splitlines()[0]) == {
        "id": "1.0.5",
        "attempt": 1,
        "rank": 0,
        "text": "fine",
        "at": None,
        "left_out": None,
    }


def test_log_since_filters_files_by_modification_time(api: Api, job: str) -> None:
    write(api, job, 1, 0, "x\n")
    assert lines(api, job, since="2020-01-01T00:00:00Z") == [(1, 0, "x")]
    assert lines(api, job, since="2100-01-01T00:00:00Z") == []


def test_log_stream_sends_every_line_once_across_reconnects_and_attempts(api: Api, job: str) -> None:
    path = f"/v1/jobs/{job}/logs?follow=true"
    write(api, job, 1, 0, "a0\n")
    write(api, job, 1, 1, "a1\nhalf")
    seen = stream(api, path, lambda got: len(got) == 2)
    write(api, job, 1, 0, "b0\n")
    write(api, job, 1, 1, " whole\n")
    seen += stream(api, path, lambda got: len(got) == 1, last=seen[-1]["id"])
    api.attempt(job, number=2)
    write(api, job, 2, 0, "c0\n")
    seen += stream(api, path, lambda got: len(got) == 1, last=seen[-1]["id"])
    write(api, job, 2, 1, "c1 without end")
    api.set_phase(job, JobPhase.SUCCEEDED)
    seen += stream(api, path, never, last=seen[-1]["id"])
    assert seen[-1]["event"] == "end"
    got = [(x["attempt"], x["rank"], x["text"]) for x in (json.loads(e["data"]) for e in seen[:-1])]
    assert got == [
        (1, 0, "a0"),
        (1, 1, "a1"),
        (1, 0, "b0"),
        (1, 1, "half whole"),
        (2, 0, "c0"),
        (2, 1, "c1 without end"),
    ]


def test_log_stream_of_all_attempts_does_not_restart_on_reconnect(api: Api, job: str) -> None:
    write(api, job, 1, 0, "old\n")
    api.attempt(job, number=2)
    write(api, job, 2, 0, "new\n")
    path = f"/v1/jobs/{job}/logs?follow=true&attempt=all"
    seen = stream(api, path, lambda got: len(got) == 2)
    write(api, job, 2, 0, "newer\n")
    seen += stream(api, path, lambda got: len(got) == 1, last=seen[-1]["id"])
    assert [json.loads(e["data"])["text"] for e in seen] == ["old", "new", "newer"]


def test_log_stream_can_start_at_the_tail_as_plain_text(api: Api, job: str) -> None:
    write(api, job, 1, 0, "".join(f"{i}\n" for i in range(50)))
    path = f"/v1/jobs/{job}/logs?follow=true&tail=2&rank=0"
    with api.client.stream("GET", path, headers={"Accept": "text/plain"}) as answer:
        got = answer.iter_lines()
        assert [next(got), next(got)] == ["48", "49"]
        write(api, job, 1, 0, "new\n")
        assert next(got) == "new"


def test_hooks_are_listed_with_their_parameters(api: Api) -> None:
    items = {h["name"]: h for h in api.client.get("/v1/hooks").json()["items"]}
    assert items["powerSGD"]["available"] is True
    assert "matrix_approximation_rank" in items["powerSGD"]["parameters"]["properties"]
    assert items["powerSGD"]["wrappers"] == ["fp16_compress_wrapper", "bf16_compress_wrapper"]
    assert items["fp16_compress"]["wrappers"] == [] and items["noop"]["replicas"] == "rank"
    assert items["noop"] == api.client.get("/v1/hooks/noop_hook").json()
    assert all(entry["parameters"]["properties"]["name"]["const"] == name for name, entry in items.items())


def test_hook_view_of_a_job_that_never_ran_has_parameters_but_no_state(api: Api, job: str) -> None:
    view = api.client.get(f"/v1/jobs/{job}/hook").json()
    assert view["name"] == "powerSGD"
    assert view["parameters"]["start_powerSGD_iter"] == 10
    assert (view["phase"], view["iteration"], view["ranks"], view["checkpoint_iteration"]) == (None, None, [], None)


def test_health_readiness_and_metrics_endpoints_answer(api: Api, job: str) -> None:
    assert api.client.get("/healthz").json()["status"] == "ok"
    assert api.client.get("/readyz").status_code == 200
    api.client.get(f"/v1/jobs/{job}")
    text = api.client.get("/metrics").text
    assert 'ratchet_jobs{phase="STARTING"} 1.0' in text
    assert 'route="/v1/jobs/{job_id}",status="200"' in text
    assert job not in text


def test_readyz_and_job_view_report_a_full_database_disk(api: Api, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 4096)
    ready, shown = api.client.get("/readyz"), api.job(job)
    if not api.database.is_sqlite:  # the server's disk is not ours to see
        assert (ready.status_code, shown["reason"]) == (200, None)
        return
    assert (ready.status_code, ready.json()["code"], shown["reason"]) == (507, "disk-full", "disk-full")
    assert "is full (0.0 MiB free)" in shown["message"] and "running attempts continue" in shown["message"]
    api.set_phase(job, JobPhase.SUCCEEDED)
    assert api.job(job)["reason"] is None
    monkeypatch.undo()
    assert api.client.get("/readyz").status_code == 200


def test_readyz_answers_503_when_the_database_is_unavailable(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlalchemy as sa

    def fail() -> None:
        raise sa.exc.OperationalError("select 1", {}, Exception("connection refused"))

    def unready() -> httpx.Response | None:
        answer = api.client.get("/readyz")
        return answer if answer.status_code != 200 else None

    monkeypatch.setattr(api.database, "ping", fail)
    answer = wait_for(unready, "the next look, a second after the last one", 30)
    assert (answer.status_code, answer.json()["code"]) == (503, "database-unavailable")
    assert answer.headers["retry-after"] == "1"
