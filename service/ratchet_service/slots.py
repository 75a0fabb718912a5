"""GPU indices and CPU slots: who holds what, and who gets what next. Pure, over what the rows of active attempts say.

A CPU slot is a promise between jobs, not a core: slot numbers let two jobs never count on the same core by accident. A job
that asks for more CPU slots than the machine has takes all of them and so runs alone. GPUs cannot be shared at all.

The queue is served in order (priority, then age). A job that does not fit keeps what it waits for: those behind it may start
only with what is left after it, so that a large job is not starved by small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ratchet_contract.spec import JobSpec, Resolved


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


@dataclass(frozen=True)
class Grant:
    """Indices that a job holds until its attempt has ended."""

    gpus: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """Why a job gets nothing now."""

    message: str


def need_of(spec: JobSpec, resolved: Resolved) -> Need:
    """One GPU per rank on CUDA; ``threads_per_rank`` CPU slots per rank."""
    ranks = spec.world.ranks_per_node
    return Need(gpus=ranks if resolved.device == "cuda" else 0, cpus=ranks * resolved.threads_per_rank)


def oversubscribed(need: Need, capacity: Capacity) -> bool:
    """More CPU slots asked for than there are: the job runs alone, and slower than asked for."""
    return need.cpus > capacity.cpus


class Board:
    """The free slots while one round of launches is worked out."""

    def __init__(self, capacity: Capacity, held: Iterable[Grant]) -> None:
        grants = list(held)
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
        if need.gpus > len(self._capacity.gpus):  # it will never fit, so it keeps nothing from others
            return Waiting(
                f"needs {need.gpus} GPUs, this machine has {len(self._capacity.gpus)}: fork it with fewer ranks"
            )
        cpus = min(need.cpus, self._capacity.cpus)
        if need.gpus <= len(self._gpus) and cpus <= len(self._cpus):
            return Grant(tuple(self._take(self._gpus, need.gpus)), tuple(self._take(self._cpus, cpus)))
        message = self._why(need, cpus)
        self._take(self._gpus, need.gpus)
        self._take(self._cpus, cpus)
        self._ahead = self._ahead or job_id
        return Waiting(message)

    def _why(self, need: Need, cpus: int) -> str:
        wants = []
        if need.gpus > len(self._gpus):
            wants.append(f"{need.gpus} of {len(self._capacity.gpus)} GPUs ({len(self._gpus)} free)")
        if cpus > len(self._cpus):
            wants.append(f"{cpus} of {self._capacity.cpus} CPU slots ({len(self._cpus)} free)")
        behind = f", behind job {self._ahead}" if self._ahead else ""
        return f"waits for {' and '.join(wants)}{behind}"

    @staticmethod
    def _take(free: list[int], n: int) -> Sequence[int]:
        taken = free[:n]
        del free[:n]
        return taken
