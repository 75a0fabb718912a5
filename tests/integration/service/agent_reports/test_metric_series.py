"""Series that are thinned as they are stored: small however long a job is, and every point one that was reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.protocol.messages import RankBatch
from ratchet_service.agent_reports.ingest import ingest_batches
from ratchet_service.agent_reports.message_effects import add_left_out_event
from ratchet_service.checkpoints.cleanup import metric_values_of
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, AttemptNode, Event, HookSample, Job, Metric, MetricSeries
from ratchet_service.db.transitions import lock_job
from ratchet_service.usecases import metrics
from tests.integration.service.agent_reports.test_ingest import hook_message
from tests.support.api import Api, checkpoint_message, message, training_message

pytestmark = pytest.mark.takes_turns

BOUNDS = Bounds(points=40, series=5, notes=10, samples=20)


class Told:
    """One job's ranks, as ``ingest`` hears them, with small bounds."""

    def __init__(self, api: Api, **spec: Any) -> None:
        self.api, self.database = api, api.database
        self.job = api.submit(**spec)
        self.number = 0
        self.next()

    def next(self) -> None:
        self.number += 1
        self.said = dict.fromkeys((0, 1), 0)
        self.api.attempt(self.job, self.number)

    def say(self, *messages: dict[str, Any], rank: int = 0, portion: int = 1000) -> None:
        for begin in range(0, len(messages), portion):
            part = messages[begin : begin + portion]
            batch = RankBatch.model_validate({"rank": rank, "from_seq": self.said[rank] + 1, "messages": part})
            with self.database.write() as session:
                job = lock_job(session, self.job)
                attempt = session.get_one(Attempt, (self.job, self.number))
                node = session.get_one(AttemptNode, (self.job, self.number, 0))
                assert ingest_batches(session, job, attempt, node, [batch], bounds=BOUNDS) == len(part)
            self.said[rank] += len(part)

    def log(self, steps: Iterable[int], name: str = "loss", portion: int = 1000) -> None:
        told = [message("metrics", step=step, values={name: self.value(step)}) for step in steps]
        self.say(*told, portion=portion)

    def value(self, step: int) -> float:
        return step + self.number / 10

    def rows(self, name: str = "loss") -> list[tuple[int, int, float]]:
        query = sa.select(Metric.step, Metric.attempt, Metric.value).where(
            Metric.job_id == self.job, Metric.name == name
        )
        with self.database.read() as session:
            return [(s, e, v or 0.0) for s, e, v in session.execute(query.order_by(Metric.step))]

    def shown(self, name: str = "loss", most: int = 10_000) -> tuple[list[tuple[int, int, float]], int]:
        with self.database.read() as session:
            (found,) = metrics.metrics(session, self.job, [name], most).series
        return [(p.step, p.attempt, p.value) for p in found.points], found.every

    def steps(self, name: str = "loss") -> list[int]:
        return [step for step, _, _ in self.rows(name)]

    def kept(self, name: str = "loss") -> MetricSeries:
        with self.database.read() as session:
            return session.get_one(MetricSeries, (self.job, name))

    def events(self, *types: str) -> list[Event]:
        query = sa.select(Event).where(Event.job_id == self.job, Event.type.in_(types)).order_by(Event.id)
        with self.database.read() as session:
            return list(session.scalars(query))


@pytest.fixture
def told(api: Api) -> Told:
    return Told(api)


@pytest.mark.parametrize("portion", [13, 1000])
def test_long_metric_series_keeps_a_grid_of_real_points_and_the_newest(told: Told, portion: int) -> None:
    told.say(training_message())
    told.log(range(1, 1001), portion=portion)
    points, every = told.shown()
    assert every == 32
    assert [p[0] for p in points] == [*range(32, 1001, 32), 1000]
    assert all((attempt, value) == (1, step + 0.1) for step, attempt, value in points)
    assert len(told.rows()) <= BOUNDS.points + 1


def test_metric_series_keeps_the_newest_point_until_a_newer_one_arrives(told: Told) -> None:
    told.log(range(100))
    for step in (101, 103, 104, 107):
        told.log([step])
        assert told.steps()[-1] == step
    assert told.kept().stride == 4 and told.steps() == [*range(0, 97, 4), 104, 107]


def test_redone_steps_replace_superseded_points_on_the_same_grid(told: Told) -> None:
    told.say(training_message())
    told.log(range(1, 201))
    told.next()
    told.say(training_message(90, 1))
    told.log(range(91, 151))
    points, every = told.shown()
    grid = [*range(8, 151, 8), 150]
    assert every == 8 and points == [(s, 1 if s <= 90 else 2, s + (0.1 if s <= 90 else 0.2)) for s in grid]
    assert 200 not in [p[0] for p in points], "of the branch left behind"
    assert told.kept().points == len(range(8, 201, 8)), "steps done again are counted once"
    told.log(range(151, 400))
    assert {attempt for step, attempt, _ in told.rows() if step > 90} == {2}, (
        "thinning takes the branch left behind away"
    )
    points, every = told.shown()
    assert every == 16 and [p[0] for p in points] == [*range(16, 400, 16), 399]


def test_points_of_an_abandoned_branch_do_not_trigger_thinning(told: Told) -> None:
    told.say(training_message())
    told.log(range(1, 41))
    told.next()
    told.say(training_message(10, 1))
    told.log(range(60, 80))  # not the steps of before: the thirty that are left behind make it too many
    assert told.kept().stride == 1
    assert told.steps() == [*range(1, 11), *range(60, 80)]


@pytest.mark.parametrize(
    "steps", [range(1, 20_000, 100), range(50, 20_000, 50), [*range(7, 9000, 128), *range(0, 9000, 500)]]
)
def test_metric_series_of_irregular_steps_are_thinned_too(told: Told, steps: Sequence[int]) -> None:
    told.log(sorted(steps), portion=13)
    kept = told.steps()
    assert BOUNDS.points // 4 <= len(kept) <= BOUNDS.points + 1
    assert set(kept) <= set(steps) and kept[-1] == max(steps)


def test_thinning_keeps_the_keep_best_metric_at_every_checkpoint(api: Api) -> None:
    told = Told(api, checkpoint={"every_steps": 50, "keep_best": {"metric": "acc", "count": 2}})
    told.say(training_message())
    for save in range(50, 1001, 50):
        odd = save - 1  # on no grid
        told.log(range(save - 50, odd), name="acc", portion=25)
        told.log([odd], name="acc")
        told.say(checkpoint_message(odd))
        told.log([odd], name="acc")  # an evaluation behind the save
    told.log(range(1000, 1010), name="acc")
    with api.database.read() as session:
        job = session.get_one(Job, told.job)
        from ratchet_service.checkpoints.lineage import bases_of, committed_of

        values = metric_values_of(session, job, committed_of(session, told.job), bases_of(session, told.job))
    assert values == {(save - 1, 1): save - 0.9 for save in range(50, 1001, 50)}
    stride = told.kept("acc").stride
    assert stride > 8
    beside = [step for step in told.steps("acc") if step % stride and step < 999]
    assert beside == [save - 1 for save in range(50, 1000, 50)], "nothing else stays for it"
    assert told.steps("acc")[-10:] == list(range(1000, 1010)), "a checkpoint may come of these"


def test_late_metrics_of_an_older_attempt_do_not_change_the_series(told: Told) -> None:
    told.say(training_message())
    told.log(range(1, 101))
    old, said = told.number, dict(told.said)
    told.next()
    told.say(training_message(50, 1))
    told.log(range(51, 78))
    new, told.number, told.said = told.said, old, said
    told.log(range(101, 160))  # what the first attempt left in its spool
    told.number, told.said = 2, new
    points, every = told.shown()
    assert every == 4 and points[-1] == (77, 2, 77.2)
    assert [p[0] for p in points] == [*range(4, 77, 4), 77]


def test_metric_names_are_bounded_and_the_first_refused_one_is_reported(told: Told) -> None:
    told.say(*(message("metrics", step=s, values={f"m{i}": 1.0 for i in range(8)}) for s in (1, 2)))
    told.say(message("metrics", step=3, values={"m0": 1.0, "late": 1.0}))
    with told.database.read() as session:
        assert {s.name for s in metrics.metrics(session, told.job, [], 10).series} == {f"m{i}" for i in range(5)}
    (event,) = told.events("metrics-dropped")
    assert event.data == {"name": "m5", "series": 5} and "'m5'" in event.message
    assert told.steps("m0") == [1, 2, 3]
    with told.database.write() as session:
        job = lock_job(session, told.job)
        add_left_out_event(session, session.get_one(Attempt, (job.id, 1)), BOUNDS)
    (event,) = told.events("left-out")
    assert event.data == {"notes": 0, "values": 7}


def test_report_with_more_metric_names_than_sql_variables_is_accepted(told: Told) -> None:
    """More names at once than a statement of either database can have variables."""
    values = {f"loss-at-{i}": 1.0 for i in range(66_000)}
    told.say(message("metrics", step=1, values=values), message("metrics", step=2, values={"loss-at-0": 2.0}))
    (event,) = told.events("metrics-dropped")
    assert event.data["name"] == "loss-at-5" and told.steps("loss-at-0") == [1, 2]


def test_notes_beyond_the_bound_are_counted_and_left_out(told: Told) -> None:
    told.say(*(message("note", type="n", message=str(i)) for i in range(500)), portion=33)
    assert [e.message for e in told.events("note.n")] == [str(i) for i in range(10)]
    assert len(told.events("notes-left-out")) == 1
    told.say(checkpoint_message(5))
    assert len(told.events("checkpoint")) == 1, "what is no note is not bounded"
    with told.database.write() as session:
        job = lock_job(session, told.job)
        add_left_out_event(session, session.get_one(Attempt, (job.id, 1)), BOUNDS)
    (event,) = told.events("left-out")
    assert (event.data, event.message) == ({"notes": 490, "values": 0}, "490 notes of attempt 1 left out")
    told.next()
    told.say(message("note", type="n", message="again"))
    assert told.events("note.n")[-1].message == "again"


def alert(step: int, title: str, rank: int = 0, text: str = "") -> dict[str, Any]:
    return message("alert", rank, step=step, title=title, text=text, level="warning")


def test_alert_of_a_redone_step_is_stored_once(told: Told) -> None:
    told.say(alert(7, "spike", text="loss 9.5"), alert(7, "spike", text="loss 9.6"), alert(8, "o'h\"%"))
    told.next()
    told.say(alert(7, "spike", text="loss 9.7"), alert(8, "o'h\"%"), alert(8, "spike"), alert(9, "spike"))
    told.say(alert(7, "spike", rank=1), rank=1)
    told.next()
    told.say(alert(9, "spike"), alert(10, "spike"))
    stored = [(e.attempt, e.data["rank"], e.data["step"], e.message) for e in told.events("alert")]
    assert stored == [
        (1, 0, 7, "spike: loss 9.5"), (1, 0, 7, "spike: loss 9.6"), (1, 0, 8, "o'h\"%"),
        (2, 0, 8, "spike"), (2, 0, 9, "spike"), (2, 1, 7, "spike"), (3, 0, 10, "spike"),
    ]  # fmt: skip
    assert told.events("alert")[0].data == {
        "title": "spike",
        "text": "loss 9.5",
        "level": "warning",
        "step": 7,
        "rank": 0,
    }


def test_alerts_of_a_requested_branch_are_stored_again(told: Told) -> None:
    """The steps after ``from_step`` are trained anew, perhaps with other code, and are no repeated ones."""
    told.say(training_message(), alert(4, "spike"), alert(7, "spike"))
    with told.database.write() as session:
        lock_job(session, told.job).resume_from = {"step": 5, "attempt": 1}
    told.next()
    told.say(alert(5, "begin"), training_message(5, 1), alert(7, "spike"))
    told.next()  # after a kill
    told.say(training_message(5, 1), alert(7, "spike"), alert(8, "spike"))
    stored = [(e.attempt, e.data["step"], e.message) for e in told.events("alert")]
    assert stored == [(1, 4, "spike"), (1, 7, "spike"), (2, 5, "begin"), (2, 7, "spike"), (3, 8, "spike")]


def test_alerts_are_bounded_like_notes_and_redone_ones_do_not_count(told: Told) -> None:
    told.say(*(alert(step, "a") for step in range(8)))
    told.next()
    told.say(*(alert(step, "a") for step in range(30)))
    assert [(e.attempt, e.data["step"]) for e in told.events("alert")] == [(1, n) for n in range(8)] + [
        (2, n) for n in range(8, 18)
    ]
    assert len(told.events("notes-left-out")) == 1


def test_hook_samples_stay_bounded_by_periodic_thinning(told: Told) -> None:
    told.say(*(hook_message(step) for step in range(1, 1001)), portion=50)
    with told.database.read() as session:
        query = sa.select(HookSample.step).where(HookSample.job_id == told.job).order_by(HookSample.step)
        steps = list(session.scalars(query))
    assert len(steps) <= BOUNDS.samples + 2 * 256 and steps[-1] == 1000


def test_metrics_below_the_bound_are_stored_without_reading_the_table(told: Told) -> None:
    """The cost of a report must not grow with the series: whatever is asked of the table is bounded by the report itself."""
    told.log(range(1, 31))
    asked: list[str] = []
    sa.event.listen(told.database.engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    told.log(range(31, 40))
    assert asked and not [sql for sql in asked if "FROM metrics" in sql]


def test_events_table_refuses_update_and_delete_of_rows(told: Told, database: Database) -> None:
    told.say(message("note", type="n", message="x"))
    for change in (sa.update(Event).values(message="y"), sa.delete(Event)):
        with pytest.raises(sa.exc.DBAPIError, match="only ever added"), database.write() as session:
            session.execute(change)
    assert [e.message for e in told.events("note.n")] == ["x"]
    with database.write() as session:
        session.delete(session.get_one(Job, told.job))
    assert told.events("submitted", "note.n") == []


def test_events_page_of_a_long_history_uses_an_index(api: Api) -> None:
    job = api.submit()
    with api.database.write() as session:
        lock_job(session, job)
        rows = [{"job_id": job, "at": utc_now(), "type": "note.n", "message": str(i), "data": {}} for i in range(3000)]
        session.execute(sa.insert(Event), rows)
    page = api.client.get(f"/v1/jobs/{job}/events", params={"limit": 100}).json()
    later = api.client.get(f"/v1/jobs/{job}/events", params={"limit": 100, "cursor": page["next_cursor"]}).json()
    assert [e["message"] for e in later["items"]][:2] == ["99", "100"]
    query = sa.select(Event).where(Event.job_id == job, Event.id > 2000).order_by(Event.id).limit(100)
    compiled = query.compile(api.database.engine, compile_kwargs={"literal_binds": True})
    plan = "EXPLAIN QUERY PLAN " if api.database.is_sqlite else "EXPLAIN "
    with api.database.engine.connect() as connection:
        if not api.database.is_sqlite:
            connection.exec_driver_sql("ANALYZE events")
        lines = [str(row) for row in connection.exec_driver_sql(plan + str(compiled))]
    assert any("ix_events_job_id_id" in line or "pk_events" in line for line in lines), lines
    assert not any("SCAN events" in line or "Seq Scan" in line or "TEMP B-TREE" in line for line in lines), lines
