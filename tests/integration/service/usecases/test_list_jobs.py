"""Lists of jobs: every filter in every order gives what it should, and costs no more with many jobs than with few."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from benchmarks.service_rows import fill
from ratchet_contract.phases import JobPhase
from ratchet_service.db.engine import Database, sqlite_url, utc_now
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Job, JobLabel
from ratchet_service.usecases import list_jobs as listing
from ratchet_service.usecases.list_jobs import JobFilter, list_jobs
from tests.support.api import SPEC

pytestmark = pytest.mark.takes_turns

SORTS: list[listing.Sort] = ["created", "-created", "name", "-name", "priority", "-priority"]


def spec_of(name: str) -> dict[str, Any]:
    return SPEC | {"name": name, "hook": {"name": "allreduce"}, "policy": {"max_preemptions": None, "max_failures": 3}}


def make(number: int, draw: random.Random) -> tuple[Job, dict[str, str]]:
    """One of very few names, owners and labels; some at the very same instant."""
    at = utc_now() - timedelta(seconds=number // 3)
    phase = draw.choice([JobPhase.QUEUED, JobPhase.SUCCEEDED, JobPhase.FAILED])
    name, owner = draw.choice("ab"), draw.choice(["alice", "bob"])
    resolved = {"device": "cpu", "backend": "gloo", "threads_per_rank": 1, "python": "/p"}
    job = Job(
        id=f"job-{number:012d}", name=name, owner=owner, phase=phase, spec=spec_of(name), resolved=resolved, spec_digest="",
        priority=draw.randint(0, 2), created_at=at, updated_at=at,
    )  # fmt: skip
    labels = {"team": draw.choice("xy")} | ({"rare": "1"} if number % 17 == 0 else {})
    return job, labels


@pytest.fixture
def jobs(database: Database) -> dict[str, tuple[Job, dict[str, str]]]:
    draw = random.Random(7)
    made = [make(number, draw) for number in range(60)]
    with database.write() as session:
        session.add_all(job for job, _ in made)
        session.flush()
        for job, labels in made:
            rows = (JobLabel(job_id=job.id, key=k, value=v, created_at=job.created_at) for k, v in labels.items())
            session.add_all(rows)
    return {job.id: (job, labels) for job, labels in made}


def expected(jobs: dict[str, tuple[Job, dict[str, str]]], wanted: JobFilter) -> list[str]:
    def holds(job: Job, labels: dict[str, str]) -> bool:
        return (
            (not wanted.phases or job.phase in wanted.phases)
            and wanted.name in (None, job.name)
            and wanted.owner in (None, job.owner)
            and (wanted.search is None or job.name.startswith(wanted.search) or job.id.startswith(wanted.search))
            and all(labels.get(key) == value for key, value in wanted.labels)
        )

    keys: dict[str, Callable[[Job], Any]] = {
        "created": lambda job: job.created_at,
        "name": lambda job: job.name,
        "priority": lambda job: job.priority,
    }
    key = keys[wanted.sort.removeprefix("-")]
    found = [job for job, labels in jobs.values() if holds(job, labels)]
    return [job.id for job in sorted(found, key=lambda job: (key(job), job.id), reverse=wanted.sort.startswith("-"))]


def filters() -> Iterator[JobFilter]:
    phases = [(), (JobPhase.FAILED,), (JobPhase.FAILED, JobPhase.QUEUED), (JobPhase.RUNNING,)]
    labels = [(), (("team", "x"),), (("team", "x"), ("rare", "1")), (("team", "nobody"),)]
    for number, (phase, label, name, owner) in enumerate(itertools.product(phases, labels, (None, "a"), (None, "bob"))):
        for sort in {SORTS[number % 6], "-created"}:
            yield JobFilter(phase, label, name, sort, owner, (None, "job-00000000003", "a")[number % 3])


@pytest.mark.parametrize("few", [0, 500])
def test_list_jobs_pages_correctly_for_every_filter_and_order(
    database: Database, jobs: dict[str, tuple[Job, dict[str, str]]], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``few``: with 0 all lists are read along an index, with 500 all filtered ones are looked up and sorted."""
    monkeypatch.setattr(listing, "MAX_SELECTIVE_JOBS", few)
    with database.read() as session:
        for wanted in filters():
            seen: list[str] = []
            cursor = None
            while True:
                page = list_jobs(session, wanted, 9, cursor)
                seen += [view.id for view in page.items]
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert seen == expected(jobs, wanted), wanted


def test_list_jobs_by_a_patched_label_orders_by_job_creation(
    database: Database, jobs: dict[str, tuple[Job, dict[str, str]]]
) -> None:
    from ratchet_contract.api.requests import PatchRequest
    from ratchet_service.usecases.update_job import patch

    for job_id in ("job-000000000050", "job-000000000005", "job-000000000030"):
        with database.write() as session:
            patch(session, job_id, PatchRequest(labels={"late": "1"}), None)
    with database.read() as session:
        page = list_jobs(session, JobFilter(labels=(("late", "1"),)), 10, None)
    assert [view.id for view in page.items] == ["job-000000000005", "job-000000000030", "job-000000000050"]


def test_list_jobs_pages_completely_when_label_and_job_times_differ(
    database: Database, jobs: dict[str, tuple[Job, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica of the version before leaves the time of a label to the database."""
    monkeypatch.setattr(listing, "MAX_SELECTIVE_JOBS", 1)
    with database.write() as session:
        session.execute(sa.update(JobLabel).where(JobLabel.job_id == "job-000000000050").values(created_at=utc_now()))
    seen, cursor = list[str](), None
    with database.read() as session:
        while cursor is not None or not seen:
            page = list_jobs(session, JobFilter(labels=(("team", jobs["job-000000000050"][1]["team"]),)), 1, cursor)
            seen, cursor = seen + [view.id for view in page.items], page.next_cursor
    wanted = {job_id for job_id, (_, labels) in jobs.items() if labels["team"] == jobs["job-000000000050"][1]["team"]}
    assert seen[0] == "job-000000000050" and sorted(seen) == sorted(wanted)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Database]]:
    """Databases with 2,000 and with 30,000 ended jobs."""
    folder = tmp_path_factory.mktemp("crowded")

    def crowd(number: int) -> Database:
        database = Database(sqlite_url(folder / f"{number}.db"))
        upgrade(database)
        job, _ = make(0, random.Random(1))
        with database.write() as session:
            session.add(job)
        fill(database, 1, number, job.id)
        return database

    made = crowd(2_000), crowd(30_000)
    yield made
    for database in made:
        database.dispose()


def effort(database: Database, wanted: JobFilter) -> int:
    """Hundreds of instructions that SQLite's machine takes for a page from the middle of the list."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return 0

    with database.read() as session:
        cursor = list_jobs(session, wanted, 20, None).next_cursor
        raw: Any = session.connection().connection.driver_connection
        raw.set_progress_handler(tick, 100)
        list_jobs(session, wanted, 20, cursor)
        raw.set_progress_handler(None, 0)
    return count


@pytest.mark.parametrize(
    "wanted",
    [
        JobFilter(),
        JobFilter(sort="name"),
        JobFilter(sort="priority"),
        JobFilter(phases=(JobPhase.SUCCEEDED,)),
        JobFilter(phases=(JobPhase.RUNNING,)),
        JobFilter(labels=(("team", "t-3"),)),
        JobFilter(labels=(("team", "nobody"),)),
        JobFilter(name="n-3"),
        JobFilter(owner="o-3"),
        JobFilter(search="n-3"),
        JobFilter(search="job-00000000000"),
        JobFilter(search="nobody"),
        JobFilter(labels=(("team", "t-3"),), phases=(JobPhase.SUCCEEDED,), name="n-3"),
    ],
    ids=str,
)
def test_list_jobs_page_cost_does_not_grow_with_the_number_of_jobs(
    wanted: JobFilter, crowded: tuple[Database, Database]
) -> None:
    """Instructions, not seconds. A fiftieth of the jobs has each name, owner and label: more than ``FEW`` of the many."""
    few, many = (effort(database, wanted) for database in crowded)
    assert many <= 2 * few + 60, (few, many)  # up to FEW jobs are read at once where a filter holds for no more
