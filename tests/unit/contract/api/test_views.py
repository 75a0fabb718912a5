"""What the API's bodies look like at a prompt and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from ratchet_client import RatchetClient
from ratchet_client.resources.client import Series, Snapshot
from ratchet_contract.api.roles import Role, Scope
from ratchet_contract.api.tokens import WhoAmI
from ratchet_contract.api.views import (
    AttemptView,
    EventView,
    HookSampleView,
    HookView,
    JobView,
    MetricPoint,
    MetricSeries,
    ResumeReportView,
)
from ratchet_contract.spec.job import JobSpec, TaskSpec
from tests.support.scripted_server import JOB

AT = "2026-01-01T00:00:00Z"
LONG = "first line\n" + "x" * 5000


def test_view_repr_is_one_short_line() -> None:
    job = JobView.model_validate({**JOB, "name": "digits", "message": LONG, "labels": {"team": "vision"}})
    assert repr(job) == "JobView(id='job-000000000001', name='digits', phase='RUNNING', attempt=1, progress.step=0)"
    attempt = AttemptView.model_validate(
        {"job_id": "j", "number": 2, "phase": "ENDED", "cause": "completed", "base": {"step": 10}, "created_at": AT}
    )
    assert repr(attempt) == "AttemptView(number=2, phase='ENDED', cause='completed', base.step=10, last_step=0)"
    event = EventView.model_validate({"id": 1, "job_id": "j", "at": AT, "type": "note", "message": LONG})
    points = [MetricPoint(step=step, attempt=1, value=0.5, at=event.at) for step in range(900)]
    summary = {"name": "powerSGD", "rank": 1, "step": 7, "phase": "compressing", "iteration": 7, "compression_rate": 3.0,
               "elements_before": 1, "elements_after": 1, "bytes_before": 1, "bytes_after": 1}  # fmt: skip
    sample = HookSampleView.model_validate({"attempt": 1, "at": AT, "summary": summary})
    for view in (event, MetricSeries(name="loss", points=points), sample, Series(list(range(900)), [0.5] * 900)):
        for text in (repr(view), str(view)):
            assert len(text) < 250 and "\n" not in text, text
    assert "summary.rank=1, summary.step=7" in repr(sample) and "points=[900 items]" in repr(
        MetricSeries(name="loss", points=points)
    )


def test_resume_report_snapshot_and_client_repr_is_one_line(tmp_path: Path) -> None:
    parts = [{"component": f"part{n}", "rank": n, "status": "exact"} for n in range(40)]
    report = ResumeReportView.model_validate(
        {
            "verdict": "exact",
            "base": {"step": 7, "attempt": 1, "digest": "0" * 64},
            "world_size": 2,
            "components": parts,
        }
    )
    assert repr(report) == "ResumeReportView(verdict='exact', base.step=7, world_size=2, components=[40 items])"
    job = JobView.model_validate({**JOB, "name": "digits", "progress": {"step": 7, "total_steps": 9}})
    hook = HookView(
        job_id=job.id, source="live", name="powerSGD", wrapper=None, parameters={}, stateful=True, phase="compressing"
    )
    snapshot = Snapshot(job, hook, {"loss": 0.123456789, "lr": 0.1}, job.created_at)
    assert repr(snapshot) == "<Snapshot of digits: RUNNING, step 7/9, attempt 1, loss 0.123457, lr 0.1>"
    assert "<td style='text-align:left'>RUNNING" in snapshot._repr_html_() and "compressing" in snapshot._repr_html_()
    assert len(repr(Snapshot(job, hook, {f"metric{n}": 0.5 for n in range(99)}, job.created_at))) < 250
    assert repr(RatchetClient("http://127.0.0.1:1")) == "<RatchetClient http://127.0.0.1:1>"
    assert repr(RatchetClient(home=tmp_path)) == f"<RatchetClient {tmp_path}>"  # no service is needed for it
    assert repr(JobSpec(name="digits", task=TaskSpec(entrypoint="a:B"))) == (
        "JobSpec(name='digits', task=TaskSpec(entrypoint='a:B'))"
    )


def test_view_html_joins_list_values_with_commas() -> None:
    who = WhoAmI(owner="ann", role=Role.SUBMITTER, scopes=[Scope.JOBS_READ, Scope.JOBS_WRITE], tokens_required=True)
    assert "<td style='text-align:left'>jobs:read, jobs:write</td>" in who._repr_html_()


def test_view_html_is_a_table_with_escaped_values() -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    job = JobView.model_validate({**JOB, "name": hostile, "message": hostile, "labels": {hostile: hostile}})
    tags: list[str] = []
    texts: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

        def handle_data(self, data: str) -> None:
            texts.append(data)

    reader = Reader()
    reader.feed(job._repr_html_())
    reader.close()
    assert set(tags) == {"table", "caption", "tr", "th", "td"}
    assert hostile in texts and "RUNNING" in texts
