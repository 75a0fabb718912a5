"""Finds and runs the user's code, and raises ``UserError`` with advice for errors such as a missing module."""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet_contract.errors import UserError
from ratchet_contract.script import unmanaged_script
from ratchet_contract.script.public_names import PACKAGE, requirement, shadow_advice
from ratchet_contract.spec.job import TaskSpec


def add_to_path(code: Path) -> None:
    """Put the code directory ``code`` first on ``sys.path``, and remove the entry ``""``, the current directory."""
    text = str(code)
    # A user's hooks.py or worker.py takes precedence over other modules of that name.
    sys.path[:] = [text, *(p for p in sys.path if p not in (text, ""))]


def make_task(spec: TaskSpec, code: Path) -> Any:
    """Import the entrypoint, call it with the spec's arguments, and return the task. Raises ``UserError`` if the entrypoint or
    the arguments are wrong, or the result is not a task."""
    module_name, _, attribute = spec.entrypoint.partition(":")
    found: Any = _import(module_name, code)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = ", ".join(n for n in dir(found) if not n.startswith("_"))
            raise UserError(
                f"task.entrypoint {spec.entrypoint!r}: {getattr(found, '__name__', module_name)} has no {part!r}; it has: "
                f"{names[:300] or 'nothing'}",
                code="entrypoint-missing",
            )
        found = getattr(found, part)
    if not callable(found):
        raise UserError(
            f"task.entrypoint {spec.entrypoint!r} is a {type(found).__name__}, not a class", code="entrypoint-wrong"
        )
    _check_arguments(found, spec)
    task = found(**spec.args)
    missing = [name for name in ("build", "loss") if not callable(getattr(task, name, None))]
    if hasattr(task, "evaluation") and not callable(getattr(task, "evaluate", None)):
        missing.append("evaluate")
    if missing:
        raise UserError(
            f"task {spec.entrypoint!r} has no {' and no '.join(missing)}; see help(ratchet.Task) for what a task needs",
            code="entrypoint-wrong",
        )
    return task


def _import(name: str, code: Path) -> Any:
    """Import the user's module ``name``. Raises ``UserError`` for an ``ImportError`` or ``SyntaxError``, also one in a module
    that it imports."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(
                f"task.entrypoint: no module named {error.name!r} in the code directory (it holds: {_names_in(code)}) or on "
                f"the path of {sys.executable}; check task.entrypoint and code.path",
                code="entrypoint-missing",
            ) from error
        raise import_error(f"importing {name!r}", error, code) from error
    except (ImportError, SyntaxError) as error:
        text = f"importing {name!r} failed: {type(error).__name__}: {error}"
        advice = shadowing_advice(error)
        raise UserError(text if advice is None else f"{text}. {advice}", code="import-failed") from error


def import_error(what: str, error: ModuleNotFoundError | SyntaxError, code: Path) -> UserError:
    """Return the ``UserError`` for ``what``, which failed with ``error`` and would fail again on every retry. ``code``: the code
    directory."""
    if isinstance(error, SyntaxError):
        return UserError(f"{what} failed: SyntaxError: {error}", code="import-failed")
    return UserError(
        f"{what} needs the module {error.name!r}, which {sys.executable} does not have: {_pip_install(error.name)} (if the "
        "package is named like its module), or name another interpreter with `python`. A module of your own belongs into the "
        f"code directory, which holds: {_names_in(code)}",
        code="import-failed",
    )


def shadowing_advice(error: BaseException) -> str | None:
    """Return advice if ``error`` shows that a module of the user hides ``ratchet``; else None."""
    return shadow_advice(error, getattr(sys.modules.get(PACKAGE), "__file__", None))


def _pip_install(module: str | None) -> str:
    """Return the pip command that probably installs ``module`` for this interpreter."""
    top = (module or "").partition(".")[0]
    return shlex.join([sys.executable, "-m", "pip", "install", requirement(top)])


def _names_in(code: Path) -> str:
    """Return the names of up to 20 entries of the code directory as text, for messages."""
    return ", ".join(sorted(p.name for p in code.iterdir())[:20]) or "nothing"


def _check_arguments(factory: Any, spec: TaskSpec) -> None:
    """Raise ``UserError`` if the signature of ``factory`` does not take the spec's arguments."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        # Before the call, so that a TypeError raised inside the constructor is not mistaken for wrong arguments.
        signature.bind(**spec.args)
    except TypeError as error:
        raise UserError(
            f"task.args do not fit {spec.entrypoint!r}: {error}; it takes {signature}", code="arguments-wrong"
        ) from error


def is_unmanaged(script: Sequence[str], code: Path) -> bool:
    """True if the text of the script's main file shows no sign of a Session; False if the file is unreadable."""
    try:
        return unmanaged_script.is_unmanaged((code / script[0]).read_bytes())
    except OSError:
        return False


def run_script(script: Sequence[str], code: Path, on_start: Callable[[], None] = lambda: None) -> None:
    """Call ``on_start`` and run the script, a path in ``code`` with arguments, as the main module, which it remains. Raises
    ``UserError`` if it is missing or not valid Python."""
    path = code / script[0]
    if not path.is_file():
        raise UserError(
            f"script {script[0]!r} is not in the code directory; it holds: {_names_in(code)}", code="script-missing"
        )
    sys.argv[:] = [str(path), *script[1:]]
    directory = str(path.parent)
    if directory != sys.path[0]:
        sys.path.insert(0, directory)
    try:
        program = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"script {script[0]!r} is not valid Python: {error}", code="script-wrong") from error
    on_start()
    # Not by runpy, which takes the module out of sys.modules: Python's shutdown would not destroy what the script holds.
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=str(path), __cached__=None, __package__="")
    exec(program, vars(main))
