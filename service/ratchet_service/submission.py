"""What a submission asks of this machine: pre-flight, snapshot, plan. Implements ``ports.SubmissionPorts``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ratchet_contract.api import Warning_
from ratchet_contract.code_tree import UNLIMITED, entries
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_contract.git_facts import GitFacts, git_facts
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_hooks.memory import needs_shapes
from ratchet_hooks.specs import CustomSpec
from ratchet_service import preflight, preflight_disk, preflight_hook, preflight_launcher, snapshot
from ratchet_service.confined import OWN, Confined
from ratchet_service.hook_probe import Probe
from ratchet_service.interpreters import Interpreters
from ratchet_service.launch_files import launch_file
from ratchet_service.launchers.table import Launchers
from ratchet_service.machine import Machine, read_machine
from ratchet_service.preflight_report import Report
from ratchet_service.roots import Roots
from ratchet_service.turns import Turns

_NO_JOB: Final = "job-id"
LOOKS: Final = 8
"""Looks at users' code at one time. Each holds one of the server's 40 threads, through which agents report and jobs are
stopped, for up to a minute."""


class LocalSubmission:
    """Ports of a service whose launcher works on the service's own machine. ``wake`` is the reconciler's, if it runs here."""

    def __init__(
        self,
        home: HomePaths,
        machine: Machine,
        launchers: Launchers,
        wake: Callable[[], None] | None = None,
        *,
        here: bool = True,
        roots: Roots | None = None,
        confined: Confined = OWN,
    ) -> None:
        """``here`` False: jobs run on the machine of a reconciler elsewhere, which tells of itself in the run directory.
        ``roots``: what specs may name; None: anything. ``confined``: as whom users' code is looked at."""
        self._home = home
        self._own = machine
        self._here = here
        self._launchers = launchers
        self._wake = wake
        self._roots = roots or Roots()
        self._confined = confined
        self._interpreters = Interpreters(confined)
        self._looks = Turns(LOOKS, "looking at other submissions' code")

    def resolve(
        self, spec: JobSpec, code_digest: str | None = None, unsure: frozenset[str] = frozenset()
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        allowed = Report()
        copied = code_digest is not None and spec.code is not None and spec.code.source == "snapshot"
        self._roots.check(spec, allowed, copied=copied)
        forbidden = {problem.pointer.split("/")[1] for problem in allowed.problems}  # nothing there is looked at
        spec = spec.model_copy(update={key: JobSpec.model_fields[key].get_default() for key in forbidden})
        spec = self._readable(self._on_snapshot(spec, code_digest), allowed)
        with self._look(isinstance(spec.hook, CustomSpec)):
            found = preflight.resolve(
                spec,
                self._machine(),
                launchers=self._launchers,
                interpreters=self._interpreters,
                confined=self._confined,
                unsure=unsure | forbidden,
                allowed=self._roots.allows,
            )
        resolved, report = found[0], Report([*allowed.warnings, *found[1]], [*allowed.problems, *found[2]])
        preflight_disk.check(self._home.home, report)
        return resolved, report.warnings, report.problems

    def resize(
        self, spec: JobSpec, resolved: Resolved, warnings: Sequence[Warning_]
    ) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
        return preflight.resize(spec, resolved, warnings, self._machine_of(spec), self._launchers)

    def rehook(self, spec: JobSpec, resolved: Resolved) -> tuple[list[Warning_], list[FieldProblem]]:
        spec, probe = self._probe(spec, resolved)
        with self._look(isinstance(spec.hook, CustomSpec)):
            report = preflight_hook.check_other(spec, resolved, self._machine_of(spec), probe)
        return report.warnings, report.problems

    def _on_snapshot(self, spec: JobSpec, code_digest: str | None) -> JobSpec:
        """``spec`` with the snapshot, where there is one, in the place of the user's directory."""
        if spec.code is None or code_digest is None or spec.code.source == "nodes":
            return spec
        code = spec.code.model_copy(update={"path": str(self._home.code / code_digest), "digest": code_digest})
        return spec.model_copy(update={"code": code})

    def _readable(self, spec: JobSpec, report: Report) -> JobSpec:
        """Where the worker's user looks at code, it looks at the snapshot: the directory itself may be readable by the service
        alone. What cannot be copied is left as it is, and refused for that."""
        code, user = spec.code, self._confined.user
        if user is None or code is None or code.source == "nodes" or Path(code.path).is_relative_to(self._home.code):
            return spec
        with suppress(SpecError):
            copied = self._on_snapshot(spec, self.snapshot(Path(code.path), code.include))
            preflight.check_code(spec, None, report, self._roots.allows)
            return copied
        return spec

    def trains_here(self, kind: str) -> bool:
        return self._here and kind == "local"

    def snapshot(self, path: Path, include: Sequence[str] = ()) -> str:
        return snapshot.snapshot(path, self._home.code, include=include, allowed=self._roots.allows)

    def git_facts(self, path: Path, digest: str) -> GitFacts | None:
        return git_facts(path, entries(self._home.code / digest, UNLIMITED), self._roots.allows)

    def uploaded(self, digest: str) -> str:
        if not snapshot.keep(digest, self._home.code):
            problem = snapshot.not_uploaded(digest)
            raise SpecError(f"{problem.pointer}: {problem.detail}", errors=[problem])
        return digest

    def snapshot_file(self, path: Path) -> str:
        return snapshot.snapshot_file(path, self._home.code, allowed=self._roots.allows)

    def allows(self, real: Path) -> bool:
        return self._roots.allows(real)

    def plan(self, spec: JobSpec, resolved: Resolved) -> dict[str, Any]:
        """The launch of a first attempt; the job's id and the GPU indices are only known when there is one."""
        gpus = tuple(self._machine_of(spec).gpus[: spec.world.ranks_per_node]) if resolved.device == "cuda" else ()
        launch = launch_file(self._home, _NO_JOB, 1, spec, resolved, gpus, token="", desired=Desired.RUN)
        return self._launchers[spec.launcher.kind].plan(launch).printable()

    def hook_memory(self, spec: JobSpec, resolved: Resolved) -> int | None:
        spec, probe = self._probe(spec, resolved)
        with self._look(needs_shapes(spec.hook)):
            return preflight_hook.memory(spec, self._machine_of(spec), probe)

    def _probe(self, spec: JobSpec, resolved: Resolved) -> tuple[JobSpec, Probe]:
        """The spec with its snapshot, and what asks its hook, in the interpreter that its next attempt will have."""
        spec = self._on_snapshot(spec, resolved.code_digest)
        python = self._machine_of(spec).python if spec.python is None else resolved.python
        return spec, Probe(python, spec, preflight.code_path(spec), os.environ, confined=self._confined)

    def _look(self, runs_code: bool) -> AbstractContextManager[None]:
        """A turn, where users' code will run. Raises ``Refused`` (``busy``)."""
        return self._looks.taken() if runs_code else nullcontext()

    def _machine_of(self, spec: JobSpec) -> Machine:
        """That the job trains on."""
        return preflight_launcher.machine_of(spec, self._machine(), self._launchers.get(spec.launcher.kind))

    def _machine(self) -> Machine:
        """Of a reconciler that has not run yet nothing is known; then this machine stands for its own."""
        if self._here:
            return self._own
        return read_machine(self._home.home) or replace(self._own, here=False)

    def wake(self) -> None:
        if self._wake is not None:
            self._wake()
