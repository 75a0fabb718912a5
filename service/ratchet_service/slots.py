"""GPU indices and CPU slots: who holds what, and who gets what next. Pure, over what the rows of active attempts say.

A CPU slot is a promise between jobs, not a core: slot numbers let two jobs never count on the same core by accident. A job
that asks for more CPU slots than the machine has takes all of them and so runs alone. GPUs cannot be shared at all.

The queue is served in order (``queue_order``). A job that does not fit keeps what it waits for: those behind it may start
only with what is left after it, so that a large job is not starved by small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ratchet_contract.plural import counted
from ratchet_contract.spec import JobSpec, Resolved

_NAMED: Final = 4
"""Holders that a waiting job is told of by name."""


@dataclass(frozen=True)
class Capacity:
    """What this machine lends to jobs: GPU indices as CUDA counts them, and the number of CPU slots."""

    gpus: tuple[int, ...] = ()
    cpus: int = 1


@dataclass(frozen=True)
class Need:
    """What one node of a job asks for."""

    gpus: int
    cpus: int

    def plus(self, other: Need) -> Need:
        return Need(self.gpus + other.gpus, self.cpus + other.cpus)


@dataclass(frozen=True)
class Grant:
    """Indices that a job holds until its attempt has ended. ``job``: who, for those who wait."""

    gpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    job: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Waiting:
    """Why a job gets nothing now. ``lacks``: what it asks for beyond what is free; None: this machine can never give it."""

    message: str
    lacks: Need | None = field(default=None, compare=False)


def need_of(spec: JobSpec, resolved: Resolved) -> Need:
    """One GPU per rank on CUDA; ``threads_per_rank`` CPU slots per rank."""
    ranks = spec.world.ranks_per_node
    return Need(gpus=ranks if resolved.device == "cuda" else 0, cpus=ranks * resolved.threads_per_rank)


def oversubscribed(need: Need, capacity: Capacity) -> bool:
    """More CPU slots asked for than there are: the job runs alone, and slower than asked for."""
    return need.cpus > capacity.cpus


def too_few_gpus(gpus: int, capacity: Capacity) -> str | None:
    """Why a job of so many can never start on this machine; None: it can."""
    if gpus <= len(capacity.gpus):
        return None
    return f"needs {counted(gpus, 'GPU')}, this machine has {len(capacity.gpus)}: `ratchet resume JOB --world N` with fewer ranks"


class Board:
    """The free slots while one round of launches is worked out."""

    def __init__(self, capacity: Capacity, held: Iterable[Grant]) -> None:
        grants = self._held = list(held)
        taken_gpus = {g for grant in grants for g in grant.gpus}
        taken_cpus = {c for grant in grants for c in grant.cpus}
        self._capacity = capacity
        self._gpus = [g for g in capacity.gpus if g not in taken_gpus]
        self._cpus = [c for c in range(capacity.cpus) if c not in taken_cpus]
        self._ahead: str | None = None

    @property
    def exhausted(self) -> bool:
        """Nobody who needs a CPU slot can start any more."""
        return not self._cpus

    def ask(self, job_id: str, need: Need) -> Grant | Waiting:
        """Give ``need`` to the next job of the queue, or keep what there is for it and say why it waits."""
        never = too_few_gpus(need.gpus, self._capacity)
        if never is not None:  # so it keeps nothing from others
            return Waiting(never)
        cpus = min(need.cpus, self._capacity.cpus)
        if need.gpus <= len(self._gpus) and cpus <= len(self._cpus):
            grant = Grant(tuple(self._take(self._gpus, need.gpus)), tuple(self._take(self._cpus, cpus)), job_id)
            self._held.append(grant)
            return grant
        message = self._why(need, cpus)
        lacks = Need(max(0, need.gpus - len(self._gpus)), max(0, cpus - len(self._cpus)))
        self._take(self._gpus, need.gpus)
        self._take(self._cpus, cpus)
        self._ahead = self._ahead or job_id
        return Waiting(message, lacks)

    def take_back(self, grant: Grant) -> None:
        """What was given is free again: nothing was started with it."""
        self._gpus = sorted([*self._gpus, *grant.gpus])
        self._cpus = sorted([*self._cpus, *grant.cpus])
        self._held = [held for held in self._held if held is not grant]

    def _why(self, need: Need, cpus: int) -> str:
        wants = []
        if need.gpus > len(self._gpus):
            wants.append(
                f"{need.gpus} of {counted(len(self._capacity.gpus), 'GPU')} ({self._free(self._gpus, 'gpus', 'GPU')})"
            )
        if cpus > len(self._cpus):
            wants.append(f"{cpus} of {counted(self._capacity.cpus, 'CPU slot')} ({self._free(self._cpus, 'cpus', '')})")
        behind = f", behind job {self._ahead}" if self._ahead else ""
        return f"waits for {' and '.join(wants)}{behind}"

    def _free(self, free: list[int], kind: str, name: str) -> str:
        """``0 free; job-a has GPU 0, 1, job-b has GPU 2``: how many are left, and who has the others."""
        holders = [(getattr(grant, kind), grant.job) for grant in self._held if getattr(grant, kind) and grant.job]
        told = [
            f"{job} has {name} {', '.join(map(str, taken))}" if name else f"{job} has {len(taken)}"
            for taken, job in sorted(holders)[:_NAMED]
        ]
        told += [f"{counted(len(holders) - _NAMED, 'job')} more"] * (len(holders) > _NAMED)
        return "; ".join([f"{len(free)} free", *([", ".join(told)] if told else [])])

    @staticmethod
    def _take(free: list[int], n: int) -> Sequence[int]:
        taken = free[:n]
        del free[:n]
        return taken
