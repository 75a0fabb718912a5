"""A database with very many jobs: copies of one real job's rows, made inside the database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa

from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Event, Job, JobLabel, Metric

EVENTS: Final = 4
"""Event rows of each copied job; one row of each other kind, two metrics."""
_BATCH: Final = 50_000
_PHASES: Final = "CASE WHEN i % 100 = 7 THEN 'FAILED' WHEN i % 100 = 8 THEN 'CANCELLED' ELSE 'SUCCEEDED' END"


def job_id(number: int) -> str:
    return f"job-{number:012d}"


def fill(database: Database, first: int, last: int, template: str) -> None:
    """Jobs ``first`` to ``last`` as ended copies of ``template``, ten seconds apart; a fiftieth has each name, owner and label.
    Then the database's own statistics, which it would have made by then."""
    for begin in range(first, last + 1, _BATCH):
        with database.write() as session:
            _copy(session.connection(), database.is_sqlite, begin, min(begin + _BATCH - 1, last), template)
    _analyse(database)


def queue(database: Database, jobs: int, owners: int, template: str) -> None:
    """So many queued copies of ``template``, a queued job that has been told why it waits, by turns of ``owners``; ten
    seconds apart, the last one the newest."""
    sqlite = database.is_sqlite
    ident, when = _ident(sqlite), _when(sqlite, f"({jobs} - i)")
    numbers = _numbers(sqlite, 1, jobs)
    with database.write() as session:
        insert = _Insert(session.connection(), numbers)
        insert(Job, {"id": ident, "owner": f"'o-' || (i % {owners})", "created_at": when, "updated_at": when}, template)
    _analyse(database)


def _ident(sqlite: bool) -> str:
    return "printf('job-%012d', i)" if sqlite else "'job-' || lpad(i::text, 12, '0')"


def _when(sqlite: bool, number: str) -> str:
    """``number`` times ten seconds ago."""
    return (
        f"strftime('%Y-%m-%d %H:%M:%f000', 'now', '-' || ({number} * 10) || ' seconds')"
        if sqlite
        else f"now() - {number} * interval '10 seconds'"
    )


def _numbers(sqlite: bool, first: int, last: int) -> str:
    return (
        f"WITH RECURSIVE n(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i < {last})"
        if sqlite
        else f"WITH n(i) AS (SELECT generate_series({first}, {last}))"
    )


def _analyse(database: Database) -> None:
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE" if database.is_sqlite else "VACUUM ANALYZE")


def _copy(connection: sa.Connection, sqlite: bool, first: int, last: int, template: str) -> None:
    ident, when, numbers = _ident(sqlite), _when(sqlite, "i"), _numbers(sqlite, first, last)
    insert = _Insert(connection, numbers)
    name = "'n-' || (i % 50)"
    now = {"created_at": when, "updated_at": when, "started_at": when, "ended_at": when}
    insert(
        Job, {"id": ident, "name": name, "owner": "'o-' || (i % 50)", "phase": _PHASES, "attempt": "1", **now}, template
    )
    insert(JobLabel, {"job_id": ident, "key": "'team'", "value": "'t-' || (i % 50)", "created_at": when})
    nothing = "'{}'" if sqlite else "'{}'::json"
    empty = "'[]'" if sqlite else "'[]'::json"
    token = "'0'"
    insert(Attempt, {
        "job_id": ident, "number": "1", "phase": "'ENDED'", "outcome": "'succeeded'", "cause": "'completed'", "last_step": "100",
        "report_token_hash": token, "launch": nothing, "results": nothing, "created_at": when, "ended_at": when,
    })  # fmt: skip
    insert(AttemptNode, {
        "job_id": ident, "attempt": "1", "node": "0", "gpus": empty, "cpu_slots": empty, "phase": "'ENDED'", "acked": nothing,
    })  # fmt: skip
    no, yes = ("0", "1") if sqlite else ("false", "true")
    insert(Checkpoint, {
        "job_id": ident, "step": "100", "attempt": "1", "digest": token, "size": "1000", "files": "1", "reason": "'end'",
        "finished": yes, "state": "'committed'", "adopted": no, "pinned": no, "created_at": when,
    })  # fmt: skip
    for _ in range(EVENTS):
        insert(
            Event,
            {"job_id": ident, "at": when, "type": "'note.bench'", "attempt": "1", "message": name, "data": nothing},
        )
    for name_ in ("'loss'", "'lr'"):
        insert(Metric, {"job_id": ident, "name": name_, "step": "1", "attempt": "1", "value": "0.5", "at": when})


class _Insert:
    """``INSERT ... SELECT`` over the numbers; columns that are not given come from the template's row, or are left out."""

    def __init__(self, connection: sa.Connection, numbers: str) -> None:
        self._connection, self._numbers = connection, numbers

    def __call__(self, model: Any, given: Mapping[str, str], template: str | None = None) -> None:
        table = model.__table__
        values = dict(given)
        if template is not None:
            values |= {c.name: f"t.{c.name}" for c in table.columns if c.name not in given}
        source = "n" if template is None else f"n, {table.name} t WHERE t.id = '{template}'"
        columns = ", ".join(f'"{name}"' for name in values)
        statement = (
            f"INSERT INTO {table.name} ({columns}) {self._numbers} SELECT {', '.join(values.values())} FROM {source}"
        )
        self._connection.execute(sa.text(statement.replace(":", r"\:")))
