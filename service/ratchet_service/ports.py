"""What submission needs of the machine and the launcher; tests give their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.git_facts import GitFacts
from ratchet_contract.spec import JobSpec, Resolved


class SubmissionPorts(Protocol):
    def resolve(
        self, spec: JobSpec, code_digest: str | None = None, unsure: frozenset[str] = frozenset()
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Every ``auto`` decided for this machine; problems are why the spec cannot run here. ``code_digest``: the snapshot that
        the ranks will run, where there is one already; it is looked at instead of the user's directory. ``unsure``: keys that
        have a fault, so that they stand at their defaults; what depends on them is not looked at."""

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """A stored job's spec with another number of ranks: what changes of what was decided for it. Reads no user files."""

    def rehook(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        """A stored job's spec with another hook: warnings and problems of the hook under ``resolved``, what was decided for the
        job. A hook of the user's own is looked at in the job's snapshot of the code."""

    def trains_here(self, kind: str) -> bool:
        """Do jobs of the launcher ``kind`` run on this very machine, as the service's own user? Then their submitters' choice of
        an interpreter may run beside the service."""

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        """Copy the user's code below the run directory; returns its digest. ``include``: of the spec. Raises ``SpecError``."""

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        """The git commit of the directory ``path``, and what of its snapshot ``digest`` differs; None: it is in no repository."""

    def uploaded(self, digest: str) -> str:
        """Keep code that was sent, until a job names it; returns its digest. Raises ``SpecError`` where there is none."""

    def snapshot_file(self, path: Path) -> str:
        """Copy the file that a job starts from below the run directory; returns the copy's digest. Raises ``SpecError``."""

    def allows(self, real: Path) -> bool:
        """May a submission name the directory or file ``real``, which is without links?"""

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """What a launch would run: commands and variables, without secret values. Starts nothing."""

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        """Bytes that the hook's state will hold on each rank; None where that is not known. May ask the task, in a process."""

    def wake(self) -> None:
        """Something changed: the reconciler need not wait for its next round. Never blocks."""
