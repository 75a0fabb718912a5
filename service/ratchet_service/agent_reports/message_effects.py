"""Applies each kind of rank message to the database. No message raises an error: its agent would send it again forever."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, get_args

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import Event, EventType
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import (
    Alert,
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
    node_of_agent_rank,
)
from ratchet_service.agent_reports.checkpoint_effects import Checkpoints, Key
from ratchet_service.agent_reports.fast_rows import Shape
from ratchet_service.agent_reports.metric_series import Samples, Series
from ratchet_service.agent_reports.tracker_rows import TrackerRows
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db import models, transitions
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Attempt, Job
from ratchet_service.db.sanitize import parse_time, sanitize_bounded_json, sanitize_json, sanitize_text
from ratchet_service.db.types import MAX_NUMBER
from ratchet_service.lifecycle.redone_steps import add_redone
from ratchet_service.lifecycle.unmanaged_script import UNMANAGED

FIGURES: Final = (Metrics, Progress, HookState)
"""Messages that change only columns that ``fast_rows`` covers. Agents may delay exactly these kinds."""

_NUMBER_FIELDS: Final = {
    kind: [
        n
        for n in (
            "step",
            "attempt",
            "total_steps",
            "data_epoch",
            "size",
            "files",
            "nbytes",
            "steps",
            "compared",
            "equal",
        )
        if n in kind.model_fields
    ]
    for kind in get_args(get_args(RankMessage)[0])
}


class Effects:
    """Applies one attempt's messages, in order, in the caller's transaction. ``finish`` writes what was collected. The job's row
    is locked."""

    def __init__(
        self,
        session: Session,
        job: Job,
        attempt: Attempt,
        iterations: Mapping[Key, int],
        bounds: Bounds,
        shape: Shape,
    ) -> None:
        """``iterations``: hook iteration of checkpoints, by step and attempt."""
        self._session, self._job, self._attempt = session, job, attempt
        self._checkpoints = Checkpoints(session, job, attempt, iterations, self._add_event)
        self._bounds = bounds
        self._series = Series(session, job, attempt.number, bounds, shape.best_metric)
        self._samples = Samples(session, job.id, bounds)
        self._trackers = TrackerRows(session, job, attempt.number, shape.trackers)
        self._now = now_in(session)

    @property
    def _is_newest(self) -> bool:
        """True if the attempt is the job's newest one: only then may its messages change the job's row."""
        return self._attempt.number == self._job.attempt

    def prefetch(self, messages: Sequence[RankMessage]) -> None:
        """Read, with few queries, the checkpoint rows that ``messages`` need. The caller applies these messages next."""
        self._checkpoints.prefetch(messages)

    def apply(self, rank: int, message: RankMessage) -> None:
        """Apply one message of ``rank``. The message is dropped if one of its ``_numbers`` is negative or too large to be
        stored."""
        if not all(number is None or 0 <= number <= MAX_NUMBER for number in _numbers(message)):
            self._add_note(
                EventType.MESSAGE_DROPPED, f"rank {rank}: a {message.kind} message with an impossible number", {}
            )
            return
        match message:
            case Started():
                self._apply_started(rank, message)
            case Training():
                self._apply_training(message)
            case Resumed():
                self._apply_resumed(message)
            case Metrics():
                self._add_metrics(message)
            case Progress():
                self._apply_progress(message)
            case RedoneSteps():
                self._apply_redone_steps(rank, message)
            case HookState():
                self._apply_hook_state(rank, message)
            case CheckpointCommitted():
                self._checkpoints.apply_committed(message)
            case CheckpointUploaded():
                self._checkpoints.apply_uploaded(message)
            case CheckpointFailed():
                text = f"the checkpoint of step {message.step} failed: {sanitize_text(message.error)}"
                self._add_event(EventType.CHECKPOINT_FAILED, text, {"step": message.step})
            case CheckpointDeleted():
                self._checkpoints.apply_deleted(message)
            case Quarantined():
                self._checkpoints.apply_quarantined(message)
            case Alert():
                self._apply_alert(rank, message)
            case Note():
                node = node_of_agent_rank(rank)
                who = {"rank": rank} if node is None else {"node": node}
                data = {**who, "data": sanitize_bounded_json(message.data)}
                kind = transitions.NoteEventType(f"note.{sanitize_text(message.type)}"[:64])
                self._add_note(kind, sanitize_text(message.message), data)

    def finish(self, ranks_to_count: Collection[int] = ()) -> None:
        """Write what was collected; called once, after the last message. ``ranks_to_count``: ranks whose hook summaries may be
        thinned."""
        if self._is_newest:
            self._job.updated_at = self._now  # before the first flush, so that the row is written once
        self._session.flush()
        refused = self._series.store()
        self._trackers.store(refused)
        if refused and not self._attempt.metric_values_refused:
            text = f"a job keeps {self._bounds.series} metrics: values of {refused[0]!r} and of other new names are dropped"
            self._add_event(EventType.METRICS_DROPPED, text, {"name": refused[0], "series": self._bounds.series})
        self._attempt.metric_values_refused += len(refused)
        if self._checkpoints.has_commits:
            self._series.delete_unneeded_points()
        self._samples.store(ranks_to_count)
        self._session.flush()

    def _add_note(self, kind: EventType | transitions.NoteEventType, message: str, data: dict[str, Any]) -> None:
        """Add an event that a rank can cause any number of times; beyond ``Bounds.notes`` per attempt they are only counted."""
        self._attempt.notes_reported += 1
        most = self._bounds.notes
        if self._attempt.notes_reported <= most:
            self._add_event(kind, message, data)
        elif self._attempt.notes_reported == most + 1:
            text = f"the attempt has sent {most} notes: further ones are counted, not stored"
            self._add_event(EventType.NOTES_LEFT_OUT, text, {"kept": most})

    def _add_event(self, kind: EventType | transitions.NoteEventType, message: str, data: dict[str, Any]) -> None:
        """Add an event of this attempt to the job's history."""
        transitions.add_event(self._session, self._job.id, kind, message, attempt=self._attempt.number, data=data)

    def _apply_started(self, rank: int, message: Started) -> None:
        """Add an event that the rank has started."""
        data = {
            "rank": rank,
            "pid": message.pid,
            "host": sanitize_text(message.host),
            "device": sanitize_text(message.device),
        }
        data["torch"] = sanitize_text(message.torch)
        text = f"rank {rank} started on {data['host']} ({data['device']})"
        if message.start is not None:
            data["start"] = sanitize_text(message.start)
            text += f", {data['start']}"
        if message.why is not None:
            data["why"] = sanitize_text(message.why[:500])
            text += f": {data['why']}"
        self._add_event(EventType.RANK_STARTED, text, data)

    def _apply_training(self, message: Training) -> None:
        """Store that the attempt has begun to train, and from which checkpoint. If it is the newest attempt of an active
        job, update the job's phase and steps, too."""
        attempt, job, base = self._attempt, self._job, message.base
        attempt.base_step, attempt.base_attempt = base.step, base.attempt
        attempt.base_digest = None if base.digest is None else sanitize_text(base.digest)[:64]
        attempt.training_at = parse_time(message.at, self._now)
        attempt.last_step = max(attempt.last_step, base.step)
        if not self._is_newest or not job.phase.active:
            return
        self._trackers.begin()
        requested = job.resume_from is not None
        forked = job.fork_source is not None and base.digest == job.fork_source["digest"]
        job.step = job.committed_step = base.step
        job.committed_attempt = None if forked else base.attempt
        job.resume_from = job.steps_per_second = None
        if message.total_steps is not None:
            job.total_steps = message.total_steps
        data: dict[str, Any] = {"base_step": base.step, "base_attempt": base.attempt}
        if requested:
            data["requested"] = True
            self._earlier_alerts = set()  # its steps are no repeated ones
        transitions.apply(self._session, job.id, Event.TRAINING, expected_attempt=attempt.number, data=data)

    def _apply_resumed(self, message: Resumed) -> None:
        """Store the attempt's resume report and add an event. A script without a Session is training from then on."""
        report = sanitize_json(message.model_dump(mode="json")["report"])
        self._attempt.resume_report = report
        base, verdict = message.report.base, message.report.verdict
        text = "started at step 0" if base.attempt is None else f"resumed from step {base.step}"
        if verdict == UNMANAGED:
            text = "the script was started from its first line"
        self._add_event(
            EventType.RESUMED,
            sanitize_text(f"{text}: {message.report.sentence()}"),
            {"verdict": verdict, "step": base.step},
        )
        if verdict == UNMANAGED:
            self._mark_unmanaged(message)

    def _mark_unmanaged(self, message: Resumed) -> None:
        """Store that a script without a Session has begun to train."""
        if self._attempt.training_at is None:
            self._attempt.training_at = parse_time(message.at, self._now)
        if self._is_newest and self._job.phase.active:
            transitions.apply(
                self._session,
                self._job.id,
                Event.TRAINING,
                expected_attempt=self._attempt.number,
                data={"verdict": UNMANAGED},
            )

    def _add_metrics(self, message: Metrics) -> None:
        """Collect the message's values; NaN is stored as None."""
        at = parse_time(message.at, self._now)
        values = {sanitize_text(raw)[:200]: value for raw, value in message.values.items()}
        self._trackers.add(message.step, at, values)
        for name, value in values.items():
            row = {
                "job_id": self._job.id, "name": name, "step": message.step, "attempt": self._attempt.number,
                "value": None if math.isnan(value) else value, "at": at,
            }  # fmt: skip
            self._series.add(name, message.step, row)

    def _apply_progress(self, message: Progress) -> None:
        """Store the attempt's last step; for the job's newest attempt, also the job's progress."""
        self._attempt.last_step = max(self._attempt.last_step, message.step)
        if not self._is_newest:
            return
        self._job.step = message.step
        if message.total_steps is not None:
            self._job.total_steps = message.total_steps
        if message.data_epoch is not None:
            self._job.data_epoch = message.data_epoch
        rate = message.steps_per_second
        if rate is not None and 0 <= rate < math.inf:  # also false for NaN
            self._job.steps_per_second = rate

    def _apply_redone_steps(self, rank: int, message: RedoneSteps) -> None:
        """Store what the rank reports about redone steps. The attempt's first difference adds an event."""
        difference = add_redone(self._attempt, rank, message)
        if difference is not None:
            self._add_event(EventType.REPLAY_DIFFERENCE, difference.sentence(), difference.model_dump(mode="json"))

    def _apply_alert(self, rank: int, message: Alert) -> None:
        """Add an event, unless an earlier attempt of the same branch has stored an alert of the same rank, step and title."""
        title, text = sanitize_text(message.title), sanitize_text(message.text)
        data = {"title": title, "text": text, "level": message.level, "step": message.step, "rank": rank}
        if self._attempt.notes_reported < self._bounds.notes and (rank, message.step, title) in self._earlier_alerts:
            return
        self._add_note(EventType.ALERT, sanitize_text(message.line), data)

    @cached_property
    def _earlier_alerts(self) -> set[tuple[int, int, str]]:
        """Rank, step and title of the alerts that earlier attempts have stored, since the last one that was requested to start
        from another checkpoint."""
        row = models.Event
        query = sa.select(row.type, row.data).where(row.job_id == self._job.id, row.attempt < self._attempt.number)
        query = query.where(row.type.in_((EventType.ALERT, Event.TRAINING))).order_by(row.id)
        found = set[tuple[int, int, str]]()
        for kind, data in self._session.execute(query):
            if kind == EventType.ALERT:
                found.add((data["rank"], data["step"], data["title"]))
            elif data.get("requested"):
                found.clear()
        return found

    def _apply_hook_state(self, rank: int, message: HookState) -> None:
        """Collect the rank's hook summary."""
        summary = sanitize_json(message.model_dump(mode="json")["summary"]) | {"rank": rank}
        step = message.summary.step
        row = {
            "job_id": self._job.id, "rank": rank, "step": step, "attempt": self._attempt.number, "summary": summary,
            "at": parse_time(message.at, self._now),
        }  # fmt: skip
        self._samples.add(rank, step, row)
        if rank == 0:
            self._trackers.add_hook(row["at"], message.summary)


def _numbers(message: RankMessage) -> Iterator[int | None]:
    """Yield the message's numbers that are stored in 64-bit columns; None for one that the message leaves out."""
    for name in _NUMBER_FIELDS[type(message)]:
        yield getattr(message, name)
    if isinstance(message, HookState):
        yield from (message.summary.step, message.summary.iteration)
    if isinstance(message, Training):
        yield from (message.base.step, message.base.attempt)
    if isinstance(message, RedoneSteps):
        yield from (message.world_size, None if message.first_difference is None else message.first_difference.step)


def add_left_out_event(session: Session, attempt: Attempt, bounds: Bounds) -> None:
    """Add one event with the numbers of the attempt's notes and metric values that were not stored, if any. The
    caller has locked the job's row."""
    notes = max(0, attempt.notes_reported - bounds.notes)
    parts = [pluralize(notes, "note")] * bool(notes) + [pluralize(attempt.metric_values_refused, "value")] * bool(
        attempt.metric_values_refused
    )
    if parts:
        data = {"notes": notes, "values": attempt.metric_values_refused}
        text = f"{' and '.join(parts)} of attempt {attempt.number} left out"
        transitions.add_event(session, attempt.job_id, EventType.LEFT_OUT, text, attempt=attempt.number, data=data)
