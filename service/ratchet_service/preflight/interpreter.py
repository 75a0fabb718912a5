"""Pre-flight of the interpreter of a job's ranks: what it reports about itself, the task's module and the packages that
the code imports."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from ratchet_contract.spec.job import JobSpec, TaskSpec
from ratchet_contract.spec.parse import suggestion
from ratchet_hooks.torch_versions import untested
from ratchet_service.isolation.file_access import as_user
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.preflight import entrypoint, imports
from ratchet_service.preflight.imports import Imported
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine
from ratchet_service.user_code import snapshot
from ratchet_service.user_code.interpreter_probe import Findings, Interpreters, find_interpreter, python_fault


def check(
    spec: JobSpec,
    machine: Machine,
    interpreters: Interpreters,
    code_ok: bool,
    report: Report,
    sandbox: Sandbox = NO_SANDBOX,
) -> tuple[str, Findings]:
    """Return the path of the interpreter for the ranks, and its findings: what it reports about itself and the task's module. If
    the interpreter cannot be queried, ``error`` of the findings is set. If it runs only on nodes, the findings are assumptions.
    Warnings and problems are added to ``report``. ``code_ok``: the code can be inspected here. ``sandbox``: user and limits for
    inspections."""
    given = spec.python or machine.python
    path = find_interpreter(given) if Path(given).is_absolute() else None
    if path is None:
        report.refuse("/python", "python-not-found", _python_not_found_text(given))
        return given, Findings(error="not found")
    if spec.python is not None and not machine.runs_jobs:
        text = "it is run on the nodes only: the first attempt checks whether it can run the job"
        report.warn("/python", "python-not-checked", text)
        return str(path), Findings(torch=True, torch_cuda=machine.torch_cuda)
    module = spec.task.entrypoint.partition(":")[0] if spec.task is not None and code_ok else None
    # No query about a script depends on its directory, so a cached result is good enough.
    code = spec.code.path if spec.code is not None and module is not None else None
    packages = Imported()
    if code_ok and machine.runs_jobs and spec.image is None:
        packages = imports.find_job_imports(spec, python_path(spec), sandbox)
    found = interpreters.query(
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
    if found.torch_version is not None and (note := untested(found.torch_version)) is not None:
        text = f"{path}: {note}. The resume report of every attempt says so; `ratchet doctor --exactness --python {path}` checks "
        report.warn("/python", "torch-untested", text + "on this machine that a killed job resumes bit for bit")
    if found.missing is not None and spec.environment is not None:
        text = f"{path} has no module {found.missing!r}: it must come with the requirements of environment"
        report.warn("/task/entrypoint", "module-not-found", text)
    elif found.missing is not None:
        report.refuse("/task/entrypoint", "module-not-found", _module_not_found_text(spec, path, found.missing))
    elif found.syntax is not None:
        report.refuse("/task/entrypoint", "syntax-error", found.syntax)
    elif found.origin is not None and spec.task is not None:
        _check_entrypoint(spec.task, Path(found.origin), sandbox, report)
    imports.check(spec, str(path), packages, found.missing_packages, report)
    return str(path), found


def python_path(spec: JobSpec) -> tuple[str, ...]:
    """Return the directories in the spec's own PYTHONPATH; relative ones start at the directory of the code."""
    entries = [entry for entry in spec.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    root = Path(spec.code.path) if spec.code is not None else None
    return tuple(str(root / entry) if root is not None else entry for entry in entries)


def _python_not_found_text(python: str) -> str:
    """Return the text of the problem for an interpreter that does not exist or is not absolute."""
    path = Path(python)
    if not path.is_absolute():
        found = shutil.which(python)
        return f"{python!r} is not absolute: name its full path" + (f", {found!r}" if found else "")
    if snapshot.exists(path, directory=True):
        return f"{python!r} is a directory without bin/python, so it is not a virtual environment: name one, or its interpreter"
    return f"there is no interpreter {python!r} on the service's machine: name a python or its environment's directory"


def _check_entrypoint(task: TaskSpec, origin: Path, sandbox: Sandbox, report: Report) -> None:
    """Add to ``report`` the fault of the task's entrypoint that its source ``origin`` shows, if the sandbox's user
    may read it."""
    try:
        with as_user(sandbox.user):
            fd = os.open(origin, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            # the submitter's own interpreter names the file, which may have no end
            source = file.read(entrypoint.MAX_SOURCE_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        if not source:
            return
    except (OSError, ValueError):  # the interpreter could read it; the first attempt will show
        return
    problem = entrypoint.check(source, task, package=origin.name == "__init__.py")
    if problem is not None:
        report.problems.append(problem)


def _module_not_found_text(spec: JobSpec, path: Path, missing: str) -> str:
    """Return the text of the problem for a missing module, with similar names in the code's directory."""
    if spec.code is None:
        return f"{path} has no module {missing!r}: set code.path to the directory that holds it"
    here = snapshot.names_in(spec.code.path)
    near = suggestion(missing, [name.removesuffix(".py") for name in here if name.endswith(".py") or "." not in name])
    held = ", ".join(here[:20]) or "nothing"
    return f"no module {missing!r} in {spec.code.path!r} (it holds: {held}) or {path}{near}"
