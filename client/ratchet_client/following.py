"""The client's half that looks on: series, logs, events, waiting. All iterators are lazy: nothing is asked before it is needed,
and closing one (or leaving the loop and dropping it) closes its connection."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Literal, TypeAlias, TypeVar

from pydantic import BaseModel

from ratchet_client import sse
from ratchet_client.calls import PAGE, Calls
from ratchet_client.errors import ServiceFault, ServiceUnreachable
from ratchet_client.polling import TERMINAL, Pace, Series, Snapshot, looks
from ratchet_client.transport import Params
from ratchet_contract import api
from ratchet_contract.phases import JobPhase

if TYPE_CHECKING:
    from ratchet_client.job import Job

M = TypeVar("M", bound=BaseModel)
WhichAttempt: TypeAlias = int | Literal["all"] | None
"""Whose logs: None the newest attempt's (and, when following, those that come later)."""
_MOST_POINTS = 10_000
_PATIENCE = 120.0


class Following(Calls):
    """Calls that only read, and read again."""

    def view(self, job: str | Job) -> api.JobView:
        """The job as it is now, as data. Raises ``NotFound``."""
        return self._get(self._path(job), api.JobView)

    def hook(self, job: str | Job) -> api.HookView:
        """What the communication hook does: phase, iteration, compression rate, residual norm per rank.

        >>> hook = client.hook(job_id)
        >>> hook.name, hook.phase, hook.iteration == client.job(job_id).progress.step
        ('powerSGD', 'compressing', True)
        """
        return self._get(self._path(job, "hook"), api.HookView)

    def hook_history(self, job: str | Job, *, rank: int | None = None) -> Iterator[api.HookSampleView]:
        """Kept summaries by step and rank, oldest first; with ``rank`` those of one alone.

        >>> {sample.summary.phase for sample in client.hook_history(job_id, rank=0)} == {"warm-up", "compressing"}
        True
        """
        params: Params = {"rank": rank, "limit": PAGE}
        return self._job_pages(api.HookSampleView, params, job, "hook", "history")

    def hook_series(self, job: str | Job, figure: str = "residual_norm") -> dict[int, Series]:
        """``figure`` of ``HookSummary`` over the steps, by rank (``compression_rate``, ``bytes_after`` ...); without steps at
        which the hook has none.

        >>> norms = client.hook_series(job_id)
        >>> sorted(norms), len(norms[0].steps) == len(norms[0].values) > 0
        ([0], True)
        """
        out: dict[int, Series] = {}
        for sample in self.hook_history(job):
            value = getattr(sample.summary, figure)
            if value is not None:
                curve = out.setdefault(sample.summary.rank, Series([], []))
                curve.steps.append(sample.summary.step)
                curve.values.append(value)
        return out

    # --- series -------------------------------------------------------------------------------------------------------

    def metrics(self, job: str | Job, *, name: Collection[str] = (), max_points: int | None = None) -> api.MetricsView:
        """Series over steps with attempt and time of each point, of the names ``name`` or all; one longer than ``max_points``
        is thinned, the last point is always there."""
        params: Params = {"name": list(name), "max_points": max_points}
        return self._get(self._path(job, "metrics"), api.MetricsView, params)

    def series(self, job: str | Job, *names: str) -> dict[str, Series]:
        """Curves by name, all of them without ``names``; thinned beyond 10000 points. Steps that a later attempt did again are
        there once. A name that nobody reported (yet) has an empty curve.

        >>> loss = client.series(job_id, "loss")["loss"]
        >>> loss.steps[-1] == client.job(job_id).progress.step, len(loss.steps) == len(loss.values)
        (True, True)
        """
        found = self.metrics(job, name=names, max_points=_MOST_POINTS).series
        return {s.name: Series([p.step for p in s.points], [p.value for p in s.points]) for s in found}

    # --- logs and events ----------------------------------------------------------------------------------------------

    def events(
        self, job: str | Job, *, attempt: int | None = None, type: str | None = None, page_size: int = PAGE
    ) -> Iterator[api.EventView]:
        """The history that is there now, oldest first; of one ``attempt``, or of one ``type``.

        >>> next(client.events(job_id)).type
        'submitted'
        """
        params: Params = {"attempt": attempt, "type": type, "limit": page_size}
        return self._job_pages(api.EventView, params, job, "events")

    def logs(self, job: str | Job, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
             grep: str | None = None, since: str | None = None) -> Iterator[api.LogLine]:  # fmt: skip
        """Lines of the ranks' logs that are there now. ``tail``: only the last lines of each rank; ``grep``: only lines with
        this text; ``since`` (RFC 3339): only lines written since then, to about six seconds. Where a log has lost its middle, a
        line with ``left_out`` tells how many bytes."""
        params: Params = {"rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since}
        return self._job_pages(api.LogLine, params, job, "logs")

    def download_logs(self, job: str | Job, file: str | os.PathLike[str], *, rank: int | None = None,
                      attempt: WhichAttempt = "all") -> Path:  # fmt: skip
        """Write the logs as they are now to ``file``, which appears when all is there; without ``rank``, each line begins with
        ``[attempt.rank]``. A download that breaks is begun again within the client's ``retry_for``.

        >>> client.download_logs(job_id, directory / "job.log", rank=0).name
        'job.log'
        """
        target, job = Path(file), self.job_id(job)
        end = time.monotonic() + self._transport.retry_for
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as part:
            partial = Path(part.name)
            try:
                while not self._download(job, part, {"rank": rank, "attempt": attempt}, time.monotonic() >= end):
                    time.sleep(0.5)
                part.close()
                partial.chmod(0o644)
                return partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    def _download(self, job: str | Job, part: IO[bytes], params: Params, last: bool) -> bool:
        part.seek(0)
        part.truncate()
        try:
            with self._transport.stream(self._path(job, "logs"), params, {"Accept": "text/plain"}) as response:
                for block in response.iter_bytes():
                    part.write(block)
        except (ServiceUnreachable, ServiceFault):
            if last:
                raise
            return False
        return True

    # --- following ----------------------------------------------------------------------------------------------------

    def follow_events(self, job: str | Job, *, after: int | None = None,
                      on_gap: Callable[[str], None] | None = None) -> Generator[api.EventView]:  # fmt: skip
        """Events from the first (or after the event with id ``after``) until the job has ended, across restarts of the service.
        ``on_gap`` is told once per interruption.

        >>> seen = [event.id for event in client.follow_events(job_id)]
        >>> [event.id for event in client.follow_events(job_id, after=seen[2])] == seen[3:]
        True
        """
        last = None if after is None else str(after)
        return self._follow(job, "events", {"follow": "true"}, api.EventView, last, on_gap)

    def follow_logs(self, job: str | Job, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
                    grep: str | None = None, since: str | None = None, after: Collection[str] = (),
                    on_gap: Callable[[str], None] | None = None) -> Generator[api.LogLine]:  # fmt: skip
        """Log lines as they are written, until the job has ended. ``after``: go on behind these lines, the ``id`` of the last
        one that was read of each rank. ``on_gap`` is told once per interruption.

        >>> read = [line.id for line in client.follow_logs(job_id, rank=0, attempt="all")]
        >>> [line.id for line in client.follow_logs(job_id, rank=0, attempt="all", after=read[:1])] == read[1:]
        True
        """
        params: Params = {
            "follow": "true", "rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since
        }  # fmt: skip
        return self._follow(job, "logs", params, api.LogLine, ",".join(after) or None, on_gap)

    def _follow(self, job: str | Job, what: str, params: Params, model: type[M], last: str | None,
                on_gap: Callable[[str], None] | None) -> Generator[M]:  # fmt: skip
        job = self.job_id(job)
        found = sse.follow(
            self._transport, self._path(job, what), params, lambda: self.view(job).phase.terminal, last, on_gap
        )
        with closing(found):
            for event in found:
                yield model.model_validate_json(event.data)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, job: str | Job, until: Collection[JobPhase] = TERMINAL, deadline: float | None = None,
             on_change: Callable[[api.JobView], None] | None = None) -> api.JobView:  # fmt: skip
        """The job once its phase is one of ``until``, or once it has ended.

        ``deadline``: seconds from now, then ``DeadlineReached``; a service that is away is waited for until then, or for
        ``retry_for`` seconds without a deadline. ``on_change`` is called with every new phase or reason.

        >>> client.wait(job_id, deadline=60).phase.value
        'SUCCEEDED'
        """
        told, job = None, self.job_id(job)
        for now in looks(job, lambda: self.view(job), lambda view: view, until, deadline, Pace(0.1, 1.0)):
            if (now.phase, now.reason) != told and on_change is not None:
                on_change(now)
            told = (now.phase, now.reason)
        return now

    def poll(self, job: str | Job, every: float = 1.0, until: Collection[JobPhase] | None = None,
             deadline: float | None = None) -> Iterator[Snapshot]:  # fmt: skip
        """Snapshots every ``every`` seconds, for a plot that refreshes; ends with the one that shows the job ended, or in a phase
        of ``until``. A loop body that takes longer than ``every`` delays the next one.

        ``deadline``: seconds, then ``DeadlineReached``. A service that is restarted is found again; one that stays away is
        waited for until the deadline, or for two minutes without one, then ``ServiceUnreachable``.

        >>> for now in client.poll(job_id, every=0.5, deadline=60):
        ...     print(now.job.phase.value, now.hook.phase, "loss" in now.metrics)
        SUCCEEDED compressing True
        """
        pace, job = Pace(every, every, _PATIENCE), self.job_id(job)
        yield from looks(job, lambda: self._snapshot(job), lambda seen: seen.job, until or (), deadline, pace)

    def _snapshot(self, job: str | Job) -> Snapshot:
        view = self.view(job)
        newest = self.metrics(job, max_points=2).series if view.attempt else []
        values = {s.name: s.points[-1].value for s in newest if s.points}
        return Snapshot(view, self.hook(job), MappingProxyType(values), datetime.now(UTC))
