"""Readiness of this process to take requests, as ``/readyz`` reports it: the current state, component by component."""

from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar, cast

from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.plural import pluralize
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database
from ratchet_service.observability import disk_space as disk

MAX_CONCURRENT_FINISHES: Final = 4
"""Maximum number of attempts that the reconciler finishes at the same time: this reads and deletes files, mostly on few disks."""


T = TypeVar("T")

ROUND_SECONDS: Final = 60.0
"""Seconds without a completed round after which this process's reconciler counts as hanging, perhaps on a file system that does
not answer."""
FAILED_ROUNDS: Final = 5
"""Consecutive failed rounds, at least a second apart, after which nothing gets done; a brief fault causes fewer."""
BEAT_SECONDS: Final = 2.0
"""Seconds between two updates of the reconciler's marker file in the run directory."""
PROBE_SECONDS: Final = 1.0
"""Seconds for which a result of probing the run directory or the database is reused: anybody may request ``/readyz``, and must
not be able to cause disk writes or connections at will."""
_SILENT_SECONDS: Final = 15.0
"""Seconds without an update of the marker file, after which the reconciler of another process is reported with a warning."""


class Component(BaseModel):
    """The state of one component of the service. A component that makes the service unready is reported as a problem instead."""

    status: Literal["ok", "warning"] = "ok"
    detail: str


class Unready(Refused):
    """This process is not ready now (status 503). The client may try again, or use another service of the database."""

    code = "not-ready"


@dataclass
class ReconcilerHeartbeat:
    """Records the rounds of one reconciler. Other processes see the modification time of ``file``. ``clock``:
    monotonic seconds."""

    file: Path
    clock: Callable[[], float] = time.monotonic
    started_at: float = field(init=False)
    succeeded_at: float | None = None
    """Time at which the last successful round ended, by ``clock``; None before the first."""
    failures: int = 0
    """Number of failed rounds since the last successful one. ``error``: class name of the latest failure's error."""
    error: str = ""
    finishing_seconds: Collection[float] = ()
    """Seconds taken so far by each attempt that was being finished at the end of the last successful round."""
    _marked_at: float | None = None

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def record_round(self, finishing_seconds: Collection[float] = ()) -> None:
        """Record a successful round, and sometimes touch the marker file. ``finishing_seconds``: for each attempt that is being
        finished, the seconds that this has taken so far."""
        self.succeeded_at, self.failures, self.finishing_seconds = self.clock(), 0, finishing_seconds
        if self._marked_at is None or self.succeeded_at - self._marked_at >= BEAT_SECONDS:
            self._marked_at = self.succeeded_at
            with suppress(OSError):
                self.file.touch()

    def record_failure(self, error: Exception) -> None:
        """Record a round that ``error`` ended: the reconciler's thread runs, but the round may have done nothing."""
        self.failures, self.error = self.failures + 1, type(error).__name__

    def silence_seconds(self) -> float:
        """Return the seconds since the last successful round ended, or since this object was made if there was none."""
        return self.clock() - (self.started_at if self.succeeded_at is None else self.succeeded_at)


@dataclass
class CachedProbe(Generic[T]):
    """Caches the result of a probe for ``PROBE_SECONDS``. Concurrent callers wait for the same probe."""

    clock: Callable[[], float] = time.monotonic
    _probed_at: float | None = None
    _result: T | Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, probe: Callable[[], T]) -> T:
        """Return the result of the latest probe, or raise its error; call ``probe`` first if that is older than
        ``PROBE_SECONDS``."""
        with self._lock:
            now = self.clock()
            if self._probed_at is None or now - self._probed_at >= PROBE_SECONDS:
                try:
                    self._result = probe()
                except (Refused, SQLAlchemyError) as error:
                    self._result = error
                self._probed_at = (
                    self.clock()
                )  # after the probe: a caller that waited for a slow disk does not probe it again
            found = self._result
        if isinstance(found, Exception):
            raise found
        return cast(T, found)


@dataclass
class Health:
    """What this process knows about its readiness. ``heartbeat``: its reconciler's; None if it runs none."""

    stopping: bool = False
    heartbeat: ReconcilerHeartbeat | None = None
    last_code: str | None = None
    disk: CachedProbe[str] = field(default_factory=CachedProbe)
    database: CachedProbe[None] = field(default_factory=CachedProbe)

    def is_new_code(self, code: str | None) -> bool:
        """True if ``code`` differs from the code of the previous call. ``code``: the error code that says why the process is not
        ready; None: it is ready."""
        before, self.last_code = self.last_code, code
        return before != code


def check(health: Health, database: Database, paths: HomePaths) -> dict[str, Component]:
    """Return the state of all components of this process, by name, if it is ready. Otherwise raise ``Unready``, another
    ``RatchetError`` or SQLAlchemy's error. May write to the run directory."""
    if health.stopping:
        raise Unready("the service is shutting down: it accepts no new requests", code="shutting-down")
    health.database.get(database.ping)
    found = {"database": Component(detail=_check_schema(database))}
    full = disk.database_disk_full(database)
    if full is not None:
        raise full
    found["run_directory"] = Component(detail=health.disk.get(lambda: _check_writable(paths.home)))
    found["reconciler"] = _check_reconciler(health.heartbeat, paths)
    return found


def _check_schema(database: Database) -> str:
    """Return a text with the database's schema revision. Raises ``Unready`` or another ``RatchetError`` if it is not this
    version's."""
    with database.read() as session:
        revision = migrate.revision_of(session.connection())
    if revision == migrate.head_revision():
        return f"answers, revision {revision}"
    refused = migrate.refusal(revision) if revision is not None else None
    if refused is not None:
        raise refused
    raise Unready(
        f"the database has revision {revision or '(none)'}, this version works with {migrate.head_revision()}: it was "
        "replaced while the service ran; restart the service",
        code="schema-older",
    )


def _check_writable(home: Path) -> str:
    """Write to a file without a name in the run directory ``home``, and return a text. Raises ``Unready`` or ``Refused``."""
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"ready")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk.disk_full_error(home, "nothing can be stored in the run directory") from error
        why = f"the run directory {home} cannot be written: {error.strerror or error}"
        raise Unready(
            f"{why}. No job can be submitted and no attempt starts", code="run-directory-unwritable"
        ) from error
    free = disk.free_bytes(home)
    return "written" if free is None else f"written, {free / 2**30:.1f} GiB free"


def _check_reconciler(heartbeat: ReconcilerHeartbeat | None, paths: HomePaths) -> Component:
    """Return the state of this process's reconciler. If this process runs none, return what is known of reconcilers in other
    processes. Raises ``Unready`` if this process's reconciler fails repeatedly or is stuck."""
    if heartbeat is not None:
        silence, failures = heartbeat.silence_seconds(), heartbeat.failures
        if failures >= FAILED_ROUNDS or (failures and silence > ROUND_SECONDS):
            raise Unready(
                f"the last {pluralize(failures, 'round')} of this process's reconciler failed ({heartbeat.error}), "
                "the last successful "
                f"one ended {silence:.0f} s ago: unfinished work is tried again in every round. Its log has the cause",
                code="reconciler-failing",
            )
        if silence > ROUND_SECONDS:
            raise Unready(
                f"the reconciler of this process has finished no round for {silence:.0f} s: nothing is started or ended. Its "
                "log has the cause; a file system may not respond",
                code="reconciler-stalled",
            )
        slow = [seconds for seconds in heartbeat.finishing_seconds if seconds > ROUND_SECONDS]
        if len(slow) >= MAX_CONCURRENT_FINISHES:
            raise Unready(
                f"{len(slow)} ends of attempts take longer than {ROUND_SECONDS:g} s, the longest {max(slow):.0f} s so far: no "
                "other attempt is ended before one of them finishes. A file system may not respond",
                code="reconciler-stalled",
            )
        last = "starting" if heartbeat.succeeded_at is None else f"last round {silence:.0f} s ago"
        if failures:
            return Component(
                status="warning", detail=f"in this process, {last}; {failures} failed since: {heartbeat.error}"
            )
        if slow:
            text = f"in this process, {last}; ends of attempts take long: {len(slow)}, the longest {max(slow):.0f} s so far"
            return Component(status="warning", detail=text)
        return Component(detail=f"in this process, {last}")
    try:
        age = max(0.0, time.time() - paths.reconciler_marker.stat().st_mtime)
    except OSError:
        return Component(status="warning", detail="none in this process, and none has ever run in the run directory")
    status: Literal["ok", "warning"] = "ok" if age <= _SILENT_SECONDS else "warning"
    return Component(status=status, detail=f"in another process, last seen {age:.0f} s ago")
