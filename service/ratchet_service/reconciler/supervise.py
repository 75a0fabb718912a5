"""Supervises active jobs under a lease each: carries out what ``lifecycle.supervision`` decides after a poll. A stop or kill that
another process must know of is recorded as an event *before* the action. The result files, which a launcher's poll reads, decide
how an attempt ended. A reported result only wakes a reconciler of the same process, and reaches the agents of other nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, EventType, Reason
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.checkpoints import removal
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.db import leases
from ratchet_service.db.engine import Database
from ratchet_service.db.leases import Lease, LeaseLost, lock_leased_job
from ratchet_service.db.models import Attempt, AttemptNode, Event, Job
from ratchet_service.db.sanitize import sanitize_text
from ratchet_service.db.transitions import add_event
from ratchet_service.launchers import attempt_files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineBusy,
    EngineFull,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle import monotonic_deadlines, supervision, unmanaged_script
from ratchet_service.lifecycle.attempt_result import Evidence
from ratchet_service.lifecycle.decision import Decision, Limits, limits_of, view_of
from ratchet_service.lifecycle.supervision import (
    ActionKind,
    DesiredState,
    NextAction,
    Supervised,
    Supervision,
    Timing,
)
from ratchet_service.observability.health import MAX_CONCURRENT_FINISHES, ROUND_SECONDS
from ratchet_service.reconciler import persisted_deadlines
from ratchet_service.reconciler.attempt_watch import (
    Watch,
    agent_started_at,
    kill_text,
    left_running_text,
    restore_actions,
)
from ratchet_service.reconciler.background_work import Background
from ratchet_service.reconciler.drain_spools import ingest_leftover
from ratchet_service.reconciler.finish_attempt import LOG_TAIL, finalise_attempt
from ratchet_service.reconciler.launch import AttemptLauncher

log = logging.getLogger(__name__)

_CLEARED_REASONS: Final = (Reason.ENGINE_QUEUE, Reason.ENGINE_UNREACHABLE, Reason.NO_LAUNCHER, Reason.ATTEMPT_ENDING)
"""Reasons that are cleared once the attempt is supervised and out of the queue."""
_RESUBMIT_SECONDS: Final = 2.0
"""Seconds until the next submission, after the engine was full or unreachable."""
_MAX_ERROR_CHARS: Final = 1000  # characters of an error
_FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
"""Most seconds between two polls of an attempt that cannot be supervised; the pause doubles from ``_FIRST_PAUSE`` on."""


def supervision_error_text(lease: Lease, error: Exception) -> str:
    """Return the message for users that says why the attempt of ``lease`` cannot be supervised, with the error's text, cut."""
    error_text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    return sanitize_text(
        f"attempt {lease.attempt} cannot be supervised: {error_text}. It is tried again, at least every "
        f"{LONGEST_PAUSE:g} s; the service's log has the traceback"
    )


class Watcher:
    """Supervises the attempts of one process. Most methods raise ``LeaseLost`` if this process no longer holds the job."""

    def __init__(
        self,
        database: Database,
        home: HomePaths,
        launchers: Launchers,
        attempt_launcher: AttemptLauncher,
        timing: Timing,
        lease_seconds: float,
        background: Background,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self._database = database
        self._home = home
        self._launchers = launchers
        self._attempt_launcher = attempt_launcher
        self._timing = timing
        self._lease_seconds = lease_seconds
        self._background = background
        self._bounds = bounds

    def start_watch(self, lease: Lease, lease_held_at: float) -> Watch:
        """Return a watch for an attempt, loaded from its rows. ``lease_held_at``: just before its lease was taken. Raise
        ``NoResultFound`` if the job was deleted, ``ValidationError`` for an unreadable spec."""
        clock = self._database.clock
        now = clock.monotonic()
        with self._database.read() as session:
            job = session.get_one(Job, lease.job_id)
            attempt = session.get_one(Attempt, (lease.job_id, lease.attempt))
            clocks = attempt.deadlines if isinstance(attempt.deadlines, dict) else {}
            ran = monotonic_deadlines.counted_seconds(clocks.get(persisted_deadlines.RUN), attempt.begun_at, clock)
            spec = JobSpec.model_validate(job.spec)
            paths = self._home.job(lease.job_id).attempt(lease.attempt)
            rows = sa.select(sa.func.count()).where(
                AttemptNode.job_id == lease.job_id, AttemptNode.attempt == lease.attempt
            )
            nodes = session.scalar(rows) or spec.world.nodes
            launcher = self._launchers[spec.launcher.kind]
            launch_file = attempt.launch.get("launch_file", {})
            supervised = Supervised(
                view_of(job, limits_of(spec)),
                launch_file.get("protocol", PROTOCOL_VERSION),
                unmanaged_script.is_reported_unmanaged(attempt.resume_report),
            )
            known = Supervision(now, now, now, None if ran is None else now - ran)
            known = persisted_deadlines.restore(
                restore_actions(session, lease, known, now),
                clocks,
                clock,
                has_slots=launcher.slots,
                max_gap=self._lease_seconds / 4,
                launch_deadline=self._timing.launch_deadline,
            )
            watch = Watch(
                lease,
                AttemptRef(lease.job_id, lease.attempt, paths, nodes),
                launcher,
                # the spec may be newer, after a backup was restored
                len(launch_file.get("ranks", ())) or spec.world.ranks_per_node,
                supervised,
                known,
                lease_held_at,
                stored_reason=(job.reason, job.message or "") if job.reason in _CLEARED_REASONS else None,
                stored_reason_desired=job.desired,
                supervision_error=job.message if job.reason == Reason.RECONCILE_ERROR else None,
            )
        watch.stored_deadlines = persisted_deadlines.running_deadlines(known, is_queued=watch.is_queued)
        return watch

    def submit(self, watch: Watch, plan: LaunchPlan) -> None:
        """Submit the new attempt to its launcher. If the engine is unreachable or full, a later poll submits the attempt. After a
        ``LaunchError``, a later poll ends the attempt."""
        with suppress(EngineUnreachable):  # a later poll retries, and reports it
            self._submit(watch, plan)

    def _submit_again(self, watch: Watch, now: float) -> None:
        """Submit an attempt that has no process yet, and start its launch deadline again. Raise as ``_submit`` does."""
        plan = self._attempt_launcher.recover_plan(watch.lease)
        watch.known = replace(watch.known, last_queued_at=now)
        self._write_deadlines(watch, now)
        self._submit(watch, plan)

    def _submit(self, watch: Watch, plan: LaunchPlan) -> None:
        """Submit ``plan`` to the engine, and record the result in the watch. Raise ``EngineUnreachable`` or ``LeaseLost``."""
        self._ensure_lease(watch)
        watch.known, watch.engine_full_message = replace(watch.known, submitted=True), None
        try:
            watch.launcher.submit(plan)
        except (EngineFull, EngineUnreachable) as error:
            not_before = self._database.clock.monotonic() + _RESUBMIT_SECONDS
            watch.known = replace(watch.known, submitted=False, submit_not_before=not_before)
            if not isinstance(error, EngineFull):
                raise
            watch.engine_full_message = error.detail
        except LaunchError as error:
            watch.known = replace(watch.known, forced_cause=Cause.LAUNCHER_ERROR, message=error.detail)

    def poll(self, watch: Watch, desired_state: DesiredState) -> Decision | None:
        """Poll the attempt once and carry out what follows, such as a kill. Return the decision that ended the attempt. None: the
        attempt has not ended, or the engine is busy or unreachable. Other errors are raised."""
        if watch.stored_reason_desired is not desired_state.desired:
            watch.stored_reason, watch.stored_reason_desired = None, desired_state.desired
        try:
            decision = self._poll(watch, desired_state)
        except EngineBusy:
            return None
        except EngineUnreachable as error:
            if watch.stored_reason is None or watch.stored_reason[0] != Reason.ENGINE_UNREACHABLE:
                self._add_event(watch, EventType.ENGINE_UNREACHABLE, None, error.detail)
            self._store_wait_reason(
                watch, self._database.clock.monotonic(), reason=Reason.ENGINE_UNREACHABLE, message=error.detail
            )
            return None
        return decision

    def _poll(self, watch: Watch, desired_state: DesiredState) -> Decision | None:
        """Poll the engine, unless the attempt is proved dead, and carry out the next action. Return as ``poll`` does. Raise
        ``EngineUnreachable`` or ``EngineBusy``."""
        if watch.evidence is not None:
            self._ensure_lease(watch)
            # proved dead: the engine is not needed any more
            return self._start_finishing(watch, watch.evidence)
        now, wall = self._database.clock.monotonic(), self._database.clock.now()
        state = watch.launcher.poll(watch.ref)
        watch.known = supervision.record_poll(watch.known, now, self._timing)
        new_nodes = {i for i, node in enumerate(state.nodes) if node.seen} - watch.recorded_nodes
        if new_nodes:
            self._record_agents(watch, state, new_nodes, now, wall)
        if state.waiting is not None:
            watch.known = replace(watch.known, last_queued_at=now)
        watch.known, action = supervision.next_action(
            watch.supervised, watch.known, state, desired_state, now, wall, self._timing
        )
        match action.kind:
            case ActionKind.SUBMIT:
                self._submit_again(watch, now)
            case ActionKind.STOP:
                self._add_event(watch, EventType.AGENT_STOPPED, action.cause, action.text or "SIGTERM to the agent")
                watch.known = supervision.record_stop(watch.known, action, now)
                self._send_sigterm(watch)
            case ActionKind.SIGNAL:
                self._send_sigterm(watch)
            case ActionKind.LEAVE:
                self._add_event(watch, EventType.AGENT_LEFT, None, left_running_text(watch))
                watch.known = replace(watch.known, left_running=True)
            case ActionKind.KILL | ActionKind.KILL_LOST | ActionKind.KILL_LINGERING:
                self._kill(watch, state, action)
            case ActionKind.FINISH:
                decision = self._finish(watch, state, now)
                if decision is not None or watch.finish_future is not None or watch.evidence is not None:
                    return decision
            case ActionKind.WAIT:
                if persisted_deadlines.is_write_due(watch, now):
                    self._write_deadlines(watch, now)
        exists = watch.known.submitted or state.alive or state.seen
        waiting = state.waiting if exists else watch.engine_full_message
        if waiting is not None:
            self._store_wait_reason(watch, now, reason=Reason.ENGINE_QUEUE, message=waiting)
        elif exists:  # otherwise the result of the last submission stays
            self._store_wait_reason(watch, now)
        return None

    def record_failure(self, watch: Watch, error: Exception) -> None:
        """Record that ``poll`` raised ``error``; the next poll comes after a pause. Raise ``LeaseLost``."""
        pause = min(_FIRST_PAUSE * 2.0 ** min(watch.failures, 16), LONGEST_PAUSE)
        watch.paused_until, watch.failures = self._database.clock.monotonic() + pause, watch.failures + 1
        text = supervision_error_text(watch.lease, error)
        if text != watch.supervision_error:
            self.record_error(watch.lease, error)
            watch.supervision_error, watch.stored_reason = text, None

    def record_error(self, lease: Lease, error: Exception) -> None:
        """Store in the job's row that the attempt cannot be supervised; a new error type gets an event. Raise ``LeaseLost``."""
        text, kind = supervision_error_text(lease, error), type(error).__name__
        # no value of the row is read: it may be what cannot be read
        own_job = sa.update(Job).where(
            Job.id == lease.job_id, Job.attempt == lease.attempt, Job.lease_token == lease.token
        )
        recorded_errors = sa.select(Event.data).where(
            Event.job_id == lease.job_id, Event.attempt == lease.attempt, Event.type == EventType.RECONCILE_ERROR
        )
        with self._database.write() as session:
            update = own_job.values(reason=Reason.RECONCILE_ERROR, message=text).returning(Job.id)
            if session.scalar(update.execution_options(synchronize_session=False)) is None:
                raise LeaseLost(f"job {lease.job_id}: another reconciler has taken it over")
            if any(data.get("error") == kind for data in session.scalars(recorded_errors)):
                return
            log.error("%s, attempt %d: it cannot be supervised", lease.job_id, lease.attempt, exc_info=error)
            add_event(
                session, lease.job_id, EventType.RECONCILE_ERROR, text, attempt=lease.attempt, data={"error": kind}
            )

    def record_recovery(self, watch: Watch) -> None:
        """Record that a poll of the attempt succeeded, and clear the supervision error in the job's row."""
        watch.failures = 0
        if watch.supervision_error is None:
            return
        log.info("%s: it is supervised again", watch.ref.name)
        with self._database.write() as session:
            job = lock_leased_job(session, watch.lease)
            if job.reason == Reason.RECONCILE_ERROR:
                job.reason = job.message = None
        watch.supervision_error = None

    def _send_sigterm(self, watch: Watch) -> None:
        """Send SIGTERM to the agents, and store the deadline for their end. Raise ``EngineUnreachable``; the launcher's other
        errors are only logged."""
        self._ensure_lease(watch)
        try:
            watch.launcher.stop(watch.ref, supervision.killable_after(watch.supervised, watch.known, self._timing))
        except EngineUnreachable:
            raise
        except Exception:
            # it would occur again: the agents are killed when their time is over
            log.exception("%s: its launcher cannot send a SIGTERM", watch.ref.name)
        now = self._database.clock.monotonic()
        watch.known = supervision.record_signal(watch.known, now)
        self._write_deadlines(watch, now)  # otherwise the next reconciler sends it again, and counts from there

    def _kill(self, watch: Watch, state: AttemptState, action: NextAction) -> None:
        """Record in the history and the watch that the attempt is to be killed, and why. The next poll calls ``_finish``, which
        kills it."""
        text = action.text or kill_text(action.cause, state, watch.launcher.logs(watch.ref, LOG_TAIL))
        others = ": the other nodes' agents were killed" if action.kind is ActionKind.KILL_LOST else ""
        self._add_event(watch, EventType.AGENT_KILLED, action.cause, text + others)
        watch.known = supervision.record_kill(watch.known, action, text)

    def _finish(self, watch: Watch, state: AttemptState, now: float) -> Decision | None:
        """Fence the attempt, kill what is left of it, and start to finalise it once nothing is alive. Return the decision if it
        is there already."""
        watch.known = supervision.record_ending(watch.known, state, now)
        self._ensure_lease(watch)
        attempt_files.fence(watch.ref.paths)  # from here on, a process suspended before its submission is too late
        remaining = watch.launcher.kill(watch.ref)
        if remaining:
            if supervision.is_unproven(watch.known, now):
                watch.known = replace(watch.known, unproven_reported=True)
                text = f"{', '.join(remaining)} of the attempt: not ended; no new attempt starts before they have ended"
                self._add_event(watch, EventType.NOT_PROVED_DEAD, None, text)
            return None
        last = watch.launcher.poll(watch.ref)  # a result may have been written between the poll and the end
        logs = "" if last.seen else watch.launcher.logs(watch.ref, LOG_TAIL)
        return self._start_finishing(
            watch, supervision.collect_evidence(watch.known, last, logs, self._database.clock.monotonic())
        )

    def _start_finishing(self, watch: Watch, evidence: Evidence) -> Decision | None:
        """Start to finalise the attempt in the background, now or by a later poll. Return the decision if it is there already."""
        work = partial(self._finish_in_background, watch.lease, watch.ref, watch.ranks_per_node, watch.limits, evidence)
        watch.finish_future = self._background.start_finishing(watch.lease, work)
        watch.evidence = evidence if watch.finish_future is None else None
        if watch.finish_future is None:
            text = (
                f"no process of attempt {watch.lease.attempt} is alive; its end waits until one of the "
                f"{MAX_CONCURRENT_FINISHES} ends that are being processed is done"
            )
            self._store_wait_reason(watch, self._database.clock.monotonic(), reason=Reason.ATTEMPT_ENDING, message=text)
        return self.finish_result(watch)

    def _finish_in_background(
        self, lease: Lease, ref: AttemptRef, ranks_per_node: int, limits: Limits, evidence: Evidence
    ) -> Decision:
        """Ingest the reports that the attempt left, end it in the database and return the decision. Raise ``LeaseLost``."""
        paths = self._home.job(lease.job_id)
        ingest_leftover(self._database, paths, lease, ref.nodes, ranks_per_node, self._bounds)
        decision = finalise_attempt(self._database, paths, lease, limits, evidence, self._bounds)
        assert decision.event is not None and decision.cause is not None
        log.info("%s: ended with %s: %s", ref.name, decision.cause.value, decision.event.value)
        # here and not in a poll: the job may be launched again under another watch before that
        self._background.run_housekeeping("removal", partial(removal.delete_all_marked, self._database, self._home))
        return decision

    def finish_result(self, watch: Watch) -> Decision | None:
        """Return the decision of a finalised attempt; None: it is not there yet. Raise the error of a failed finalisation."""
        if watch.finish_future is None:
            return None
        if not watch.finish_future.done():
            self._report_slow_finish(watch)
            return None
        end, watch.finish_future = watch.finish_future, None
        return end.result()

    def _report_slow_finish(self, watch: Watch) -> None:
        """Store the reason ``ATTEMPT_ENDING`` in the job's row if the attempt's finalisation takes long; otherwise clear it."""
        now = self._database.clock.monotonic()
        slow = now - self._background.finishing_jobs.get(watch.lease.job_id, now) > ROUND_SECONDS
        text = (
            f"no process of attempt {watch.lease.attempt} is alive; its files have been read for more than {ROUND_SECONDS:g} "
            "s: there is much to read, or the file system does not respond"
        )
        with suppress(LeaseLost):  # the finalisation has just released the lease, or is about to find it lost
            self._store_wait_reason(watch, now, reason=Reason.ATTEMPT_ENDING if slow else None, message=text)

    def _ensure_lease(self, watch: Watch) -> None:
        """Ensure that this process still holds the job's lease. Raise ``LeaseLost`` if another reconciler has it."""
        began = self._database.clock.monotonic()
        if leases.is_surely_held(watch.lease_held_at, began, self._lease_seconds):
            return
        with self._database.write() as session:
            if not leases.renew(session, [watch.lease], self._lease_seconds):
                raise LeaseLost(f"{watch.ref.name}: another reconciler has taken it over while this one was delayed")
        watch.lease_held_at = began

    def _record_agents(
        self, watch: Watch, state: AttemptState, new_nodes: set[int], now: float, wall: datetime
    ) -> None:
        """Store hosts and pids of the agents of ``new_nodes``, and when the attempt's first agent began."""
        started_at = min(agent_started_at(watch.ref.paths.node(node).agent_file, wall) for node in new_nodes)
        with self._database.write() as session:
            job = lock_leased_job(session, watch.lease)
            attempt = session.get_one(Attempt, (job.id, watch.lease.attempt))
            if attempt.begun_at is None:
                attempt.begun_at = max(started_at, attempt.created_at)
                ran = min(max(0.0, (wall - attempt.begun_at).total_seconds()), now - watch.known.created_at)
                watch.known = replace(watch.known, running_since=now - ran)
                persisted_deadlines.write(session, [watch], now, self._database.clock.boot_id())
            for number in new_nodes:
                agent = state.nodes[number].agent
                node = session.get(AttemptNode, (job.id, watch.lease.attempt, number))
                if node is not None and agent is not None:
                    node.host, node.pid, node.start_time = agent.host, agent.pid, agent.start_time
        watch.recorded_nodes |= new_nodes

    def _store_wait_reason(self, watch: Watch, now: float, *, reason: Reason | None = None, message: str = "") -> None:
        """Store in the job's row why the attempt waits. ``reason`` None: the attempt does not wait, so the stored reason is
        cleared. If the row has a reason of another kind, that reason is kept. Raise ``LeaseLost``."""
        why = None if reason is None else (reason, message)
        if why == watch.stored_reason:
            return
        with self._database.write() as session:
            job = lock_leased_job(session, watch.lease)
            if job.reason in (None, Reason.RECONCILE_ERROR, *_CLEARED_REASONS):
                job.reason, job.message = why or (None, None)
            if reason == Reason.ENGINE_QUEUE or watch.is_queued:  # its launch deadline stops or starts
                changed = replace(watch, stored_reason=why)
                persisted_deadlines.write(session, [changed], now, self._database.clock.boot_id())
        watch.stored_reason = why
        if why is not None:
            watch.supervision_error = None  # which the row no longer has

    def store_deadlines(self, session: Session, watches: Iterable[Watch], *, with_run_time: bool) -> None:
        """Store how long the deadlines of these attempts have run. The caller has renewed their leases in this transaction.
        ``with_run_time``: store also the running time of attempts that have ``policy.timeout`` but no running deadline."""
        now = self._database.clock.monotonic()
        kept = [
            watch
            for watch in watches
            if persisted_deadlines.running_deadlines(watch.known, is_queued=watch.is_queued)
            or (with_run_time and watch.limits.timeout is not None and watch.known.running_since is not None)
        ]
        persisted_deadlines.write(session, kept, now, self._database.clock.boot_id())

    def _write_deadlines(self, watch: Watch, now: float) -> None:
        """Store the attempt's deadlines in a transaction of its own. Raise ``LeaseLost``."""
        with self._database.write() as session:
            lock_leased_job(session, watch.lease)
            persisted_deadlines.write(session, [watch], now, self._database.clock.boot_id())

    def _add_event(self, watch: Watch, type_: EventType, cause: Cause | None, message: str) -> None:
        """Log the message and add it as an event to the job's history. Raise ``LeaseLost``."""
        log.info("%s: %s: %s", watch.ref.name, type_, message)
        with self._database.write() as session:
            job = lock_leased_job(session, watch.lease)
            data = {} if cause is None else {"cause": cause.value}
            add_event(session, job.id, type_, message, attempt=watch.lease.attempt, data=data)
