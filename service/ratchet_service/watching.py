"""One active job, looked after under a lease: a look at its agent, and what follows from it.

What another process must know after a crash is an event row written *before* the deed: ``agent-stopped`` and ``agent-killed``,
each with the cause.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.spec import JobSpec
from ratchet_service import leases
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.database import Database
from ratchet_service.decide import decide
from ratchet_service.decision import Action, Alive, Decision
from ratchet_service.decision_rows import limits_of, view_of
from ratchet_service.ending import LOG_TAIL, Evidence, settle
from ratchet_service.launchers import files
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.table import Launchers
from ratchet_service.launching import NO_LAUNCHER, Launching
from ratchet_service.leases import Lease, LeaseLost, hold
from ratchet_service.leftover import ingest_leftover
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.transitions import add_event
from ratchet_service.watched import (
    KILLED,
    STOPPED,
    Timing,
    Watch,
    Wish,
    begun_at,
    is_over,
    kill_text,
    remember,
)

log = logging.getLogger(__name__)

UNREACHABLE: Final = "engine-unreachable"
WAITING: Final = "engine-queue"
"""Reason of a job that waits in its engine's queue; the message is the engine's."""
_OVER: Final = (WAITING, NO_LAUNCHER)
"""Reasons that are taken away once the attempt is looked after and out of the queue."""
_UNPROVEN_SECONDS: Final = 10.0
_SUBMIT_AGAIN: Final = timedelta(seconds=2.0)


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
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self._database = database
        self._home = home
        self._launchers = launchers
        self._launching = launching
        self._timing = timing
        self._lease_seconds = lease_seconds
        self._bounds = bounds

    def begin(self, lease: Lease, held_at: float) -> Watch:
        """Start to look after a job: load it, and what was done to its attempt before. ``held_at``: as in ``Watch``."""
        with self._database.read() as session:
            job = session.get_one(Job, lease.job_id)
            attempt = session.get_one(Attempt, (lease.job_id, lease.epoch))
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
                waited_until=attempt.created_at,
                looked_at=attempt.created_at,
                begun_at=attempt.begun_at,
                said=job.message if job.reason in _OVER else None,
            )
            remember(session, watch)
        return watch

    def submit(self, watch: Watch, plan: LaunchPlan | None = None) -> None:
        """Hand the attempt to the launcher; ``plan`` None: make it again from what is stored."""
        with suppress(EngineUnreachable):  # a look tries again, and tells of it
            self._submit(watch, plan)

    def _submit(self, watch: Watch, plan: LaunchPlan | None = None) -> None:
        plan = plan or self._launching.relaunch(watch.lease)
        self._sure(watch)
        watch.submitted = True
        try:
            watch.launcher.submit(plan)
        except EngineUnreachable:
            watch.submitted, watch.submit_at = False, self._database.clock.now() + _SUBMIT_AGAIN
            raise
        except LaunchError as error:
            watch.forced, watch.message = Cause.LAUNCHER_ERROR, error.detail

    def look(self, watch: Watch, wish: Wish) -> Decision | None:
        """One round. Returns the decision that ended the attempt, or None while it goes on. What the engine does not tell now
        is told later: nothing is concluded from its silence."""
        try:
            decision = self._look(watch, wish)
        except EngineUnreachable as error:
            if not watch.unreachable:
                watch.unreachable = True
                self._note(watch, UNREACHABLE, None, error.detail)
            return None
        watch.unreachable = False
        return decision

    def _look(self, watch: Watch, wish: Wish) -> Decision | None:
        now = self._database.clock.now()
        state = watch.launcher.poll(watch.ref)
        if (now - watch.looked_at).total_seconds() > self._timing.launch_deadline / 2:
            watch.waited_until = now  # service or engine was away: it may have left the queue just now
        watch.looked_at = now
        fresh = {i for i, node in enumerate(state.nodes) if node.seen} - watch.recorded
        if fresh:
            self._record(watch, state, fresh, now)
        self._tell_waiting(watch, state, now)
        if watch.killing:
            return self._finish(watch, state, now)
        if not state.alive:
            if not state.seen and not watch.submitted and wish.desired is Desired.RUN:
                if watch.submit_at is None or now >= watch.submit_at:
                    self._submit(watch)
                return None
            if not state.seen and not watch.submitted:
                watch.forced, watch.message = wish.desired_cause, "ended before an agent was started"
            return self._finish(watch, state, now)
        return self._alive(watch, state, wish, now)

    def _alive(self, watch: Watch, state: AttemptState, wish: Wish, now: datetime) -> Decision | None:
        if is_over(state):
            watch.result_seen_at = watch.result_seen_at or now
            if (now - watch.result_seen_at).total_seconds() >= self._timing.linger:
                text = f"agents that had not ended {self._timing.linger:g} s after another's end were killed"
                self._note(watch, KILLED, None, text)
                watch.killing = True
            return None
        if state.lost and self._end_lost(watch, state, now):
            return None
        asked = None if watch.stopped_at is None else (now - watch.stopped_at).total_seconds()
        alive = Alive(
            age=(now - watch.waited_until).total_seconds() if not state.seen else 0.0,
            running=0.0 if watch.begun_at is None else (now - watch.begun_at).total_seconds(),
            seen=state.seen,
            waiting=state.waiting is not None,
            asked=asked,
            asked_cause=watch.forced,
            killable_after=self._timing.kill_after,
            launch_deadline=self._timing.launch_deadline,
        )
        view = replace(
            watch.view,
            phase=wish.phase,
            desired=wish.desired,
            desired_cause=wish.desired_cause,
            desired_at=wish.desired_at,
            attempt=alive,
        )
        decision = decide(view, now)
        if decision.action is Action.STOP:
            self._note(watch, STOPPED, decision.cause, "SIGTERM to the agent")
            watch.stopped_at, watch.forced = now, decision.cause
            self._sure(watch)
            watch.launcher.stop(watch.ref, self._timing.kill_after)
        elif decision.action is Action.KILL:
            text = kill_text(decision.cause, state, watch.launcher.logs(watch.ref, LOG_TAIL))
            self._note(watch, KILLED, decision.cause, text)
            watch.forced, watch.killing, watch.message = decision.cause, True, text
        return None

    def _end_lost(self, watch: Watch, state: AttemptState, now: datetime) -> bool:
        """A node's agent has died without a word. The others mostly see their connections break, and end by themselves."""
        watch.lost_since = watch.lost_since or now
        if (now - watch.lost_since).total_seconds() < self._timing.lost:
            return False
        end = next((end for end in state.ends if end.node is None or end.node in state.lost), None)
        text = f"the agent of node {', '.join(map(str, state.lost))} died without a result" + (
            f" ({end.message})" if end is not None else ""
        )
        watch.forced = end.cause if end is not None else Cause.UNKNOWN
        watch.killing, watch.message = True, text
        self._note(watch, KILLED, watch.forced, f"{text}: the other nodes' agents were killed")
        return True

    def _finish(self, watch: Watch, state: AttemptState, now: datetime) -> Decision | None:
        """Prove the attempt dead, take in what it left, settle. Nothing is decided while anything of it is alive."""
        if watch.ending_since is None or not watch.killing:  # what it says of the kill itself is no news
            watch.ends = state.ends or watch.ends  # and the kill may take the engine's own record away
        watch.ending_since = watch.ending_since or now
        self._sure(watch)
        files.fence(watch.ref.paths)  # whoever was held up before its submission comes too late from here on
        left = watch.launcher.kill(watch.ref)
        if left:
            waited = (now - watch.ending_since).total_seconds()
            if waited > _UNPROVEN_SECONDS and not watch.unproven:
                watch.unproven = True
                text = f"{', '.join(left)} of the attempt: not ended; no new attempt starts before they are gone"
                self._note(watch, "not-proved-dead", None, text)
            return None
        last = watch.launcher.poll(watch.ref)  # the last word may have come between the look and the end
        job_paths = self._home.job(watch.lease.job_id)
        ingest_leftover(self._database, job_paths, watch.lease, watch.ref.nodes, watch.ranks_per_node, self._bounds)
        logs = "" if last.seen else watch.launcher.logs(watch.ref, LOG_TAIL)
        ends = watch.ends if watch.killing else last.ends or watch.ends
        evidence = Evidence(replace(last, ends=ends), watch.forced, watch.message, watch.killing, logs)
        return settle(self._database, job_paths, watch.lease, watch.limits, evidence, self._bounds)

    def _sure(self, watch: Watch) -> None:
        """Before a deed that no transaction guards: this process may have been stopped since it saw its lease. Where that was too
        long ago, the lease is renewed first. Raises ``LeaseLost`` when another reconciler has the job by now."""
        began = self._database.clock.monotonic()
        if began - watch.held_at < leases.TRUSTED * self._lease_seconds:
            return
        with self._database.write() as session:
            if not leases.renew(session, [watch.lease], self._lease_seconds):
                raise LeaseLost(f"{watch.ref.name}: another reconciler has taken it over while this one was held up")
        watch.held_at = began

    def _record(self, watch: Watch, state: AttemptState, fresh: set[int], now: datetime) -> None:
        """Who the agents are, for people and for the API, and when the first of them began."""
        begun = min(begun_at(watch.ref.paths.node(node).agent_file, now) for node in fresh)
        with self._database.write() as session:
            job = hold(session, watch.lease)
            attempt = session.get_one(Attempt, (job.id, watch.lease.epoch))
            if attempt.begun_at is None:
                attempt.begun_at = watch.begun_at = max(begun, attempt.created_at)
            for number in fresh:
                agent = state.nodes[number].agent
                node = session.get(AttemptNode, (job.id, watch.lease.epoch, number))
                if node is not None and agent is not None:
                    node.host, node.pid, node.start_time = agent.host, agent.pid, agent.start_time
        watch.recorded |= fresh

    def _tell_waiting(self, watch: Watch, state: AttemptState, now: datetime) -> None:
        """Why the engine has not started it, on the job's row; written when it changes, and taken away when it is over."""
        if state.waiting is not None:
            watch.waited_until = now
        if state.waiting == watch.said:
            return
        with self._database.write() as session:
            job = hold(session, watch.lease)
            if state.waiting is not None:
                job.reason, job.message = WAITING, state.waiting
            elif job.reason in _OVER:
                job.reason = job.message = None
        watch.said = state.waiting

    def _note(self, watch: Watch, type_: str, cause: Cause | None, message: str) -> None:
        log.info("%s: %s: %s", watch.ref.name, type_, message)
        with self._database.write() as session:
            job = hold(session, watch.lease)
            data = {} if cause is None else {"cause": cause.value}
            add_event(session, job.id, type_, message, epoch=watch.lease.epoch, data=data)
