"""What the API's bodies look like at a prompt and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

from ratchet_client.client import Series
from ratchet_contract.api import AttemptView, EventView, HookSampleView, JobView, MetricPoint, MetricSeries
from tests.support.scripted import JOB

AT = "2026-01-01T00:00:00Z"
LONG = "first line\n" + "x" * 5000


def test_a_view_is_one_line() -> None:
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


def test_a_notebook_gets_a_table_and_no_markup_of_others() -> None:
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
