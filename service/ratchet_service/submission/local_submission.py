"""What a submission needs from this machine: pre-flight, snapshot, plan. Implements ``ports.SubmissionPorts``."""

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
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_hooks.specs.memory_estimate import needs_shapes
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.registry import Launchers
from ratchet_service.preflight import hook, launcher
from ratchet_service.preflight import paths as roots
from ratchet_service.preflight import resolve as preflight
from ratchet_service.preflight.paths import Roots
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine, read_machine
from ratchet_service.user_code import snapshot
from ratchet_service.user_code.hook_probe import Probe
from ratchet_service.user_code.interpreter_probe import Interpreters

_NO_JOB: Final = "job-id"
MAX_INSPECTIONS: Final = 8
"""Most inspections of users' code at one time. Each holds one of the server's 40 threads, which also serve agents' reports and
stop requests, for up to a minute."""


class LocalSubmission:
    """Ports of a service whose launcher works on the service's own machine. ``wake`` wakes the reconciler, if it runs here."""

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
    ) -> None:
        """``reconciler_here`` False: jobs run on the machine of a reconciler elsewhere, which describes that machine in the run
        directory. ``roots``: what specs may name; None: anything. ``sandbox``: the user and limits for inspections of users'
        code."""
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
        allowed = Report()
        copied = code_digest is not None and spec.code is not None and spec.code.source == "snapshot"
        self._roots.check(spec, allowed, copied=copied)
        forbidden = {problem.pointer.split("/")[1] for problem in allowed.problems}  # nothing there is inspected
        spec = spec.model_copy(update={key: JobSpec.model_fields[key].get_default() for key in forbidden})
        spec = self._with_readable_code(self._with_snapshot(spec, code_digest), allowed)
        with self._inspection_slot(isinstance(spec.hook, CustomSpec)):
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
        return resolved, report.warnings, report.problems

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        return preflight.resize(spec, resolved, warnings, self._machine_of(spec), self._launchers)

    def check_hook_change(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        spec, probe = self._probe(spec, resolved)
        with self._inspection_slot(isinstance(spec.hook, CustomSpec)):
            report = hook.check_changed_hook(spec, resolved, self._machine_of(spec), probe)
        return report.warnings, report.problems

    def _with_snapshot(self, spec: JobSpec, code_digest: str | None) -> JobSpec:
        """Return ``spec`` with the snapshot, if there is one, in place of the user's directory."""
        if spec.code is None or code_digest is None or spec.code.source == "nodes":
            return spec
        code = spec.code.model_copy(update={"path": str(self._home.code / code_digest), "digest": code_digest})
        return spec.model_copy(update={"code": code})

    def _with_readable_code(self, spec: JobSpec, report: Report) -> JobSpec:
        """Where the worker's user inspects code, let it inspect the snapshot: the directory itself may be readable by the service
        alone. What cannot be copied is left as it is, and refused for that."""
        code, user = spec.code, self._sandbox.user
        if user is None or code is None or code.source == "nodes" or Path(code.path).is_relative_to(self._home.code):
            return spec
        with suppress(SpecError):
            copied = self._with_snapshot(spec, self.snapshot(Path(code.path), code.include))
            preflight.check_code(spec, None, report, self._roots.allows_path)
            return copied
        return spec

    def trains_here(self, kind: str) -> bool:
        return self._reconciler_here and kind == "local"

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        return snapshot.snapshot(path, self._home.code, include=include, allowed=self._roots.allows_path)

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        return git_facts(path, list_entries(self._home.code / digest, UNLIMITED), self._roots.allows_path)

    def keep_uploaded(self, digest: str) -> str:
        if not snapshot.keep_alive(digest, self._home.code):
            problem = snapshot.not_uploaded_problem(digest)
            raise SpecError(f"{problem.pointer}: {problem.detail}", errors=[problem])
        return digest

    def snapshot_file(self, path: Path) -> str:
        return snapshot.snapshot_file(path, self._home.code, allowed=self._roots.allows_path)

    def allows_path(self, real: Path) -> bool:
        return self._roots.allows_path(real)

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """Return the launch of a first attempt; the job's id and the GPU indices are only known once there is one."""
        gpus = tuple(self._machine_of(spec).gpus[: spec.world.ranks_per_node]) if resolved.device == "cuda" else ()
        launch = build_launch_file(self._home, _NO_JOB, 1, spec, resolved, gpus, token="", desired=Desired.RUN)
        return self._launchers[spec.launcher.kind].plan(launch).printable()

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        spec, probe = self._probe(spec, resolved)
        with self._inspection_slot(needs_shapes(spec.hook)):
            return hook.state_bytes(spec, self._machine_of(spec), probe)

    def _probe(self, spec: JobSpec, resolved: Resolved) -> tuple[JobSpec, Probe]:
        """Return the spec with its snapshot, and the probe of its hook, in the interpreter that its next attempt will have."""
        spec = self._with_snapshot(spec, resolved.code_digest)
        python = self._machine_of(spec).python if spec.python is None else resolved.python
        return spec, Probe(python, spec, preflight.code_path(spec), os.environ, sandbox=self._sandbox)

    def _inspection_slot(self, runs_code: bool) -> AbstractContextManager[None]:
        """Return a slot for an inspection, if users' code will run. Raises ``Refused`` (``busy``)."""
        return self._inspections.acquire() if runs_code else nullcontext()

    def _machine_of(self, spec: JobSpec) -> Machine:
        """Return the machine that the job trains on."""
        return launcher.machine_of(spec, self._machine(), self._launchers.get(spec.launcher.kind))

    def _machine(self) -> Machine:
        """Return the reconciler's machine. As long as the reconciler has not run, nothing is known of it, and this machine is
        used instead."""
        if self._reconciler_here:
            return self._own_machine
        return read_machine(self._home.home) or replace(self._own_machine, is_this_machine=False)

    def wake(self) -> None:
        if self._wake is not None:
            self._wake()
