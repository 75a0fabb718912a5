"""The interpreter of a job's ranks, and what it says of itself and of the task's module."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from ratchet_contract.spec import JobSpec, TaskSpec
from ratchet_contract.spec_parse import nearest
from ratchet_hooks.torch_versions import untested
from ratchet_service import entrypoints, preflight_imports, snapshot
from ratchet_service.confined import OWN, Confined
from ratchet_service.file_owner import as_user
from ratchet_service.interpreters import Findings, Interpreters, interpreter_of, python_fault
from ratchet_service.machine import Machine
from ratchet_service.preflight_imports import Imported
from ratchet_service.preflight_report import Report

_MOST_SOURCE: Final = 16 << 20
"""Bytes of a module. What an interpreter of a submitter's own names as its file may have no end."""


def check(
    spec: JobSpec,
    machine: Machine,
    interpreters: Interpreters,
    code_ok: bool,
    report: Report,
    confined: Confined = OWN,
) -> tuple[str, Findings]:
    """The interpreter for the ranks, and what it says about itself and the entrypoint. ``confined``: as whom both are asked."""
    given = spec.python or machine.python
    path = interpreter_of(given) if Path(given).is_absolute() else None
    if path is None:
        report.refuse("/python", "python-not-found", _no_python(given))
        return given, Findings(error="not found")
    if spec.python is not None and not machine.trains:
        text = "it is run on the nodes alone: whether it can run the job is seen by the first attempt"
        report.warn("/python", "python-not-checked", text)
        return str(path), Findings(torch=True, torch_cuda=machine.torch_cuda)
    module = spec.task.entrypoint.partition(":")[0] if spec.task is not None and code_ok else None
    # Of a script nothing is asked that depends on its directory: an answer that is known already will do.
    code = spec.code.path if spec.code is not None and module is not None else None
    packages = Imported()
    if code_ok and machine.trains and spec.image is None:
        packages = preflight_imports.imported(spec, python_path(spec), confined)
    found = interpreters.ask(
        str(path),
        code=code,
        module=module,
        path=python_path(spec) if module is not None else (),
        names=packages.names,
    )
    wrong = python_fault(path, found)
    if wrong is not None:
        report.refuse("/python", *wrong)
        return str(path), found
    if found.torch_version is not None and (told := untested(found.torch_version)) is not None:
        text = f"{path}: {told}. The resume report of every attempt says so; `ratchet doctor --exactness --python {path}` checks "
        report.warn("/python", "torch-untested", text + "on this machine that a killed job resumes bit for bit")
    if found.missing is not None:
        report.refuse("/task/entrypoint", "module-not-found", _no_module(spec, path, found.missing))
    elif found.syntax is not None:
        report.refuse("/task/entrypoint", "syntax-error", found.syntax)
    elif found.origin is not None and spec.task is not None:
        _check_entrypoint(spec.task, Path(found.origin), confined, report)
    preflight_imports.check(spec, str(path), packages, found.missing_packages, report)
    return str(path), found


def python_path(spec: JobSpec) -> tuple[str, ...]:
    """Directories that the spec's own PYTHONPATH names; relative ones lie in the ranks' copy of the code."""
    entries = [entry for entry in spec.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    root = Path(spec.code.path) if spec.code is not None else None
    return tuple(str(root / entry) if root is not None else entry for entry in entries)


def _no_python(given: str) -> str:
    path = Path(given)
    if not path.is_absolute():
        found = shutil.which(given)
        return f"{given!r} is not absolute: give its full path" + (f", {found!r}" if found else "")
    if snapshot.exists(path, directory=True):
        return f"{given!r} is a directory without bin/python, so no virtual environment: name one, or its interpreter"
    return f"there is no interpreter {given!r} on the service's machine: name a python or its environment's directory"


def _check_entrypoint(task: TaskSpec, origin: Path, confined: Confined, report: Report) -> None:
    """``origin`` is what the interpreter says, which may be the submitter's own."""
    try:
        with as_user(confined.user):
            fd = os.open(origin, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            source = file.read(_MOST_SOURCE + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        if not 0 < len(source) <= _MOST_SOURCE:
            return
    except (OSError, ValueError):  # the interpreter could read it; the first attempt will tell
        return
    problem = entrypoints.check(source, task, package=origin.name == "__init__.py")
    if problem is not None:
        report.problems.append(problem)


def _no_module(spec: JobSpec, path: Path, missing: str) -> str:
    if spec.code is None:
        return f"{path} has no module {missing!r}: set code.path to the directory that holds it"
    here = snapshot.names_in(spec.code.path)
    near = nearest(missing, [name.removesuffix(".py") for name in here if name.endswith(".py") or "." not in name])
    held = ", ".join(here[:20]) or "nothing"
    return f"no module {missing!r} in {spec.code.path!r} (it holds: {held}) or {path}{near}"
