"""GPU indices and CPU slots: who holds them and who gets them next in one scheduling pass. A CPU slot is a promise between
jobs, not a core. Free slots may be reserved for a waiting job, so that small jobs do not starve a large one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ratchet_contract.plural import pluralize
from ratchet_contract.spec.job import JobSpec, Resolved

_MAX_NAMED_HOLDERS: Final = 4
"""Most holders that the message of a waiting job names."""


@dataclass(frozen=True)
class Capacity:
    """What this machine lends to jobs: GPU indices as CUDA counts them, and the number of CPU slots."""

    gpus: tuple[int, ...] = ()
    cpus: int = 1


@dataclass(frozen=True)
class Need:
    """Numbers of GPUs and of CPU slots, such as those that one node of a job requests."""

    gpus: int
    cpus: int

    def plus(self, other: Need) -> Need:
        return Need(self.gpus + other.gpus, self.cpus + other.cpus)


@dataclass(frozen=True)
class Grant:
    """GPU and CPU slot indices that a job holds until its attempt has ended. ``holder``: what messages call that
    job; ``job``: its id, if the grant is that of a stored attempt. Both are not compared."""

    gpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    holder: str | None = field(default=None, compare=False)
    job: str | None = field(default=None, compare=False)

    def overlaps(self, other: Grant) -> bool:
        """True if the two have a GPU or a CPU slot in common."""
        return bool({*self.gpus} & {*other.gpus} or {*self.cpus} & {*other.cpus})


@dataclass(frozen=True)
class Waiting:
    """Why a job gets no slots now. ``shortfall``: what it needs beyond the free slots; None: more GPUs than the machine has."""

    message: str
    shortfall: Need | None = field(default=None, compare=False)


def need_of(spec: JobSpec, resolved: Resolved) -> Need:
    """Return what one node of the job needs."""
    return node_need(spec.world.ranks_per_node, resolved.device, resolved.threads_per_rank)


def node_need(ranks: int, device: str | None, threads: int) -> Need:
    """Return what one node needs: one GPU per rank on CUDA, and one CPU slot per thread of each rank."""
    return Need(gpus=ranks if device == "cuda" else 0, cpus=ranks * threads)


def is_oversubscribed(need: Need, capacity: Capacity) -> bool:
    """True if the job requests more CPU slots than the machine has: it gets all of them and runs alone."""
    return need.cpus > capacity.cpus


def too_few_gpus(gpus: int, capacity: Capacity) -> str | None:
    """Return why a job that needs this number of GPUs can never start on this machine; None: it can."""
    if gpus <= len(capacity.gpus):
        return None
    return (
        f"needs {pluralize(gpus, 'GPU')}, this machine has {len(capacity.gpus)}: "
        "`ratchet resume JOB --world N` with fewer ranks"
    )


class Board:
    """The free slots during one scheduling pass, in memory. ``held``: the grants of attempts that have not ended."""

    def __init__(self, capacity: Capacity, held: Iterable[Grant]) -> None:
        grants = self._held = list(held)
        taken_gpus = {g for grant in grants for g in grant.gpus}
        taken_cpus = {c for grant in grants for c in grant.cpus}
        self._capacity = capacity
        self._gpus = [g for g in capacity.gpus if g not in taken_gpus]
        self._cpus = [c for c in range(capacity.cpus) if c not in taken_cpus]
        self._first_waiting_job: str | None = None

    @property
    def exhausted(self) -> bool:
        """True if every CPU slot is taken or reserved: no job that needs one can start now."""
        return not self._cpus

    def allocate(self, holder: str, need: Need) -> Grant | Waiting:
        """Return the slots that the next job of the queue gets, or why it waits. If it waits, free slots may be reserved for
        it. ``holder``: what messages call the job."""
        never = too_few_gpus(need.gpus, self._capacity)
        if never is not None:  # so nothing is reserved for it
            return Waiting(never)
        # a job that requests more than the machine has gets all
        cpus = min(need.cpus, self._capacity.cpus)
        if need.gpus <= len(self._gpus) and cpus <= len(self._cpus):
            grant = Grant(tuple(self._take(self._gpus, need.gpus)), tuple(self._take(self._cpus, cpus)), holder)
            self._held.append(grant)
            return grant
        message = self._wait_message(need, cpus)
        lacks = Need(max(0, need.gpus - len(self._gpus)), max(0, cpus - len(self._cpus)))
        self._take(self._gpus, need.gpus)
        self._take(self._cpus, cpus)
        self._first_waiting_job = self._first_waiting_job or holder
        return Waiting(message, lacks)

    def release(self, grant: Grant) -> None:
        """Free the slots of a grant again, because its job was not started."""
        self._gpus = sorted([*self._gpus, *grant.gpus])
        self._cpus = sorted([*self._cpus, *grant.cpus])
        self._held = [held for held in self._held if held is not grant]

    def _wait_message(self, need: Need, cpus: int) -> str:
        """Return why a job with this need waits. ``cpus``: the CPU slots that it needs, at most all."""
        wants = []
        if need.gpus > len(self._gpus):
            wants.append(
                f"{need.gpus} of {pluralize(len(self._capacity.gpus), 'GPU')} ({self._describe_free(self._gpus, 'gpus', 'GPU')})"
            )
        if cpus > len(self._cpus):
            wants.append(
                f"{cpus} of {pluralize(self._capacity.cpus, 'CPU slot')} ({self._describe_free(self._cpus, 'cpus', '')})"
            )
        behind = f", behind job {self._first_waiting_job}" if self._first_waiting_job else ""
        return f"waits for {' and '.join(wants)}{behind}"

    def _describe_free(self, free: list[int], kind: str, slots: str) -> str:
        """Return for example ``0 free; digits (job-a) has GPU 0, 1``. ``kind``: the field of ``Grant``; ``slots``: their name;
        empty: only numbers of slots."""
        taken: dict[str, list[int]] = {}
        for grant in self._held:  # a job has a grant for each of its nodes
            if grant.holder and getattr(grant, kind):
                taken.setdefault(grant.holder, []).extend(getattr(grant, kind))
        holders = sorted(((holder, sorted(held)) for holder, held in taken.items()), key=lambda one: one[1])
        holder_texts = [
            f"{holder} has {slots} {', '.join(map(str, held))}" if slots else f"{holder} has {len(held)}"
            for holder, held in holders[:_MAX_NAMED_HOLDERS]
        ]
        holder_texts += [f"{pluralize(len(holders) - _MAX_NAMED_HOLDERS, 'job')} more"] * (
            len(holders) > _MAX_NAMED_HOLDERS
        )
        return "; ".join([f"{len(free)} free", *([", ".join(holder_texts)] if holder_texts else [])])

    @staticmethod
    def _take(free: list[int], n: int) -> Sequence[int]:
        """Remove the first ``n`` of ``free`` (fewer if there are fewer) and return them."""
        taken = free[:n]
        del free[:n]
        return taken
