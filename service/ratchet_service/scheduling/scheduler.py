"""One scheduling pass over the queue, as a pure function: which jobs start and on which slots, which wait and why, which attempts
are stopped for a waiting job, and which jobs end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from ratchet_contract.phases import Cause, JobPhase, Reason
from ratchet_service.lifecycle.decide import decide
from ratchet_service.lifecycle.decision import Action, Decision, JobView, Limits
from ratchet_service.scheduling.fair_order import Limit, Place, Queued, Share, order_queue
from ratchet_service.scheduling.preemption import PreemptionPlanner, Running, Scope
from ratchet_service.scheduling.slots import Board, Capacity, Grant, Need, Waiting, too_few_gpus

MAX_STARTS: Final = 16
"""Most launches of one pass on launchers with slots, and as many without. Jobs whose attempt could not be created before are
counted only after this number of starts."""
MAX_REASONS_STORED: Final = 1_000
"""Most jobs of one pass, of those whose need is not compared with the free slots, that get the reason why they wait; later passes
do the others."""
CREATION_FAILED: Final = Cause.LAUNCHER_ERROR
"""Reason of a queued job whose attempt could not be created when it was to start. Until it can, the job comes after others, and
no other job is stopped for it."""


@dataclass(frozen=True)
class Preemption:
    """Settings of preemption. ``scope``: whose jobs may be stopped for one of higher priority. ``min_run_seconds``: how long a
    job that was stopped in this way trains before it may be stopped in this way again."""

    scope: Scope = "owner"
    min_run_seconds: float = 60.0


Key = tuple[str, int]
"""A job and its newest attempt."""


class Row(NamedTuple):
    """A queued job, with the reason and message in its row. ``kind``: its launcher's name; may be empty. ``attempt``: its newest
    attempt. ``version``: of the row, which changes of the phase and of the spec increase, but not those of the reason.
    ``timeout``: ``policy.timeout`` in seconds; ``running_seconds``: how long all attempts ran. ``name``: the job's."""

    queued: Queued
    kind: str
    reason: str | None = None
    message: str | None = None
    attempt: int = 0
    version: int = 1
    need: Need = Need(0, 0)
    timeout: float | None = None
    running_seconds: float = 0.0
    name: str = ""

    @property
    def holder(self) -> str:
        """What the messages of other jobs call this one. Names are not unique."""
        return f"{self.name} ({self.queued.job})"

    @property
    def key(self) -> Key:
        """The job and its newest attempt."""
        return self.queued.job, self.attempt


@dataclass(frozen=True)
class QueueState:
    """What a pass decides from. ``slots``: the launchers that may start jobs, by name; True: Ratchet manages their slots.
    ``held``: the slots of attempts that have not ended. ``running``: these attempts. ``held_by_owner``: what each owner's
    attempts hold on any launcher. ``limit``: returns an owner's quota."""

    rows: Sequence[Row]
    slots: Mapping[str, bool]
    held: Sequence[Grant]
    running: Sequence[Running]
    held_by_owner: Mapping[str, Share]
    limit: Callable[[str], Limit]


class Start(NamedTuple):
    """A job that starts now, with its slots."""

    row: Row
    grant: Grant


class Wait(NamedTuple):
    """A job that waits. ``victims``: the attempts that are stopped for it. ``is_freed``: slots are being freed for it, by these
    stops or by earlier ones."""

    row: Row
    reason: Reason
    message: str
    victims: Sequence[Running] = ()
    is_freed: bool = False

    @property
    def full_message(self) -> str:
        """The message, which says whether slots are being freed."""
        return self.message + ("; slots are being freed for it" if self.is_freed else "")

    @property
    def is_new(self) -> bool:
        """True if the job's row does not have this reason and message yet."""
        return (self.row.reason, self.row.message) != (self.reason, self.full_message)


class End(NamedTuple):
    """A queued job that ends without another attempt."""

    row: Row
    decision: Decision


@dataclass
class Schedule:
    """Result of a pass. Grants of ``starts`` overlap only for jobs whose attempt could not be created before: the caller gives
    the slots to the one that is created first. ``examined``: all jobs, in the order of the pass. ``waits``: only those that
    change something. ``compared``: jobs whose need was compared with the free slots, or that need none. ``held_back``: jobs
    whose owner's quota holds them back. ``passed_over``: jobs that were not compared, since no slot is left or enough jobs
    start. ``exhausted``: no CPU slot is left."""

    examined: list[Row] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    compared: list[Row] = field(default_factory=list)
    held_back: set[Row] = field(default_factory=set)
    passed_over: list[Row] = field(default_factory=list)
    exhausted: bool = False

    @property
    def has_changes(self) -> bool:
        """True if there is anything to do, but for the reasons of jobs that were passed over."""
        return bool(self.starts or self.waits or self.ends)

    @property
    def concerned(self) -> list[str]:
        """The ids of the jobs on which the decisions to carry out depend: a pass over these alone decides the same."""
        acted = {one.row.queued.job for some in (self.starts, self.ends, self.waits) for one in some}
        last = max((i for i, row in enumerate(self.examined) if row.queued.job in acted), default=-1)
        owners = {wait.row.queued.owner for wait in self.waits if wait.reason is Reason.QUOTA}
        # a job that a quota holds back affects only later jobs of its owner
        ahead = (row for row in self.examined[: last + 1] if row not in self.held_back or row.queued.owner in owners)
        # they are examined last, but their places and shares of quotas are counted in fair order
        failed = (row for row in self.examined if row.reason == CREATION_FAILED)
        return [*dict.fromkeys(row.queued.job for row in (*ahead, *self.compared, *failed))]


def schedule(
    queue: QueueState, capacity: Capacity, scope: Scope, now: datetime, tried: Container[Key] = ()
) -> Schedule:
    """Decide for every job of ``queue``. ``scope``: whose attempts may be stopped for a job of higher priority. ``tried``: jobs
    that keep their places in the order and their parts of quotas, but do not start."""
    out, started, reasons = Schedule(), Counter[bool](), 0
    board, planner = Board(capacity, queue.held), PreemptionPlanner(queue.running, scope)
    for row, held_back in _in_order(queue, capacity):
        out.examined.append(row)
        has_slots, one = queue.slots[row.kind], row.queued
        never = too_few_gpus(one.share.gpus, capacity) if has_slots else None
        if never is not None or held_back is not None:
            if never is None:
                out.held_back.add(row)
            wait = Wait(row, Reason.QUOTA if never is None else Reason.NO_SLOT, never or held_back or "")
            # a failed creation keeps its reason, by which the job comes last
            keeps = row.reason == CREATION_FAILED and wait.reason is Reason.QUOTA
            if wait.is_new and not keeps and reasons < MAX_REASONS_STORED:
                out.waits.append(wait)
                reasons += 1
            continue
        # a job for which another was stopped is compared, to store whether slots are still being freed
        no_slot = board.exhausted and one.claimed_since is None and not planner.can_help(one.priority)
        if started[has_slots] >= MAX_STARTS or (has_slots and no_slot):
            out.passed_over.append(row)
            continue
        decision = _decide_queued(row, now)
        if decision.action is Action.END:
            out.ends.append(End(row, decision))
        elif decision.action is Action.LAUNCH:
            out.compared.append(row)
            answer = board.allocate(row.holder, row.need) if has_slots else Grant()
            if isinstance(answer, Waiting):
                if row.reason != CREATION_FAILED:
                    wait = _wait_for_slots(row, answer, planner)
                    out.waits += [wait] if wait.victims or wait.is_new else []
                continue
            if row.key in tried:
                board.release(answer)
                continue
            out.starts.append(Start(row, answer))
            if row.reason != CREATION_FAILED or len(out.starts) > MAX_STARTS:
                started[has_slots] += 1
            else:
                # it may fail again, forever: the same pass also tries the jobs after it
                board.release(answer)
    out.exhausted = board.exhausted
    return out


def no_slot_message(capacity: Capacity) -> str:
    """Return the message for a job that waits because no CPU slot is left."""
    return f"waits for CPU slots: all {capacity.cpus} are in use or reserved for jobs ahead of it"


def _in_order(queue: QueueState, capacity: Capacity) -> Iterable[tuple[Row, str | None]]:
    """Yield all jobs in the order of the pass, each with the reason why its owner's quota holds it back: fair order, then jobs
    whose attempt could not be created, then those that need more GPUs than the machine has."""
    rows = {row.queued.job: row for row in queue.rows}
    hopeless = [row for row in queue.rows if queue.slots[row.kind] and row.queued.share.gpus > len(capacity.gpus)]
    others = rows.keys() - {row.queued.job for row in hopeless}
    places = order_queue((rows[job].queued for job in others), queue.held_by_owner, queue.limit)
    places.sort(key=lambda place: rows[place.queued.job].reason == CREATION_FAILED)
    # nothing of a quota is reserved for the hopeless ones
    for queued, held_back in (*places, *(Place(row.queued) for row in hopeless)):
        yield rows[queued.job], held_back


def _decide_queued(row: Row, now: datetime) -> Decision:
    """Return what ``decide`` says of a queued job that is in no back-off."""
    limits = Limits(timeout=row.timeout)
    view = JobView(row.queued.job, JobPhase.QUEUED, limits=limits, running_seconds=row.running_seconds)
    return decide(view, now)


def _wait_for_slots(row: Row, waiting: Waiting, planner: PreemptionPlanner) -> Wait:
    """Return why the job waits, and the attempts of lower priority to stop for it, if that frees enough slots."""
    one, freed = row.queued, False
    victims: Sequence[Running] = ()
    if waiting.shortfall is not None:
        # attempts were stopped for it earlier, and the slots that they will free are still enough
        freed = one.claimed_since is not None and planner.covers_shortfall(waiting.shortfall)
        victims = planner.choose_victims(one.owner, one.priority, row.need, waiting.shortfall)
    return Wait(row, Reason.NO_SLOT, waiting.message, victims, bool(victims) or freed)
