"""What a submission needs from this machine and its launchers: pre-flight, snapshot, plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api.views import Warning_
from ratchet_contract.code.tree import UNLIMITED, list_entries
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.spec.git_commit import GitFacts, git_facts
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.tracking import TrackerName
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_hooks.specs.memory_estimate import needs_shapes
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.registry import Launchers
from ratchet_service.preflight import environment, hook, launcher, tracking
from ratchet_service.preflight import paths as roots
from ratchet_service.preflight import resolve as preflight
from ratchet_service.preflight.paths import Roots
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine, read_machine
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.user_code import snapshot
from ratchet_service.user_code.hook_probe import Probe
from ratchet_service.user_code.interpreter_probe import Interpreters

_NO_JOB: Final = "job-id"
MAX_INSPECTIONS: Final = 8
"""Maximum number of concurrent inspections that run users' code or interpreters. Each holds one of the server's 40 threads,
perhaps for more than a minute; the same threads serve agents' reports and stop requests."""


class LocalSubmission:
    """Checks and copies what a submission names, with this machine's files, processes and launchers. The reconciler may run on
    another machine."""

    def __init__(
        self,
        home: HomePaths,
        machine: Machine,
        launchers: Launchers,
        wake: Callable[[], None] | None = None,
        *,
        reconciler_here: bool = True,
        roots: Roots | None = None,
        sandbox: Sandbox = NO_SANDBOX,
        trackers: Sequence[TrackerName] = (),
    ) -> None:
        """Create the object; nothing is started. ``wake``: wakes the reconciler of this process; None: this process runs none.
        ``reconciler_here`` False: another process reconciles, or jobs run on another machine. ``roots``: directories and object
        stores that specs may name; None: any. ``sandbox``: user and limits for inspections of users' code.
        ``trackers``: those that the service has."""
        self._trackers = trackers
        self._home = home
        self._own_machine = machine
        self._reconciler_here = reconciler_here
        self._launchers = launchers
        self._wake = wake
        self._roots = roots or Roots()
        self._sandbox = sandbox
        self._interpreters = Interpreters(sandbox)
        self._inspections = ConcurrencyLimit(MAX_INSPECTIONS, "checking the code of other submissions")

    def resolve(
        self, spec: JobSpec, code_digest: str | None = None, faulty_keys: frozenset[str] = frozenset()
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Return the decision for every ``auto`` of ``spec``, the warnings, and the problems: why it cannot run. ``code_digest``:
        the snapshot to inspect instead of the directory. ``faulty_keys``: top-level keys that a fault may affect; checks
        that rely on their values are left out. What is outside the allowed roots is not inspected. Raise ``Refused`` or
        ``OSError``."""
        allowed = Report()
        copied = code_digest is not None and spec.code is not None and spec.code.source == "snapshot"
        self._roots.check(spec, allowed, copied=copied)
        forbidden = {problem.pointer.split("/")[1] for problem in allowed.problems}  # nothing there is inspected
        spec = spec.model_copy(update={key: JobSpec.model_fields[key].get_default() for key in forbidden})
        spec = self._with_readable_code(self._with_snapshot(spec, code_digest), allowed)
        with self._inspection_slot(isinstance(spec.hook, CustomSpec) or self._queries_own_python(spec)):
            found = preflight.resolve(
                spec,
                self._machine(),
                launchers=self._launchers,
                interpreters=self._interpreters,
                sandbox=self._sandbox,
                faulty_keys=faulty_keys | forbidden,
                allowed=self._roots.allows_path,
            )
        resolved, report = found[0], Report([*allowed.warnings, *found[1]], [*allowed.problems, *found[2]])
        roots.check(self._home.home, report)
        if "tracking" not in faulty_keys:
            resolved = resolved.model_copy(update={"trackers": tracking.check(spec, self._trackers, report)})
        return resolved, report.warnings, report.problems

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        """Return decisions, warnings and problems for a stored job with another number of ranks. ``resolved``: the job's present
        decisions. ``warnings``: the job's present warnings."""
        return preflight.resize(spec, resolved, warnings, self._machine_of(spec), self._launchers)

    def check_hook_change(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return the warnings and the problems of a stored job's ``spec`` with another hook. May import a user's own hook, in a
        separate process. Raise ``Refused`` if too many inspections run."""
        spec, probe = self._probe(spec, resolved)
        with self._inspection_slot(isinstance(spec.hook, CustomSpec)):
            report = hook.check_changed_hook(spec, resolved, self._machine_of(spec), probe)
        return report.warnings, report.problems

    def _with_snapshot(self, spec: JobSpec, code_digest: str | None) -> JobSpec:
        """Return ``spec`` with the snapshot ``code_digest`` in place of the user's directory; ``spec`` itself if there is no
        snapshot."""
        if spec.code is None or code_digest is None or spec.code.source == "nodes":
            return spec
        code = spec.code.model_copy(update={"path": str(self._home.code / code_digest), "digest": code_digest})
        return spec.model_copy(update={"code": code})

    def _with_readable_code(self, spec: JobSpec, report: Report) -> JobSpec:
        """Return ``spec``, if necessary with a new snapshot in place of the code's directory, which the sandbox's user may have
        no right to read. If a snapshot is taken, notes on the code are added to ``report``. Raise ``Refused`` if the disk is
        full, or ``OSError``."""
        code, user = spec.code, self._sandbox.user
        if user is None or code is None or code.source == "nodes" or Path(code.path).is_relative_to(self._home.code):
            return spec
        # that user may have no right to read the code's directory; a later check reports a fault of the code
        with suppress(SpecError):
            copied = self._with_snapshot(spec, self.snapshot(Path(code.path), code.include))
            preflight.check_code(spec, None, report, self._roots.allows_path)
            return copied
        return spec

    def trains_here(self, kind: str) -> bool:
        """Return True if jobs of the launcher ``kind`` are known to run on this machine. This is so only for ``local``, and only
        if ``reconciler_here`` is set."""
        return self._reconciler_here and kind == "local"

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        """Copy the code in ``path`` into the run directory and return the copy's digest. Raise ``SpecError``, ``Refused`` or
        ``OSError``."""
        return snapshot.snapshot(path, self._home.code, include=include, allowed=self._roots.allows_path)

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        """Return the Git commit of ``path`` and how its snapshot ``digest`` differs from it, or why that is unknown; None: no
        repository. Blocks while git runs."""
        return git_facts(path, list_entries(self._home.code / digest, UNLIMITED), self._roots.allows_path)

    def with_requirements(self, spec: JobSpec, code_digest: str) -> JobSpec:
        """Return ``spec`` with the lines of its requirements in place of the name of a file in its snapshot. Raise
        ``SpecError``."""
        return environment.with_lines(spec, self._home.code / code_digest)

    def keep_uploaded(self, digest: str) -> str:
        """Keep the uploaded code ``digest`` for another ten minutes, and return it. Raise ``SpecError`` if the service does
        not have it."""
        if not snapshot.keep_alive(digest, self._home.code):
            problem = snapshot.not_uploaded_problem(digest)
            raise SpecError(f"{problem.pointer}: {problem.detail}", errors=[problem])
        return digest

    def snapshot_file(self, path: Path) -> str:
        """Copy the file ``path`` into the run directory and return the copy's digest. Raise ``SpecError``, ``Refused`` or
        ``OSError``."""
        return snapshot.snapshot_file(path, self._home.code, allowed=self._roots.allows_path)

    def allows_path(self, real: Path) -> bool:
        """Return True if a submission may name the directory or file ``real``. The path must contain no symbolic links."""
        return self._roots.allows_path(real)

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """Return the printable plan of a job's first attempt: commands and variables, without the values of secrets, with
        placeholders for what is known only at its launch. Starts nothing."""
        gpus = tuple(self._machine_of(spec).gpus[: spec.world.ranks_per_node]) if resolved.device == "cuda" else ()
        launch = build_launch_file(self._home, _NO_JOB, 1, spec, resolved, gpus, token="", desired=Desired.RUN)
        return self._launchers[spec.launcher.kind].plan(launch).printable()

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        """Return the bytes of the hook's state on each rank; None: not known. May run the job's task. Raise ``Refused``."""
        spec, probe = self._probe(spec, resolved)
        with self._inspection_slot(needs_shapes(spec.hook)):
            return hook.state_bytes(spec, self._machine_of(spec), probe)

    def _probe(self, spec: JobSpec, resolved: Resolved) -> tuple[JobSpec, Probe]:
        """Return ``spec`` with its snapshot in place of the directory, and the probe of its hook."""
        spec = self._with_snapshot(spec, resolved.code_digest)
        python = self._machine_of(spec).python if spec.python is None else resolved.python
        return spec, Probe(python, spec, preflight.code_path(spec), os.environ, sandbox=self._sandbox)

    def _queries_own_python(self, spec: JobSpec) -> bool:
        """Return True if the spec names an interpreter and pre-flight queries it, since the job trains on this machine."""
        machine = self._machine_of(spec)
        return spec.python is not None and machine.is_this_machine and machine.runs_jobs

    def _inspection_slot(self, runs_code: bool) -> AbstractContextManager[None]:
        """Return a context that holds one inspection slot if ``runs_code``. Entering it raises ``Refused`` if none is free."""
        return self._inspections.acquire() if runs_code else nullcontext()

    def _machine_of(self, spec: JobSpec) -> Machine:
        """Return the machine that the spec is checked against: the reconciler's, or for an engine a description with the GPUs and
        cores that the spec requests."""
        return launcher.machine_of(spec, self._machine(), self._launchers.get(spec.launcher.kind))

    def capacity(self) -> Capacity | None:
        """Return what the reconciler's machine lends to jobs of the launcher ``local``; None: not known, or it runs no jobs."""
        machine = self._own_machine if self._reconciler_here else read_machine(self._home.home)
        return machine.capacity if machine is not None and machine.runs_jobs else None

    def _machine(self) -> Machine:
        """Return the reconciler's machine. If it is not known yet, return this process's machine, with ``is_this_machine``
        False."""
        if self._reconciler_here:
            return self._own_machine
        return read_machine(self._home.home) or replace(self._own_machine, is_this_machine=False)

    def wake(self) -> None:
        """Request that the reconciler of this process, if any, starts its next round early. Never blocks."""
        if self._wake is not None:
            self._wake()
