"""What submission needs from the machine and the launcher; tests implement it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import JobSpec, Resolved


class SubmissionPorts(Protocol):
    def resolve(
        self, spec: JobSpec, code_digest: str | None = None, faulty_keys: frozenset[str] = frozenset()
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Decide every ``auto`` for this machine; problems are why the spec cannot run here. ``code_digest``: the snapshot that
        the ranks will run, if there is one already; it is inspected instead of the user's directory. ``faulty_keys``: keys that
        have a fault, so that they have their defaults; what depends on them is not checked."""

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Return all decisions and warnings for a stored job whose ``spec`` now has another number of ranks, and why it cannot
        run with that number. ``resolved``, ``warnings``: what the job has so far. Reads no user files."""

    def check_hook_change(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return warnings and problems of another hook in a stored job's spec, under ``resolved``, what was decided for the job.
        A hook of the user's own is inspected in the job's snapshot of the code."""

    def trains_here(self, kind: str) -> bool:
        """True if jobs of the launcher ``kind`` run on the service's own machine. Only then may an interpreter that their
        submitters chose run next to the service."""

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        """Copy the user's code into the run directory and return its digest. ``include``: from the spec. Raises ``SpecError``."""

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        """Return the git commit of the directory ``path``, and what of its snapshot ``digest`` differs; None: it is in no
        repository."""

    def keep_uploaded(self, digest: str) -> str:
        """Keep uploaded code until a job names it, and return its digest. Raises ``SpecError`` if there is none."""

    def snapshot_file(self, path: Path) -> str:
        """Copy the file that a job starts from into the run directory and return the copy's digest. Raises ``SpecError``."""

    def allows_path(self, real: Path) -> bool:
        """True if a submission may name the directory or file ``real``, which must be free of links."""

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """Return what a launch would run: commands and variables, without secret values. Starts nothing."""

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        """Return the bytes that the hook's state will hold on each rank; None: not known. May query the task, in a process."""

    def wake(self) -> None:
        """Let the reconciler start its next round now, because something changed. Never blocks."""
