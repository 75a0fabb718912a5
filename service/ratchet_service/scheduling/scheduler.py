"""One scheduling pass over the queue, as a pure function: which jobs start and on which slots, which wait and why, which attempts
are stopped for a waiting job, and which jobs end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Most launches of one pass; as many again of launchers without slots, and of jobs whose attempt could not be created before."""
MAX_REASONS_STORED: Final = 1_000
"""Most jobs of one pass, of those whose need is not compared with the free slots, that get the reason why they wait; later passes
do the others."""
BEING_FREED: Final = "; slots are being freed for it"
"""End of the message of a job for which attempts are stopped."""
CREATION_FAILED: Final = Cause.LAUNCHER_ERROR
"""Reason of a queued job whose attempt could not be created when it was to start. Until it can, the job comes after others, and
no other job is stopped for it."""


@dataclass(frozen=True)
class Preemption:
    """Settings of preemption. ``scope``: whose jobs may be stopped for one of higher priority. ``min_run_seconds``: how long a
    job that was stopped in this way trains before it may be stopped in this way again."""

    scope: Scope = "owner"
    min_run_seconds: float = 60.0


class Row(NamedTuple):
    """A queued job, with the reason and message in its row. ``kind``: its launcher's name; may be empty. ``attempt``: its newest
    attempt. ``version``: of the row, which every change but that of the reason increases. ``timeout``: ``policy.timeout`` in
    seconds; ``running_seconds``: how long all attempts ran."""

    queued: Queued
    kind: str
    reason: str | None = None
    message: str | None = None
    attempt: int = 0
    version: int = 1
    need: Need = Need(0, 0)
    timeout: float | None = None
    running_seconds: float = 0.0


@dataclass(frozen=True)
class QueueState:
    """What a pass decides from. ``held``: the slots of attempts that have not ended. ``running``: these attempts.
    ``held_by_owner``: what each owner's attempts hold on any launcher. ``limit``: returns an owner's quota."""

    rows: Sequence[Row]
    held: Sequence[Grant]
    running: Sequence[Running]
    held_by_owner: Mapping[str, Share]
    limit: Callable[[str], Limit]


class Start(NamedTuple):
    """A job that starts now, with its slots."""

    row: Row
    grant: Grant


class Wait(NamedTuple):
    """A job that waits. ``victims``: the attempts that are stopped for it."""

    row: Row
    reason: Reason
    message: str
    victims: Sequence[Running] = ()


class End(NamedTuple):
    """A queued job that ends without another attempt."""

    row: Row
    decision: Decision


@dataclass
class Schedule:
    """Result of a pass. Grants of ``starts`` overlap only for jobs whose attempt could not be created before: whichever is
    created first gets the slots. ``waits``: only those that change something. ``passed_over``: jobs whose need was not compared
    with the free slots. ``exhausted``: no CPU slot is left for them."""

    starts: list[Start] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    passed_over: list[Row] = field(default_factory=list)
    exhausted: bool = False


def schedule(queue: QueueState, slots: Mapping[str, bool], capacity: Capacity, scope: Scope, now: datetime) -> Schedule:
    """Decide for every job of ``queue``. ``slots``: the launchers that may start jobs, by name; True: Ratchet manages their
    slots. ``scope``: whose attempts may be stopped for a job of higher priority."""
    out, started, reasons = Schedule(), Counter[bool](), 0
    board, planner = Board(capacity, queue.held), PreemptionPlanner(queue.running, scope)
    for row, held_back in _in_order(queue, slots, capacity):
        has_slots, one = slots[row.kind], row.queued
        never = too_few_gpus(one.share.gpus, capacity) if has_slots else None
        if never is not None or held_back is not None:
            if never is not None:
                wait = Wait(row, reason=Reason.NO_SLOT, message=never)
            else:
                wait = Wait(row, reason=Reason.QUOTA, message=held_back or "")
            if _is_new(wait) and reasons < MAX_REASONS_STORED:
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
            answer = board.allocate(one.job, row.need) if has_slots else Grant()
            if isinstance(answer, Waiting):
                if row.reason != CREATION_FAILED:
                    wait = _wait_for_slots(row, answer, planner)
                    out.waits += [wait] if wait.victims or _is_new(wait) else []
                continue
            out.starts.append(Start(row, answer))
            if row.reason != CREATION_FAILED or len(out.starts) > MAX_STARTS:
                started[has_slots] += 1
            else:
                # it may fail again, forever: the same pass also tries the jobs after it
                board.release(answer)
    out.exhausted = board.exhausted
    return out


def still_fits(
    start: Start, grants: Iterable[Grant], held_by_owner: Mapping[str, Share], limit: Callable[[str], Limit]
) -> bool:
    """True if the slots of ``start`` are free, and its owner's quota permits the job, given what is held now: ``grants``, and
    ``held_by_owner``. See ``QueueState``."""
    queued, wanted = start.row.queued, start.grant
    share = held_by_owner.get(queued.owner, Share()).plus(queued.share)
    if limit(queued.owner).exceeded_resource(share) is not None:
        return False
    return all(set(wanted.gpus).isdisjoint(one.gpus) and set(wanted.cpus).isdisjoint(one.cpus) for one in grants)


def no_slot_message(capacity: Capacity) -> str:
    """Return the message for a job that waits because no CPU slot is left."""
    return f"waits for CPU slots: all {capacity.cpus} are in use or reserved for jobs ahead of it"


def _in_order(queue: QueueState, slots: Mapping[str, bool], capacity: Capacity) -> Iterable[tuple[Row, str | None]]:
    """Yield all jobs in the order of the pass, each with the reason why its owner's quota holds it back: fair order, then jobs
    whose attempt could not be created, then those that need more GPUs than the machine has."""
    rows = {row.queued.job: row for row in queue.rows}
    hopeless = [row for row in rows.values() if slots[row.kind] and row.queued.share.gpus > len(capacity.gpus)]
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
    message = waiting.message + (BEING_FREED if victims or freed else "")
    return Wait(row, reason=Reason.NO_SLOT, message=message, victims=victims)


def _is_new(wait: Wait) -> bool:
    """True if the job's row does not have this reason and message yet."""
    return (wait.row.reason, wait.row.message) != (wait.reason, wait.message)
