"""The interface through which submission uses the machine and the launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import JobSpec, Resolved


class SubmissionPorts(Protocol):
    """What submission needs from the machine and the launchers. ``LocalSubmission`` implements it; tests have their own
    implementation."""

    def resolve(
        self, spec: JobSpec, code_digest: str | None = None, faulty_keys: frozenset[str] = frozenset()
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Return the decision for every ``auto`` of ``spec``, the warnings, and the problems: the reasons why the spec cannot
        run. All are for the machine of its ranks. ``code_digest``: the snapshot that the ranks will run, if it exists already; it
        is inspected in place of the user's directory. ``faulty_keys``: keys of the spec that have a fault and therefore their
        default values; what depends on them is not checked. Raises ``Refused`` (``busy``, ``disk-full``)."""

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Return all decisions and warnings for a stored job whose ``spec`` now has another number of ranks, and the problems:
        the reasons why it cannot run with that number. ``resolved``, ``warnings``: the job's decisions and warnings so far. Reads
        no user files."""

    def check_hook_change(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return the warnings and the problems of ``spec``, which is a stored job's spec with another hook. ``resolved``: what
        was decided for the job; it stays. A hook of the user's own without other problems is imported from the job's snapshot of
        the code, in a separate process. If the job trains on another machine, it is not imported, and a warning says so. Raises
        ``Refused`` (``busy``)."""

    def trains_here(self, kind: str) -> bool:
        """Return True if jobs of the launcher ``kind`` run on the service's own machine. Only then may an interpreter that a
        job's submitter chose run next to the service."""

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        """Copy the user's code in the directory ``path`` into the run directory and return the copy's digest. ``include``:
        ``code.include`` of the spec. Raises ``SpecError``, and ``Refused`` (``disk-full``)."""

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        """Return the Git commit of the directory ``path``, and how its snapshot ``digest`` differs from this commit; if that
        cannot be determined, only the reason. None: the directory is in no repository. Blocks while git runs, at most ten
        seconds, and while the snapshot's files are read."""

    def keep_uploaded(self, digest: str) -> str:
        """Keep the uploaded code ``digest`` for another ten minutes, and return the digest. A job that names it can be stored
        meanwhile. Raises ``SpecError`` if the service does not have the code."""

    def snapshot_file(self, path: Path) -> str:
        """Copy the file ``path``, from which a job starts, into the run directory and return the copy's digest. Raises
        ``SpecError``, ``Refused`` (``disk-full``), and ``OSError``, for example if the file does not exist."""

    def allows_path(self, real: Path) -> bool:
        """Return True if a submission may name the directory or file ``real``. The path must contain no symbolic links."""

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """Return what a launch of the job would run: commands and variables, without the values of secrets. Starts nothing."""

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        """Return the bytes that the hook's state will hold on each rank; None if they are not known. It may query the job's task
        in a process. Raises ``Refused`` (``busy``)."""

    def wake(self) -> None:
        """Request that the reconciler starts its next round now, because something changed. Does nothing if this process runs no
        reconciler. Never blocks."""
