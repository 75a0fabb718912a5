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
        """Return the decision for every ``auto`` of ``spec``, the warnings, and the problems: why it cannot run. ``code_digest``:
        the snapshot to inspect instead of the directory. ``faulty_keys``: top-level keys that a fault may affect; checks
        that rely on their values are left out. Raise ``Refused`` or ``OSError``."""

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Return decisions, warnings and problems for a stored job with another number of ranks. ``resolved``: the job's present
        decisions. ``warnings``: the job's present warnings."""

    def check_hook_change(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return the warnings and the problems of a stored job's ``spec`` with another hook. May import a user's own hook, in
        a separate process. Raise ``Refused``."""

    def trains_here(self, kind: str) -> bool:
        """Return True if jobs of the launcher ``kind`` are known to run on the service's own machine."""

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        """Copy the code in ``path`` into the run directory and return the copy's digest. Raise ``SpecError``, ``Refused`` or
        ``OSError``."""

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        """Return the Git commit of ``path`` and how its snapshot ``digest`` differs from it, or why that is unknown; None: no
        repository. Blocks while git runs."""

    def keep_uploaded(self, digest: str) -> str:
        """Keep the uploaded code ``digest`` for another ten minutes, and return it. Raise ``SpecError`` if the service does
        not have it."""

    def snapshot_file(self, path: Path) -> str:
        """Copy the file ``path`` into the run directory and return the copy's digest. Raise ``SpecError``, ``Refused`` or
        ``OSError``."""

    def allows_path(self, real: Path) -> bool:
        """Return True if a submission may name the directory or file ``real``. The path must contain no symbolic links."""

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """Return what a launch of the job would run: commands and variables, without the values of secrets. Starts nothing."""

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        """Return the bytes of the hook's state on each rank; None: not known. May run the job's task. Raise ``Refused``."""

    def wake(self) -> None:
        """Request that the reconciler of this process, if any, starts its next round early. Never blocks."""
