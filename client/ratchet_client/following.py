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
from typing import IO, Literal, TypeAlias, TypeVar

from pydantic import BaseModel

from ratchet_client import sse
from ratchet_client.calls import PAGE, Calls, job_path
from ratchet_client.errors import ServiceFault, ServiceUnreachable
from ratchet_client.polling import TERMINAL, Pace, Series, Snapshot, looks
from ratchet_client.transport import Params
from ratchet_contract import api
from ratchet_contract.phases import JobPhase

M = TypeVar("M", bound=BaseModel)
WhichAttempt: TypeAlias = int | Literal["all"] | None
"""Whose logs: None the newest attempt's (and, when following, those that come later)."""
_MOST_POINTS = 10_000
_PATIENCE = 120.0


class Following(Calls):
    """Calls that only read, and read again."""

    def job(self, job_id: str) -> api.JobView:
        """The job as it is now. Raises ``NotFound``."""
        return self._get(job_path(job_id), api.JobView)

    def hook(self, job_id: str) -> api.HookView:
        """What the communication hook does: phase, iteration, compression rate, residual norm per rank.

        >>> hook = client.hook(job_id)
        >>> hook.name, hook.phase, hook.iteration == client.job(job_id).progress.step
        ('powerSGD', 'compressing', True)
        """
        return self._get(f"{job_path(job_id)}/hook", api.HookView)

    def hook_history(self, job_id: str, *, rank: int | None = None) -> Iterator[api.HookSampleView]:
        """Kept summaries by step and rank, oldest first.

        >>> {sample.summary.phase for sample in client.hook_history(job_id, rank=0)} == {"warm-up", "compressing"}
        True
        """
        params: Params = {"rank": rank, "limit": PAGE}
        return self._pages(f"{job_path(job_id)}/hook/history", api.HookSampleView, params)

    # --- series -------------------------------------------------------------------------------------------------------

    def metrics(self, job_id: str, *, name: Collection[str] = (), max_points: int | None = None) -> api.MetricsView:
        """Series over steps with attempt and time of each point; one longer than ``max_points`` is thinned, the last point is
        always there."""
        params: Params = {"name": list(name), "max_points": max_points}
        return self._get(f"{job_path(job_id)}/metrics", api.MetricsView, params)

    def series(self, job_id: str, *names: str) -> dict[str, Series]:
        """Curves by name, all of them without ``names``; thinned beyond 10000 points. Steps that a later attempt did again are
        there once. A name that nobody reported (yet) has an empty curve.

        >>> loss = client.series(job_id, "loss")["loss"]
        >>> loss.steps[-1] == client.job(job_id).progress.step, len(loss.steps) == len(loss.values)
        (True, True)
        """
        found = self.metrics(job_id, name=names, max_points=_MOST_POINTS).series
        return {s.name: Series([p.step for p in s.points], [p.value for p in s.points]) for s in found}

    # --- logs and events ----------------------------------------------------------------------------------------------

    def events(self, job_id: str) -> Iterator[api.EventView]:
        """The history that is there now, oldest first.

        >>> next(client.events(job_id)).type
        'submitted'
        """
        return self._pages(f"{job_path(job_id)}/events", api.EventView, {"limit": PAGE})

    def logs(self, job_id: str, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
             grep: str | None = None, since: str | None = None) -> Iterator[api.LogLine]:  # fmt: skip
        """Lines of the ranks' logs that are there now. ``tail``: only the last lines of each rank; ``grep``: only lines with
        this text; ``since`` (RFC 3339): only lines written since then, to about six seconds. Where a log has lost its middle, a
        line with ``left_out`` tells how many bytes."""
        params: Params = {"rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since}
        return self._pages(f"{job_path(job_id)}/logs", api.LogLine, params)

    def download_logs(self, job_id: str, file: str | os.PathLike[str], *, rank: int | None = None,
                      attempt: WhichAttempt = "all") -> Path:  # fmt: skip
        """Write the logs as they are now to ``file``, which appears when all is there; without ``rank``, each line begins with
        ``[attempt.rank]``. A download that breaks is begun again within the client's ``retry_for``.

        >>> client.download_logs(job_id, directory / "job.log", rank=0).name
        'job.log'
        """
        target = Path(file)
        end = time.monotonic() + self._transport.retry_for
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as part:
            partial = Path(part.name)
            try:
                while not self._download(job_id, part, {"rank": rank, "attempt": attempt}, time.monotonic() >= end):
                    time.sleep(0.5)
                part.close()
                partial.chmod(0o644)
                return partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    def _download(self, job_id: str, part: IO[bytes], params: Params, last: bool) -> bool:
        part.seek(0)
        part.truncate()
        try:
            with self._transport.stream(f"{job_path(job_id)}/logs", params, {"Accept": "text/plain"}) as response:
                for block in response.iter_bytes():
                    part.write(block)
        except (ServiceUnreachable, ServiceFault):
            if last:
                raise
            return False
        return True

    # --- following ----------------------------------------------------------------------------------------------------

    def follow_events(self, job_id: str, *, after: int | None = None,
                      on_gap: Callable[[str], None] | None = None) -> Generator[api.EventView]:  # fmt: skip
        """Events from the first (or after the event with id ``after``) until the job has ended, across restarts of the service.
        ``on_gap`` is told once per interruption.

        >>> seen = [event.id for event in client.follow_events(job_id)]
        >>> [event.id for event in client.follow_events(job_id, after=seen[2])] == seen[3:]
        True
        """
        last = None if after is None else str(after)
        return self._follow(job_id, "events", {"follow": "true"}, api.EventView, last, on_gap)

    def follow_logs(self, job_id: str, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
                    grep: str | None = None, since: str | None = None, after: Collection[str] = (),
                    on_gap: Callable[[str], None] | None = None) -> Generator[api.LogLine]:  # fmt: skip
        """Log lines as they are written, until the job has ended. ``after``: go on behind these lines, the ``id`` of the last
        one that was read of each rank.

        >>> read = [line.id for line in client.follow_logs(job_id, rank=0, attempt="all")]
        >>> [line.id for line in client.follow_logs(job_id, rank=0, attempt="all", after=read[:1])] == read[1:]
        True
        """
        params: Params = {
            "follow": "true", "rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since
        }  # fmt: skip
        return self._follow(job_id, "logs", params, api.LogLine, ",".join(after) or None, on_gap)

    def _follow(self, job_id: str, what: str, params: Params, model: type[M], last: str | None,
                on_gap: Callable[[str], None] | None) -> Generator[M]:  # fmt: skip
        found = sse.follow(
            self._transport, f"{job_path(job_id)}/{what}", params, lambda: self.job(job_id).phase.terminal, last, on_gap
        )
        with closing(found):
            for event in found:
                yield model.model_validate_json(event.data)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, job_id: str, until: Collection[JobPhase] = TERMINAL, deadline: float | None = None,
             on_change: Callable[[api.JobView], None] | None = None) -> api.JobView:  # fmt: skip
        """The job once its phase is one of ``until``, or once it has ended.

        ``deadline``: seconds from now, then ``DeadlineReached``; a service that is away is waited for until then, or for
        ``retry_for`` seconds without a deadline. ``on_change`` is called with every new phase or reason.

        >>> client.wait(job_id, deadline=60).phase.value
        'SUCCEEDED'
        """
        told = None
        for job in looks(job_id, lambda: self.job(job_id), lambda job: job, until, deadline, Pace(0.1, 1.0)):
            if (job.phase, job.reason) != told and on_change is not None:
                on_change(job)
            told = (job.phase, job.reason)
        return job

    def poll(self, job_id: str, every: float = 1.0, until: Collection[JobPhase] | None = None,
             deadline: float | None = None) -> Iterator[Snapshot]:  # fmt: skip
        """Snapshots every ``every`` seconds, for a plot that refreshes; ends with the one that shows the job ended, or in a phase
        of ``until``. A loop body that takes longer than ``every`` delays the next one.

        ``deadline``: seconds, then ``DeadlineReached``. A service that is restarted is found again; one that stays away is
        waited for until the deadline, or for two minutes without one, then ``ServiceUnreachable``.

        >>> for now in client.poll(job_id, every=0.5, deadline=60):
        ...     print(now.job.phase.value, now.hook.phase, "loss" in now.metrics)
        SUCCEEDED compressing True
        """
        pace = Pace(every, every, _PATIENCE)
        return looks(job_id, lambda: self._snapshot(job_id), lambda seen: seen.job, until or (), deadline, pace)

    def _snapshot(self, job_id: str) -> Snapshot:
        job = self.job(job_id)
        newest = self.metrics(job_id, max_points=2).series if job.attempt else []
        values = {s.name: s.points[-1].value for s in newest if s.points}
        return Snapshot(job, self.hook(job_id), MappingProxyType(values), datetime.now(UTC))
