"""Asks an interpreter what it could run, in a process of its own, without importing a line of the user's code.

The interpreter may be the user's own, and what starts with it (``sitecustomize``, ``.pth`` files): it gets no credentials, runs
as the worker's user where there is one, within limits, and nothing of it is left (``children``).

A module is found by walking ``sys.meta_path`` name by name: ``importlib.util.find_spec("a.b")`` would import ``a``.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from ratchet_contract.installation import satisfies
from ratchet_contract.version import PROTOCOL_VERSION, RATCHET_VERSION
from ratchet_hooks.torch_versions import OLDEST
from ratchet_service import children
from ratchet_service.confined import OWN, Confined, limits_of
from ratchet_service.credentials import inherited
from ratchet_service.snapshot import exists

PROBE_SECONDS: Final = 60.0
CACHE_SECONDS: Final = 30.0
OLDEST_PYTHON: Final = (3, 11)

_PROGRAM: Final = r"""
import ast, json, os, sys
asked = json.load(sys.stdin)
code, module, more = asked["code"], asked["module"], asked["path"]
sys.path = [p for p in sys.path if p]
out = {"version": list(sys.version_info[:3])}
try:
    import ratchet_worker
    from ratchet_contract.version import PROTOCOL_VERSION
    out["protocol"] = PROTOCOL_VERSION
except Exception as error:
    out["worker_error"] = f"{type(error).__name__}: {error}"
sys.path[:0] = more
if code:
    sys.path.insert(0, code)  # after the imports: a user's own typing.py must not get in between
def find(name):
    path, full, spec = None, "", None
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        spec = next((s for f in sys.meta_path if (s := f.find_spec(full, path)) is not None), None)
        if spec is None:
            return None, full
        path = spec.submodule_search_locations
    return spec, full
torch = find("torch")[0]
out["torch"] = torch is not None
out["torch_cuda"] = False
if torch is not None and torch.origin:
    with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as f:
        for node in ast.parse(f.read()).body:
            target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
            name, value = getattr(target, "id", ""), getattr(getattr(node, "value", None), "value", None)
            if name == "cuda":
                out["torch_cuda"] = value is not None
            elif name == "__version__":
                out["torch_version"] = value
def there(name):
    try:
        return name in sys.modules or find(name)[0] is not None
    except Exception:
        return True  # a finder of theirs that has its own view of it
out["missing_packages"] = [name for name in asked["names"] if not there(name)]
if module:
    spec, name = find(module)
    if spec is None:
        out["missing"] = name
    elif spec.origin and spec.origin.endswith(".py"):
        out["origin"] = spec.origin
        try:
            with open(spec.origin, "rb") as f:
                ast.parse(f.read(), spec.origin)
        except SyntaxError as error:
            out["syntax"] = f"{os.path.basename(spec.origin)}, line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError):
            pass  # nested too deeply for a tree: what runs it may manage
os.pwrite(asked["answer"], json.dumps(out).encode(), 0)
"""


@dataclass(frozen=True)
class Findings:
    """What an interpreter said about itself. ``error`` set: it could not be asked, and nothing else means anything.

    ``missing``: the first part of the module's name that was not found; ``missing_packages``: those of ``names``.
    ``syntax``: the module's syntax error. ``origin``:
    the module's source file. ``torch_version`` is as torch's files say it, with its local part (``2.13.0+cpu``).
    """

    error: str | None = None
    version: tuple[int, ...] = ()
    protocol: int | None = None
    worker_error: str | None = None
    torch: bool = False
    torch_cuda: bool = False
    torch_version: str | None = None
    missing: str | None = None
    missing_packages: tuple[str, ...] = ()
    origin: str | None = None
    syntax: str | None = None


_FINDINGS: Final = TypeAdapter(Findings)


class Interpreters:
    """Asks and remembers for ``CACHE_SECONDS``; answers about a user's directory are never remembered. Thread-safe."""

    def __init__(self, confined: Confined = OWN) -> None:
        self._confined = confined
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str | None, tuple[str, ...]], tuple[float, Findings]] = {}

    def ask(
        self,
        python: str,
        *,
        code: str | None = None,
        module: str | None = None,
        path: Sequence[str] = (),
        names: tuple[str, ...] = (),
    ) -> Findings:
        """Look for ``ratchet_worker``, torch, ``module`` and the top-level modules ``names`` with ``code``, then ``path``, first
        on ``sys.path``."""
        if code is not None or path:
            return _ask(self._confined, python, code, module, path, names)
        key = (python, module, names)
        with self._lock:
            found = self._known.get(key)
            if found is not None and time.monotonic() - found[0] < CACHE_SECONDS:
                return found[1]
        answer = _ask(self._confined, python, None, module, (), names)
        with self._lock:
            now = time.monotonic()
            self._known = {k: known for k, known in self._known.items() if now - known[0] < CACHE_SECONDS}
            self._known[key] = (now, answer)
        return answer


def _ask(
    confined: Confined, python: str, code: str | None, module: str | None, path: Sequence[str], names: Sequence[str]
) -> Findings:
    with tempfile.TemporaryFile() as stderr:
        try:
            data = children.ask(
                [python, "-c", _PROGRAM],
                {"code": code, "module": module, "path": list(path), "names": list(names)},
                cwd="/",
                env=inherited(os.environ),
                seconds=PROBE_SECONDS,
                stderr=stderr,
                confined=confined,
                limits=limits_of(None, PROBE_SECONDS),
            )
            return _FINDINGS.validate_python({**data, "version": data["version"]})
        except TimeoutError:
            return Findings(error=f"it did not answer within {PROBE_SECONDS:g} s")
        except OSError as error:
            return Findings(error=f"it could not be run: {error}")
        except (ValueError, TypeError, KeyError):  # perhaps no Python at all
            return Findings(error=f"it did not answer: {children.last_line(stderr) or 'no output'}")


def interpreter_of(given: str) -> Path | None:
    """The interpreter that ``spec.python`` names: itself, or ``bin/python`` of a virtual environment; None if there is none.

    Links are kept: a virtual environment's python is a link, and is one only under that name.
    """
    path = Path(given)
    if exists(path, directory=True):
        path = path / "bin" / "python"
    return path if exists(path, directory=False) else None


def python_fault(path: Path, found: Findings) -> tuple[str, str] | None:
    """Why no rank can run under this interpreter, as a problem's code and a sentence with the command that mends it."""
    install = pip_install(str(path), "ratchet-train[worker]")
    if found.error is not None:
        return "python-unusable", f"{path}: {found.error}"
    if found.version < OLDEST_PYTHON:
        have, need = ".".join(map(str, found.version)), ".".join(map(str, OLDEST_PYTHON))
        text = f"{path} is Python {have}, Ratchet needs {need} or newer: make an environment with one, python{need} -m venv DIR"
        return "python-too-old", text
    if found.worker_error is not None:
        return "worker-missing", f"{path} cannot import ratchet_worker ({found.worker_error}): {install}"
    if found.protocol != PROTOCOL_VERSION:
        text = f"{path} has a Ratchet of protocol {found.protocol}, the service speaks {PROTOCOL_VERSION}: install the service's "
        return (
            "protocol-mismatch",
            f"{text}version there, {pip_install(str(path), f'ratchet-train[worker]=={RATCHET_VERSION}')}",
        )
    if not found.torch:
        return "torch-missing", f"{path} has no torch: {install}"
    if found.torch_version is not None and not satisfies(found.torch_version, f">={OLDEST}"):
        text = f"{path} has torch {found.torch_version}, Ratchet needs torch {OLDEST} or newer: "
        return "torch-version", text + pip_install(str(path), f"torch>={OLDEST}")
    return None


def pip_install(python: str, *what: str) -> str:
    """The command, ready to be typed."""
    return shlex.join([python, "-m", "pip", "install", *what])
