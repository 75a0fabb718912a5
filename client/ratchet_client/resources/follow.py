"""Observes a job: state, series, logs, events, waiting. The iterators send a request only when its result is needed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from ratchet_client.http import sse
from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Params
from ratchet_client.resources.export_download import temporary_sibling
from ratchet_client.resources.poll import TERMINAL, Pace, Series, Snapshot, WhichAttempt, poll_until
from ratchet_client.resources.requests import PAGE, Calls
from ratchet_contract.api import views
from ratchet_contract.api.trackers import TrackerView
from ratchet_contract.phases import JobPhase

if TYPE_CHECKING:
    from ratchet_client.resources.job import Job

M = TypeVar("M", bound=BaseModel)
_MOST_POINTS = 10_000
_MOST_SAMPLES = 1000
_PATIENCE = 120.0


class Following(Calls):
    """The part of ``RatchetClient`` that observes a job, once or repeatedly, and changes nothing in the service."""

    def view(self, job: str | Job) -> views.JobView:
        """Return the current state of the job as data. Raises ``NotFound``."""
        return self._get(self._path(job), views.JobView)

    def trackers(self, job: str | Job) -> Iterator[TrackerView]:
        """Yield the job's runs in experiment trackers; none before it trains."""
        return self._pages(self._path(job, "trackers"), TrackerView, {})

    def hook(self, job: str | Job) -> views.HookView:
        """Return the state of the communication hook, such as its phase and the residual norm per rank. ``phase`` is None if
        neither the running attempt nor the checkpoint that the next one starts from has figures of this hook.

        >>> hook = client.hook(job_id)
        >>> hook.name, hook.phase, hook.iteration == client.job(job_id).progress.step
        ('powerSGD', 'compressing', True)
        """
        return self._get(self._path(job, "hook"), views.HookView)

    def hook_history(self, job: str | Job, *, rank: int | None = None, max_points: int | None = None,
                     from_step: int | None = None, to_step: int | None = None) -> Iterator[views.HookSampleView]:  # fmt: skip
        """Yield the stored hook summaries in order of steps and ranks; with ``rank``, only those of this rank. ``from_step``,
        ``to_step``: only those of these steps, both included. ``max_points``: only those of this number of steps, evenly spaced.
        Long histories are thinned. If a later attempt started from a checkpoint or from scratch, older attempts' summaries of the
        steps after this start are left out.

        >>> {sample.summary.phase for sample in client.hook_history(job_id, rank=0)} == {"warm-up", "compressing"}
        True
        """
        steps: Params = {"max_points": max_points, "from_step": from_step, "to_step": to_step}
        params: Params = {"rank": rank, "limit": _MOST_SAMPLES, **steps}
        return self._job_pages(views.HookSampleView, params, job, "hook", "history")

    def hook_series(self, job: str | Job, figure: str = "residual_norm") -> dict[int, Series]:
        """Return one curve per rank: the values of ``figure`` over the steps of ``hook_history``. ``figure``: a field of
        ``HookSummary``, such as ``compression_rate``. Steps at which the hook has no value are left out. Raises
        ``AttributeError`` for an unknown ``figure`` if the job has summaries.

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

    def metrics(self, job: str | Job, *, name: Collection[str] = (), max_points: int | None = None,
                from_step: int | None = None, to_step: int | None = None) -> views.MetricsView:  # fmt: skip
        """Return the series with the names ``name``, or all series, with their points from ``from_step`` to ``to_step``, both
        included. A series with more than ``max_points`` such points (default: 1000) is thinned, but keeps its last
        point."""
        params: Params = {"name": list(name), "max_points": max_points, "from_step": from_step, "to_step": to_step}
        return self._get(self._path(job, "metrics"), views.MetricsView, params)

    def series(self, job: str | Job, *names: str) -> dict[str, Series]:
        """Return the curves ``names``, or all curves without ``names``, by name. A curve with more than 10000 points is thinned.
        A name that has not been reported has an empty curve.

        >>> loss = client.series(job_id, "loss")["loss"]
        >>> loss.steps[-1] == client.job(job_id).progress.step, len(loss.steps) == len(loss.values)
        (True, True)
        """
        found = self.metrics(job, name=names, max_points=_MOST_POINTS).series
        return {s.name: Series([p.step for p in s.points], [p.value for p in s.points]) for s in found}

    # --- logs and events ----------------------------------------------------------------------------------------------

    def events(self, job: str | Job, *, attempt: int | None = None, type: str | Collection[str] = (),
               sort: str | None = None, page_size: int = PAGE) -> Iterator[views.EventView]:  # fmt: skip
        """Yield the events so far, oldest first. ``sort="-id"``: newest first. ``attempt``: only events of this attempt; 0: those
        of no attempt. ``type``: only events of this type, or of any of these types.

        >>> first, last = next(client.events(job_id)), next(client.events(job_id, sort="-id"))
        >>> first.type, first.id < last.id
        ('submitted', True)
        """
        types = [type] if isinstance(type, str) else list(type)
        params: Params = {"attempt": attempt, "type": types, "sort": sort, "limit": page_size}
        return self._job_pages(views.EventView, params, job, "events")

    def logs(self, job: str | Job, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
             grep: str | None = None, since: str | None = None) -> Iterator[views.LogLine]:  # fmt: skip
        """Yield the lines of the ranks' logs so far, of all ranks or only of ``rank``. ``attempt``: a number or "all"; None: the
        newest. ``tail``: only the last ``tail`` lines of each rank in each attempt. ``grep``: of these, only lines that contain
        this text. ``since`` (RFC 3339): only lines written since this time, within a few seconds. A line with ``left_out`` stands
        for that number of discarded bytes."""
        params: Params = {"rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since}
        return self._job_pages(views.LogLine, params, job, "logs")

    def download_logs(self, job: str | Job, file: str | os.PathLike[str], *, rank: int | None = None,
                      attempt: WhichAttempt = "all") -> Path:  # fmt: skip
        """Write the current logs to ``file``, also over an existing one, and return its path. Without ``rank``, each line begins
        with ``[attempt.rank]``. An interrupted download is started again during ``retry_for`` seconds; after that it raises
        ``ServiceUnreachable`` or ``ServiceFault``. Raises ``OSError`` if ``file`` cannot be written.

        >>> client.download_logs(job_id, directory / "job.log", rank=0).name
        'job.log'
        """
        target, job = Path(file), self.job_id(job)
        end = time.monotonic() + self._transport.retry_for
        with temporary_sibling(target) as temporary:
            with (temporary / "whole").open("xb") as part:
                while not self._download(job, part, {"rank": rank, "attempt": attempt}, time.monotonic() >= end):
                    time.sleep(0.5)
            return (temporary / "whole").replace(target)

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
                      on_gap: Callable[[str], None] | None = None) -> Generator[views.EventView]:  # fmt: skip
        """Yield events until the job has ended, across restarts of the service. ``after``: the id of an event; yield only later
        events. ``on_gap`` is called once per interruption, with the error text. Raises ``ServiceUnreachable`` or ``ServiceFault``
        if an interruption lasts longer than ``retry_for`` seconds, or at once if another program responds.

        >>> seen = [event.id for event in client.follow_events(job_id)]
        >>> [event.id for event in client.follow_events(job_id, after=seen[2])] == seen[3:]
        True
        """
        last = None if after is None else str(after)
        return self._follow(job, "events", {"follow": "true"}, views.EventView, last, on_gap)

    def follow_logs(self, job: str | Job, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
                    grep: str | None = None, since: str | None = None, after: Collection[str] = (),
                    on_gap: Callable[[str], None] | None = None) -> Generator[views.LogLine]:  # fmt: skip
        """Yield the log lines so far, then new ones as they are written, until the job has ended. ``rank``, ``tail``, ``grep``,
        ``since``: as for ``logs``. ``attempt``: a number or "all"; None: the newest and later ones. ``after``: for each rank, the
        ``id`` of the last line that you have read. ``on_gap``: as for ``follow_events``.

        >>> read = [line.id for line in client.follow_logs(job_id, rank=0, attempt="all")]
        >>> [line.id for line in client.follow_logs(job_id, rank=0, attempt="all", after=read[:1])] == read[1:]
        True
        """
        params: Params = {
            "follow": "true", "rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since
        }  # fmt: skip
        return self._follow(job, "logs", params, views.LogLine, ",".join(after) or None, on_gap)

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
             on_change: Callable[[views.JobView], None] | None = None) -> views.JobView:  # fmt: skip
        """Wait until the job's phase is one of ``until``, or the job has ended, and return the job. ``on_change`` is called with
        the first state, and at every new phase or reason that a poll finds.

        Raises ``DeadlineReached`` after ``deadline`` seconds. Without a deadline, raises ``ServiceUnreachable`` or
        ``ServiceFault`` if the service does not respond for ``retry_for`` seconds, or has an internal error. Raises
        ``ServiceFault`` at once if another program responds.

        >>> client.wait(job_id, deadline=60).phase.value
        'SUCCEEDED'
        """
        told, job = None, self.job_id(job)
        for now in poll_until(job, lambda: self.view(job), lambda view: view, until, deadline, Pace(0.1, 1.0)):
            if (now.phase, now.reason) != told and on_change is not None:
                on_change(now)
            told = (now.phase, now.reason)
        return now

    def poll(self, job: str | Job, every: float = 1.0, until: Collection[JobPhase] | None = None,
             deadline: float | None = None) -> Iterator[Snapshot]:  # fmt: skip
        """Yield a snapshot of the job about every ``every`` seconds. The last snapshot is the one in which the job has ended or
        is in a phase of ``until``.

        Raises ``DeadlineReached`` after ``deadline`` seconds. Without a deadline, raises ``ServiceUnreachable`` or
        ``ServiceFault`` if the service does not respond, or fails, for two minutes. Raises ``ServiceFault`` at once if another
        program responds.

        >>> for now in client.poll(job_id, every=0.5, deadline=60):
        ...     print(now.job.phase.value, now.hook.phase, "loss" in now.metrics)
        SUCCEEDED compressing True
        """
        pace, job = Pace(every, every, _PATIENCE), self.job_id(job)
        yield from poll_until(job, lambda: self._snapshot(job), lambda seen: seen.job, until or (), deadline, pace)

    def _snapshot(self, job: str | Job) -> Snapshot:
        view = self.view(job)
        newest = self.metrics(job, max_points=2).series if view.attempt else []
        values = {s.name: s.points[-1].value for s in newest if s.points}
        return Snapshot(view, self.hook(job), MappingProxyType(values), datetime.now(UTC))
