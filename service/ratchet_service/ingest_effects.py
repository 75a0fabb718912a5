"""What each kind of rank message changes. Nothing here raises for a strange message: a rank's spool must never get stuck on
one, so text is made storable and a message that cannot count becomes an event that says so."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from sqlalchemy.orm import Session

from ratchet_contract.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointFailed,
    CheckpointUploaded,
    HookState,
    Metrics,
    Note,
    Progress,
    Quarantined,
    RankMessage,
    RedoneSteps,
    Resumed,
    Started,
    Training,
    node_that_speaks,
)
from ratchet_contract.phases import Event
from ratchet_contract.plural import counted
from ratchet_service import transitions
from ratchet_service.bounds import Bounds
from ratchet_service.clock import now_in
from ratchet_service.columns import MAX_NUMBER
from ratchet_service.ingest_checkpoints import Checkpoints, Key
from ratchet_service.ingest_series import Samples, Series
from ratchet_service.models import Attempt, Job
from ratchet_service.redone import DIFFERENCE, add_redone
from ratchet_service.storable import bounded_json, storable, storable_json, when
from ratchet_service.unmanaged import UNMANAGED

FIGURES: Final = (Metrics, Progress, HookState)
"""What changes no more of rows than ``ingest_rows`` has of them; the very kinds that agents may keep back for a while."""

_NUMBERS: Final = {
    kind: [
        n
        for n in ("step", "epoch", "total_steps", "data_epoch", "size", "files", "nbytes", "steps", "compared", "equal")
        if n in kind.model_fields
    ]
    for kind in get_args(get_args(RankMessage)[0])
}


class Effects:
    """Applies messages of one attempt, in order, within the caller's transaction; ``finish`` writes what was gathered."""

    def __init__(
        self,
        session: Session,
        job: Job,
        attempt: Attempt,
        iterations: Mapping[Key, int],
        bounds: Bounds,
        best: str | None,
    ) -> None:
        """``best``: the metric that ``keep_best`` judges by."""
        self._session, self._job, self._attempt = session, job, attempt
        self._checkpoints = Checkpoints(session, job, attempt, iterations, self._event)
        self._bounds = bounds
        self._series = Series(session, job, attempt.number, bounds, best)
        self._samples = Samples(session, job.id, bounds)
        self._now = now_in(session)

    @property
    def _newest(self) -> bool:
        return self._attempt.number == self._job.epoch

    def foresee(self, messages: Sequence[RankMessage]) -> None:
        """These are to be applied: what they will ask for is read at once."""
        self._checkpoints.foresee(messages)

    def apply(self, rank: int, message: RankMessage) -> None:
        """``rank`` is the batch's: a message cannot speak for another rank."""
        if not all(number is None or 0 <= number <= MAX_NUMBER for number in _numbers(message)):
            self._note("message-dropped", f"rank {rank}: a {message.kind} message with an impossible number", {})
            return
        match message:
            case Started():
                self._started(rank, message)
            case Training():
                self._training(message)
            case Resumed():
                self._resumed(message)
            case Metrics():
                self._add_metrics(message)
            case Progress():
                self._progress(message)
            case RedoneSteps():
                self._redone(rank, message)
            case HookState():
                self._hook(rank, message)
            case CheckpointCommitted():
                self._checkpoints.committed(message)
            case CheckpointUploaded():
                self._checkpoints.uploaded(message)
            case CheckpointFailed():
                text = f"the checkpoint of step {message.step} failed: {storable(message.error)}"
                self._event("checkpoint-failed", text, {"step": message.step})
            case CheckpointDeleted():
                self._checkpoints.deleted(message)
            case Quarantined():
                self._checkpoints.quarantined(message)
            case Note():
                node = node_that_speaks(rank)
                who = {"rank": rank} if node is None else {"node": node}
                data = {**who, "data": bounded_json(message.data)}
                self._note(f"note.{storable(message.type)}"[:64], storable(message.message), data)

    def finish(self, count_samples_of: Collection[int] = ()) -> None:
        """Write what was gathered. ``count_samples_of``: ranks whose hook summaries are to be counted, and thinned where there
        are too many."""
        if self._newest:
            self._job.updated_at = self._now  # before the first flush, so that the row is written once
        self._session.flush()
        refused = self._series.store()
        if refused and not self._attempt.values_refused:
            text = f"a job keeps {self._bounds.series} metrics: values of {refused[0]!r} and of other new names are left out"
            self._event("metrics-dropped", text, {"name": refused[0], "series": self._bounds.series})
        self._attempt.values_refused += len(refused)
        if self._checkpoints.commits:
            self._series.committed()
        self._samples.store(count_samples_of)
        self._session.flush()

    def _note(self, kind: str, message: str, data: dict[str, Any]) -> None:
        """An event that a rank asks for; beyond the bound they are only counted, so that none can flood the history."""
        self._attempt.notes += 1
        most = self._bounds.notes
        if self._attempt.notes <= most:
            self._event(kind, message, data)
        elif self._attempt.notes == most + 1:
            text = f"the attempt has told {most} notes: further ones are counted, and left out"
            self._event("notes-left-out", text, {"kept": most})

    def _event(self, kind: str, message: str, data: dict[str, Any]) -> None:
        transitions.add_event(self._session, self._job.id, kind, message, epoch=self._attempt.number, data=data)

    def _started(self, rank: int, message: Started) -> None:
        data = {"rank": rank, "pid": message.pid, "host": storable(message.host), "device": storable(message.device)}
        data["torch"] = storable(message.torch)
        self._event("rank-started", f"rank {rank} started on {data['host']} ({data['device']})", data)

    def _training(self, message: Training) -> None:
        attempt, job, base = self._attempt, self._job, message.base
        attempt.base_step, attempt.base_epoch = base.step, base.epoch
        attempt.base_digest = None if base.digest is None else storable(base.digest)[:64]
        attempt.training_at = when(message.at, self._now)
        attempt.last_step = max(attempt.last_step, base.step)
        if not self._newest or not job.phase.active:
            return
        forked = job.fork_source is not None and base.digest == job.fork_source["digest"]
        job.step = job.committed_step = base.step
        job.committed_epoch = None if forked else base.epoch
        job.resume_from = job.steps_per_second = None
        if message.total_steps is not None:
            job.total_steps = message.total_steps
        data = {"base_step": base.step, "base_attempt": base.epoch}
        transitions.apply(
            self._session, job.id, Event.TRAINING, expected_epoch=attempt.number, data=data,
            reason=job.reason, message=job.message,
        )  # fmt: skip

    def _resumed(self, message: Resumed) -> None:
        report = storable_json(message.model_dump(mode="json")["report"])
        self._attempt.resume_report = report
        base, verdict = message.report.base, message.report.verdict
        text = "started at step 0" if base.epoch is None else f"resumed from step {base.step}"
        if verdict == UNMANAGED:
            text = "the script was started from its beginning"
        self._event(
            "resumed", storable(f"{text}: {message.report.sentence()}"), {"verdict": verdict, "step": base.step}
        )
        if verdict == UNMANAGED:
            self._unmanaged(message)

    def _unmanaged(self, message: Resumed) -> None:
        """A script that keeps its own state runs. It has no base and no steps that could be told: only the phase moves."""
        if self._attempt.training_at is None:
            self._attempt.training_at = when(message.at, self._now)
        if self._newest and self._job.phase.active:
            transitions.apply(
                self._session, self._job.id, Event.TRAINING, expected_epoch=self._attempt.number,
                data={"verdict": UNMANAGED}, reason=self._job.reason, message=self._job.message,
            )  # fmt: skip

    def _add_metrics(self, message: Metrics) -> None:
        at = when(message.at, self._now)
        for raw, value in message.values.items():
            name = storable(raw)[:200]
            row = {
                "job_id": self._job.id, "name": name, "step": message.step, "epoch": self._attempt.number,
                "value": None if math.isnan(value) else value, "at": at,
            }  # fmt: skip
            self._series.add(name, message.step, row)

    def _progress(self, message: Progress) -> None:
        self._attempt.last_step = max(self._attempt.last_step, message.step)
        if not self._newest:
            return
        self._job.step = message.step
        if message.total_steps is not None:
            self._job.total_steps = message.total_steps
        if message.data_epoch is not None:
            self._job.data_epoch = message.data_epoch
        rate = message.steps_per_second
        if rate is not None and 0 <= rate < math.inf:  # also false for NaN
            self._job.steps_per_second = rate

    def _redone(self, rank: int, message: RedoneSteps) -> None:
        difference = add_redone(self._attempt, rank, message)
        if difference is not None:
            self._event(DIFFERENCE, difference.sentence(), difference.model_dump(mode="json"))

    def _hook(self, rank: int, message: HookState) -> None:
        summary = storable_json(message.model_dump(mode="json")["summary"]) | {"rank": rank}
        step = message.summary.step
        row = {
            "job_id": self._job.id, "rank": rank, "step": step, "epoch": self._attempt.number, "summary": summary,
            "at": when(message.at, self._now),
        }  # fmt: skip
        self._samples.add(rank, step, row)


def _numbers(message: RankMessage) -> Iterator[int | None]:
    """Those that end up in 64-bit columns."""
    for name in _NUMBERS[type(message)]:
        yield getattr(message, name)
    if isinstance(message, HookState):
        yield from (message.summary.step, message.summary.iteration)
    if isinstance(message, Training):
        yield from (message.base.step, message.base.epoch)
    if isinstance(message, RedoneSteps):
        yield from (message.world_size, None if message.first_difference is None else message.first_difference.step)


def tell_left_out(session: Session, attempt: Attempt, bounds: Bounds) -> None:
    """At an attempt's end, one event: how much of what it told is not in the history and the series. The job's row is held."""
    notes = max(0, attempt.notes - bounds.notes)
    parts = [counted(notes, "note")] * bool(notes) + [counted(attempt.values_refused, "value")] * bool(
        attempt.values_refused
    )
    if parts:
        data = {"notes": notes, "values": attempt.values_refused}
        text = f"{' and '.join(parts)} of attempt {attempt.number} left out"
        transitions.add_event(session, attempt.job_id, "left-out", text, epoch=attempt.number, data=data)
