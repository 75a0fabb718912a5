"""One active job, looked after under a lease: a look at its agent, and what follows from it.

What another process must know after a crash is an event row written *before* the deed: ``agent-stopped`` and ``agent-killed``,
each with the cause. Which deed follows from a look is ``watch_rules``' to say; it is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause
from ratchet_contract.spec import JobSpec
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service import leases, marks, removal, steady, unmanaged, watch_rules
from ratchet_service.background import MOST, Background
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.database import Database
from ratchet_service.decision import Decision, Limits
from ratchet_service.decision_rows import limits_of, view_of
from ratchet_service.ending import LOG_TAIL, settle
from ratchet_service.health import ROUND_SECONDS
from ratchet_service.launchers import files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineBusy,
    EngineFull,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.table import Launchers
from ratchet_service.launching import NO_LAUNCHER, Launching
from ratchet_service.leases import Lease, LeaseLost, hold
from ratchet_service.leftover import ingest_leftover
from ratchet_service.models import Attempt, AttemptNode, Event, Job
from ratchet_service.storable import storable
from ratchet_service.transitions import add_event
from ratchet_service.watch_rules import Deed, Do
from ratchet_service.watched import (
    KILLED,
    LEFT,
    STOPPED,
    WAITING,
    Evidence,
    Timing,
    Watch,
    Wish,
    begun_at,
    kill_text,
    left_text,
    remember,
)

log = logging.getLogger(__name__)

UNREACHABLE: Final = "engine-unreachable"
ENDING: Final = "attempt-ending"
"""Reason of a job whose attempt is proved dead, and whose end takes long or waits until others are over."""
_OVER: Final = (WAITING, UNREACHABLE, NO_LAUNCHER, ENDING)
"""Reasons that are taken away once the attempt is looked after and out of the queue."""
_SUBMIT_AGAIN: Final = 2.0
"""Seconds."""
_MOST_SAID: Final = 1000  # characters of an error
JUMPED: Final = "clock-jumped"
RECONCILE_ERROR: Final = "reconcile-error"
"""Reason of a job whose attempt cannot be looked after, and type of the event that tells of it."""


def trouble(lease: Lease, error: Exception) -> str:
    """Why the attempt cannot be looked after, for people."""
    said = f"{type(error).__name__}: {error}"[:_MOST_SAID]
    return storable(
        f"attempt {lease.epoch} cannot be looked after: {said}. It is tried again, at the latest every "
        f"{watch_rules.LONGEST_PAUSE:g} s; the service's log has the traceback"
    )


class Watcher:
    """Carries out what ``decide`` says about watched jobs. Raises ``LeaseLost`` when a job is not ours any more."""

    def __init__(
        self,
        database: Database,
        home: HomePaths,
        launchers: Launchers,
        launching: Launching,
        timing: Timing,
        lease_seconds: float,
        background: Background,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self._database = database
        self._home = home
        self._launchers = launchers
        self._launching = launching
        self._timing = timing
        self._lease_seconds = lease_seconds
        self._background = background
        self._bounds = bounds

    def begin(self, lease: Lease, held_at: float) -> Watch:
        """Start to look after a job: load it, and what was done to its attempt before. ``held_at``: as in ``Watch``."""
        clock = self._database.clock
        now = clock.monotonic()
        with self._database.read() as session:
            job = session.get_one(Job, lease.job_id)
            attempt = session.get_one(Attempt, (lease.job_id, lease.epoch))
            clocks = attempt.clocks if isinstance(attempt.clocks, dict) else {}
            ran = steady.counted(clocks.get(marks.RUN), attempt.begun_at, clock)
            spec = JobSpec.model_validate(job.spec)
            limits = limits_of(spec)
            paths = self._home.job(lease.job_id).attempt(lease.epoch)
            watch = Watch(
                lease,
                AttemptRef(lease.job_id, lease.epoch, paths, spec.world.nodes),
                self._launchers[spec.launcher.kind],
                limits,
                spec.world.ranks_per_node,
                view_of(job, limits),
                held_at=held_at,
                made_at=now,
                waited_until=now,
                looked_at=now,
                running_since=None if ran is None else now - ran,
                said=(job.reason, job.message or "") if job.reason in _OVER else None,
                said_under=job.desired,
                protocol=attempt.launch.get("launch_file", {}).get("protocol", PROTOCOL_VERSION),
                unmanaged=unmanaged.reported(attempt.resume_report),
                trouble=job.message if job.reason == RECONCILE_ERROR else None,
            )
            remember(session, watch, now)
        marks.recall(watch, clocks, clock, self._lease_seconds / 4, self._timing.launch_deadline)
        return watch

    def submit(self, watch: Watch, plan: LaunchPlan) -> None:
        """Hand the attempt to the launcher."""
        with suppress(EngineUnreachable):  # a look tries again, and tells of it
            self._submit(watch, plan)

    def _submit_again(self, watch: Watch, now: float) -> None:
        """Made again from what is stored: nothing of it is there, so its start is counted from here on."""
        plan = self._launching.relaunch(watch.lease)
        watch.waited_until = now
        self._mark(watch, now)
        self._submit(watch, plan)

    def _submit(self, watch: Watch, plan: LaunchPlan) -> None:
        self._sure(watch)
        watch.submitted, watch.full = True, None
        try:
            watch.launcher.submit(plan)
        except (EngineFull, EngineUnreachable) as error:
            watch.submitted, watch.submit_at = False, self._database.clock.monotonic() + _SUBMIT_AGAIN
            if not isinstance(error, EngineFull):
                raise
            watch.full = error.detail
        except LaunchError as error:
            watch.forced, watch.message = Cause.LAUNCHER_ERROR, error.detail

    def look(self, watch: Watch, wish: Wish) -> Decision | None:
        """One round. Returns the decision that ended the attempt, or None while it goes on. What the engine does not tell now
        is told later: nothing is concluded from its silence."""
        if watch.said_under is not wish.desired:
            watch.said, watch.said_under = None, wish.desired
        try:
            decision = self._look(watch, wish)
        except EngineBusy:
            return None
        except EngineUnreachable as error:
            if watch.said is None or watch.said[0] != UNREACHABLE:
                self._note(watch, UNREACHABLE, None, error.detail)
            self._tell(watch, self._database.clock.monotonic(), reason=UNREACHABLE, message=error.detail)
            return None
        return decision

    def _look(self, watch: Watch, wish: Wish) -> Decision | None:
        if watch.evidence is not None:
            self._sure(watch)
            return self._begin_end(watch, watch.evidence)
        now, wall = self._database.clock.monotonic(), self._database.clock.now()
        state = watch.launcher.poll(watch.ref)
        watch_rules.looked(watch, now, self._timing)
        fresh = {i for i, node in enumerate(state.nodes) if node.seen} - watch.recorded
        if fresh:
            self._record(watch, state, fresh, now, wall)
        if state.waiting is not None:
            watch.waited_until = now
        deed = watch_rules.deed(watch, state, wish, now, wall, self._timing)
        match deed.do:
            case Do.SUBMIT:
                self._submit_again(watch, now)
            case Do.STOP:
                self._note(watch, STOPPED, deed.cause, deed.text or "SIGTERM to the agent")
                watch_rules.stopping(watch, deed, now)
                self._signal(watch)
            case Do.SIGNAL:
                self._signal(watch)
            case Do.LEAVE:
                self._note(watch, LEFT, None, left_text(watch))
                watch.left = True
            case Do.KILL | Do.KILL_LOST | Do.KILL_LINGERING:
                self._kill(watch, state, deed)
            case Do.FINISH:
                decision = self._finish(watch, state, now)
                if decision is not None or watch.end is not None or watch.evidence is not None:
                    return decision
            case Do.WAIT:
                if marks.due(watch, now):
                    self._mark(watch, now)
        made = watch.submitted or state.alive or state.seen
        waiting = state.waiting if made else watch.full
        if waiting is not None:
            self._tell(watch, now, reason=WAITING, message=waiting)
        elif made:  # else what came of the last try to submit it holds
            self._tell(watch, now)
        return None

    def failed(self, watch: Watch, error: Exception) -> None:
        """``look`` raised it: no reason to look again at once, nor to leave the job alone for good."""
        watch_rules.failed(watch, self._database.clock.monotonic())
        text = trouble(watch.lease, error)
        if text != watch.trouble:
            self.tell(watch.lease, error)
            watch.trouble, watch.said = text, None

    def tell(self, lease: Lease, error: Exception) -> None:
        """The attempt cannot be looked after: on the job's row, and once for each kind of error in its history. The row may be
        what cannot be read, so nothing of it is. Raises ``LeaseLost``."""
        text, kind = trouble(lease, error), type(error).__name__
        ours = sa.update(Job).where(Job.id == lease.job_id, Job.epoch == lease.epoch, Job.lease_token == lease.token)
        told = sa.select(Event.data).where(
            Event.job_id == lease.job_id, Event.epoch == lease.epoch, Event.type == RECONCILE_ERROR
        )
        with self._database.write() as session:
            said = ours.values(reason=RECONCILE_ERROR, message=text).returning(Job.id)
            if session.scalar(said.execution_options(synchronize_session=False)) is None:
                raise LeaseLost(f"job {lease.job_id}: another reconciler has taken it over")
            if any(data.get("error") == kind for data in session.scalars(told)):
                return
            log.error("%s, attempt %d: it cannot be looked after", lease.job_id, lease.epoch, exc_info=error)
            add_event(session, lease.job_id, RECONCILE_ERROR, text, epoch=lease.epoch, data={"error": kind})

    def healed(self, watch: Watch) -> None:
        """A look at it went well again."""
        watch.failures = 0
        if watch.trouble is None:
            return
        log.info("%s: it can be looked after again", watch.ref.name)
        with self._database.write() as session:
            job = hold(session, watch.lease)
            if job.reason == RECONCILE_ERROR:
                job.reason = job.message = None
        watch.trouble = None

    def _signal(self, watch: Watch) -> None:
        """Raises ``EngineUnreachable``: then it is sent again. A launcher that fails otherwise would fail again: the agent
        is killed when its time is over."""
        self._sure(watch)
        try:
            watch.launcher.stop(watch.ref, watch.killable_after(self._timing))
        except EngineUnreachable:
            raise
        except Exception:
            log.exception("%s: its launcher cannot send a SIGTERM", watch.ref.name)
        now = self._database.clock.monotonic()
        watch_rules.signalled(watch, now)
        self._mark(watch, now)  # else the next reconciler sends it again, and counts from there

    def _kill(self, watch: Watch, state: AttemptState, deed: Deed) -> None:
        """Say so first: ``_finish`` kills, in the next round."""
        text = deed.text or kill_text(deed.cause, state, watch.launcher.logs(watch.ref, LOG_TAIL))
        others = ": the other nodes' agents were killed" if deed.do is Do.KILL_LOST else ""
        self._note(watch, KILLED, deed.cause, text + others)
        watch_rules.killing(watch, deed, text)

    def _finish(self, watch: Watch, state: AttemptState, now: float) -> Decision | None:
        """Prove the attempt dead; then what it left is taken in, and its end settled, beside the rounds. Nothing is decided while
        anything of it is alive."""
        if watch.ending_since is None or not watch.killing:  # what it says of the kill itself is no news
            watch.ends = watch.ends or state.ends  # and what follows may be of the kill that proves it dead
        watch.ending_since = now if watch.ending_since is None else watch.ending_since
        self._sure(watch)
        files.fence(watch.ref.paths)  # whoever was held up before its submission comes too late from here on
        left = watch.launcher.kill(watch.ref)
        if left:
            if watch_rules.tells_unproven(watch, now):
                text = f"{', '.join(left)} of the attempt: not ended; no new attempt starts before they are gone"
                self._note(watch, "not-proved-dead", None, text)
            return None
        last = watch.launcher.poll(watch.ref)  # the last word may have come between the look and the end
        logs = "" if last.seen else watch.launcher.logs(watch.ref, LOG_TAIL)
        return self._begin_end(watch, watch_rules.evidence(watch, last, logs, self._database.clock.monotonic()))

    def _begin_end(self, watch: Watch, evidence: Evidence) -> Decision | None:
        """Or keep the evidence until there is room for one more end: the engine need not be asked again."""
        work = partial(self._end, watch.lease, watch.ref, watch.ranks_per_node, watch.limits, evidence)
        watch.end = self._background.begin(watch.lease, work)
        watch.evidence = evidence if watch.end is None else None
        if watch.end is None:
            text = f"nothing of attempt {watch.lease.epoch} is alive; it is ended once one of {MOST} other ends is over"
            self._tell(watch, self._database.clock.monotonic(), reason=ENDING, message=text)
        return self.ended(watch)

    def _end(self, lease: Lease, ref: AttemptRef, ranks_per_node: int, limits: Limits, evidence: Evidence) -> Decision:
        """Takes as long as reading the bytes of a checkpoint takes. Raises ``LeaseLost``. Whatever follows from the end is done
        here: the job may be launched again, under another watch, before the next look."""
        paths = self._home.job(lease.job_id)
        ingest_leftover(self._database, paths, lease, ref.nodes, ranks_per_node, self._bounds)
        decision = settle(self._database, paths, lease, limits, evidence, self._bounds)
        assert decision.event is not None and decision.cause is not None
        log.info("%s: ended with %s: %s", ref.name, decision.cause.value, decision.event.value)
        self._background.aside("removal", partial(removal.carry_on, self._database, self._home))
        return decision

    def ended(self, watch: Watch) -> Decision | None:
        """Of one whose end is being made, and that is not looked at meanwhile; None: not yet. Raises what the end failed with:
        the next look begins it again."""
        if watch.end is None:
            return None
        if not watch.end.done():
            self._tell_slow(watch)
            return None
        end, watch.end = watch.end, None
        return end.result()

    def _tell_slow(self, watch: Watch) -> None:
        """That its end takes long."""
        now = self._database.clock.monotonic()
        slow = now - self._background.jobs.get(watch.lease.job_id, now) > ROUND_SECONDS
        text = (
            f"nothing of attempt {watch.lease.epoch} is alive; what it left on the disk has been read for more than "
            f"{ROUND_SECONDS:g} s: it is much, or the file system does not answer"
        )
        with suppress(LeaseLost):  # the end has just given it back, or is about to find that it is lost
            self._tell(watch, now, reason=ENDING if slow else None, message=text)

    def _sure(self, watch: Watch) -> None:
        """Before a deed that no transaction guards: this process may have been stopped since it saw its lease. Where that was too
        long ago, the lease is renewed first. Raises ``LeaseLost`` when another reconciler has the job by now."""
        began = self._database.clock.monotonic()
        if leases.surely_held(watch.held_at, began, self._lease_seconds):
            return
        with self._database.write() as session:
            if not leases.renew(session, [watch.lease], self._lease_seconds):
                raise LeaseLost(f"{watch.ref.name}: another reconciler has taken it over while this one was held up")
        watch.held_at = began

    def _record(self, watch: Watch, state: AttemptState, fresh: set[int], now: float, wall: datetime) -> None:
        """Who the agents are, for people and for the API, and when the first of them began."""
        begun = min(begun_at(watch.ref.paths.node(node).agent_file, wall) for node in fresh)
        with self._database.write() as session:
            job = hold(session, watch.lease)
            attempt = session.get_one(Attempt, (job.id, watch.lease.epoch))
            if attempt.begun_at is None:
                attempt.begun_at = max(begun, attempt.created_at)
                ran = min(max(0.0, (wall - attempt.begun_at).total_seconds()), now - watch.made_at)
                watch.running_since = now - ran
                marks.write(session, watch, now, self._database.clock.boot())
            for number in fresh:
                agent = state.nodes[number].agent
                node = session.get(AttemptNode, (job.id, watch.lease.epoch, number))
                if node is not None and agent is not None:
                    node.host, node.pid, node.start_time = agent.host, agent.pid, agent.start_time
        watch.recorded |= fresh

    def _tell(self, watch: Watch, now: float, *, reason: str | None = None, message: str = "") -> None:
        """Why the engine does not start it, or is not heard, on the job's row; written when it changes, taken away when it is
        over."""
        why = None if reason is None else (reason, message)
        if why == watch.said:
            return
        with self._database.write() as session:
            job = hold(session, watch.lease)
            if job.reason in (None, RECONCILE_ERROR, *_OVER):
                job.reason, job.message = why or (None, None)
            if WAITING in (reason, watch.said and watch.said[0]):  # its launch deadline ends or begins
                marks.write(session, replace(watch, said=why), now, self._database.clock.boot())
        watch.said = why
        if why is not None:
            watch.trouble = None  # which the row does not tell any more

    def tell_jump(self, session: Session, watches: Collection[Watch], seconds: float) -> list[Watch]:
        """The wall clock has jumped while attempts were looked after: their histories tell, since their times do not. Returns
        those that are not ours any more."""
        ours = leases.held(session, [watch.lease for watch in watches])
        text = f"the wall clock of the reconciler's machine jumped by {seconds:+.0f} s: no deadline counts that"
        for watch in watches:
            if watch.lease in ours:
                data = {"seconds": round(seconds, 3)}
                add_event(session, watch.lease.job_id, JUMPED, text, epoch=watch.lease.epoch, data=data)
        return [watch for watch in watches if watch.lease not in ours]

    def keep(self, session: Session, watches: Iterable[Watch], *, runs: bool) -> None:
        """What has been counted of their deadlines, for a reconciler that takes them over; with ``runs`` also what attempts with
        a time limit have run. Their leases were renewed in this transaction."""
        now = self._database.clock.monotonic()
        kept = [
            watch
            for watch in watches
            if marks.running(watch) or (runs and watch.limits.timeout is not None and watch.running_since is not None)
        ]
        marks.keep(session, kept, now, self._database.clock.boot())

    def _mark(self, watch: Watch, now: float) -> None:
        with self._database.write() as session:
            hold(session, watch.lease)
            marks.write(session, watch, now, self._database.clock.boot())

    def _note(self, watch: Watch, type_: str, cause: Cause | None, message: str) -> None:
        log.info("%s: %s: %s", watch.ref.name, type_, message)
        with self._database.write() as session:
            job = hold(session, watch.lease)
            data = {} if cause is None else {"cause": cause.value}
            add_event(session, job.id, type_, message, epoch=watch.lease.epoch, data=data)
