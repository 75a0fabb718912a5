"""Is this process fit to take requests? What ``/readyz`` tells: the truth of this moment, component by component."""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar, cast

from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.plural import counted
from ratchet_service import disk, migrate
from ratchet_service.background import MOST
from ratchet_service.database import Database

T = TypeVar("T")

ROUND_SECONDS: Final = 60.0
"""A reconciler of this process that has ended no round for so long hangs, on a file system that does not answer perhaps."""
FAILED_ROUNDS: Final = 5
"""So many in a row, a second and more apart, and nothing gets done: what a moment's fault takes is less."""
BEAT_SECONDS: Final = 2.0
"""Between two marks of a reconciler in the run directory."""
PROBE_SECONDS: Final = 1.0
"""For so long an answer of the run directory's or the database's stands: anybody may ask ``/readyz``, and none can make the disk
write, or connections be made, at will."""
_SILENT_SECONDS: Final = 15.0
"""Other processes' reconcilers that have left no mark for so long are told as silent."""


class Component(BaseModel):
    status: Literal["ok", "warning"] = "ok"
    detail: str


class Unready(Refused):
    """503: not now, try again, or another service of the same database."""

    code = "not-ready"


@dataclass
class Beat:
    """What a reconciler leaves behind each round: for its own process, and as the time of a file for the others."""

    file: Path
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    succeeded: float | None = None
    """When the last successful round ended."""
    failures: int = 0
    """Rounds since then; ``error``: the last one's, by its class."""
    error: str = ""
    jump: str = ""
    ends: Collection[float] = ()
    """For how many seconds those ends of attempts had taken that were under way at the last successful round."""
    _marked: float | None = None

    def __post_init__(self) -> None:
        self.began = self.clock()

    def round(self, ends: Collection[float] = ()) -> None:
        """A round is over, and went well. A disk that takes no mark stops nobody."""
        self.succeeded, self.failures, self.ends = self.clock(), 0, ends
        if self._marked is None or self.succeeded - self._marked >= BEAT_SECONDS:
            self._marked = self.succeeded
            with suppress(OSError):
                self.file.touch()

    def failed(self, error: Exception) -> None:
        """A round has failed: the thread is there, and nothing may have been done."""
        self.failures, self.error = self.failures + 1, type(error).__name__

    def jumped(self, seconds: float) -> None:
        """The wall clock has jumped: told from then on, so that whoever wonders about times finds it."""
        self.jump = f"; at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC the wall clock had jumped by {seconds:+.0f} s"

    def silence(self) -> float:
        """Seconds since the end of the last successful round, or since the start."""
        return self.clock() - (self.began if self.succeeded is None else self.succeeded)


@dataclass
class Looks(Generic[T]):
    """A look that is made once in ``PROBE_SECONDS``, however many ask; they wait for who makes it."""

    clock: Callable[[], float] = time.monotonic
    _made_at: float | None = None
    _found: T | Exception | None = None
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def look(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, or raises: a refusal, or SQLAlchemy's errors."""
        with self._one_at_a_time:
            now = self.clock()
            if self._made_at is None or now - self._made_at >= PROBE_SECONDS:
                try:
                    self._found = make()
                except (Refused, SQLAlchemyError) as error:
                    self._found = error
                self._made_at = self.clock()  # from the answer on: who waited for a slow disk does not ask it again
            found = self._found
        if isinstance(found, Exception):
            raise found
        return cast(T, found)


@dataclass
class Health:
    """``stopping``: SIGTERM has come. ``beat``: of this process's reconciler, None where it has none."""

    stopping: bool = False
    beat: Beat | None = None
    told: str | None = None
    disk: Looks[str] = field(default_factory=Looks)
    database: Looks[None] = field(default_factory=Looks)

    def is_news(self, code: str | None) -> bool:
        """Is it another answer than the last one? Probes ask every few seconds, and the log is to have it once."""
        before, self.told = self.told, code
        return before != code


def check(health: Health, database: Database, paths: HomePaths) -> dict[str, Component]:
    """All components, by name. Raises ``Unready`` and other errors of the tree, the first that makes this process unfit; and
    SQLAlchemy's, where the database does not answer."""
    if health.stopping:
        raise Unready("the service is ending: it takes no new requests", code="shutting-down")
    health.database.look(database.ping)
    found = {"database": Component(detail=_schema(database))}
    full = disk.without_room(database)
    if full is not None:
        raise full
    found["run_directory"] = Component(detail=health.disk.look(lambda: _writable(paths.home)))
    found["reconciler"] = _reconciler(health.beat, paths)
    return found


def _schema(database: Database) -> str:
    """Raises ``NewerSchema``, and ``Unready`` for an older one: it was put back under this process."""
    with database.read() as session:
        revision = migrate.revision_of(session.connection())
    if revision == migrate.head():
        return f"answers, revision {revision}"
    wrong = migrate.newer(revision) if revision is not None else None
    if wrong is not None:
        raise migrate.NewerSchema(wrong)
    raise Unready(
        f"the database has revision {revision or '(none)'}, this version works with {migrate.head()}: it was replaced under the "
        "service; start the service again",
        code="schema-older",
    )


def _writable(home: Path) -> str:
    """Raises ``Unready``, or the refusal of a full disk. A file without a name is written."""
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"ready")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk.full(home, "nothing can be stored in the run directory") from error
        why = f"the run directory {home} cannot be written: {error.strerror or error}"
        raise Unready(
            f"{why}. Nothing can be submitted and no attempt begins", code="run-directory-unwritable"
        ) from error
    free = disk.free_bytes(home)
    return "written" if free is None else f"written, {free / 2**30:.1f} GiB free"


def _reconciler(beat: Beat | None, paths: HomePaths) -> Component:
    """Raises ``Unready`` where this process's own hangs or fails. Others' silence is no fault of this one, which still takes
    requests."""
    if beat is not None:
        silence, failures = beat.silence(), beat.failures
        if failures >= FAILED_ROUNDS or (failures and silence > ROUND_SECONDS):
            raise Unready(
                f"the last {counted(failures, 'round')} of this process's reconciler failed ({beat.error}), the last successful "
                f"one ended {silence:.0f} s ago: what is not done is tried again in every round. Its log tells why",
                code="reconciler-failing",
            )
        if silence > ROUND_SECONDS:
            raise Unready(
                f"the reconciler of this process has finished no round for {silence:.0f} s: nothing is started or ended. Its log "
                "tells why; a file system that does not answer, perhaps",
                code="reconciler-stalled",
            )
        slow = [seconds for seconds in beat.ends if seconds > ROUND_SECONDS]
        if len(slow) >= MOST:
            raise Unready(
                f"{len(slow)} ends of attempts take longer than {ROUND_SECONDS:g} s, the longest {max(slow):.0f} s so far: no "
                "other attempt is ended before one of them is over. A file system that does not answer, perhaps",
                code="reconciler-stalled",
            )
        last = "starting" if beat.succeeded is None else f"last round {silence:.0f} s ago"
        if failures:
            return Component(status="warning", detail=f"in this process, {last}; {failures} failed since: {beat.error}")
        if slow:
            text = f"in this process, {last}; ends of attempts take long: {len(slow)}, the longest {max(slow):.0f} s so far"
            return Component(status="warning", detail=text)
        return Component(detail=f"in this process, {last}{beat.jump}")
    try:
        age = max(0.0, time.time() - paths.reconciler_mark.stat().st_mtime)
    except OSError:
        return Component(status="warning", detail="none in this process, and none was ever seen in the run directory")
    status: Literal["ok", "warning"] = "ok" if age <= _SILENT_SECONDS else "warning"
    return Component(status=status, detail=f"in another process, last seen {age:.0f} s ago")
