"""Queries an interpreter about what it could run, in a separate process, without importing the user's code. The process gets
no token of Ratchet."""

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

from ratchet_contract.doctor.installed_packages import satisfies
from ratchet_contract.version import PROTOCOL_VERSION, RATCHET_VERSION
from ratchet_hooks.torch_versions import OLDEST
from ratchet_service.isolation import subprocess_query
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox, inherited_environ, probe_limits
from ratchet_service.user_code.snapshot import exists

PROBE_SECONDS: Final = 60.0
CACHE_SECONDS: Final = 30.0
OLDEST_PYTHON: Final = (3, 11)

# find() walks sys.meta_path name by name: importlib.util.find_spec("a.b") would import a
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
    """The report of an interpreter about itself and one module. If ``error`` is set, the other fields have no meaning.
    ``missing``: the part of the module's name that was not found. ``origin``: the module's source file. ``syntax``: text on a
    syntax error in this file. ``torch_cuda``: whether torch is built with CUDA."""

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
    """Queries interpreters, each in a separate process. Results are cached for ``CACHE_SECONDS``, except those of queries that
    search a user's directory. Thread-safe."""

    def __init__(self, sandbox: Sandbox = NO_SANDBOX) -> None:
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._cache: dict[tuple[str, str | None, tuple[str, ...]], tuple[float, Findings]] = {}

    def query(
        self,
        python: str,
        *,
        code: str | None = None,
        module: str | None = None,
        path: Sequence[str] = (),
        names: tuple[str, ...] = (),
    ) -> Findings:
        """Return what the interpreter reports about itself, ``module`` and the top-level modules ``names``. ``code``,
        ``path``: directories searched first. May block for ``PROBE_SECONDS``; failures are in ``Findings.error``."""
        if code is not None or path:
            return _query(self._sandbox, python, code, module, path, names)
        key = (python, module, names)
        with self._lock:
            found = self._cache.get(key)
            if found is not None and time.monotonic() - found[0] < CACHE_SECONDS:
                return found[1]
        answer = _query(self._sandbox, python, None, module, (), names)
        with self._lock:
            now = time.monotonic()
            self._cache = {k: known for k, known in self._cache.items() if now - known[0] < CACHE_SECONDS}
            self._cache[key] = (now, answer)
        return answer


def _query(
    sandbox: Sandbox, python: str, code: str | None, module: str | None, path: Sequence[str], names: Sequence[str]
) -> Findings:
    """Query the interpreter in a process, without the cache; the arguments are those of ``Interpreters.query``."""
    with tempfile.TemporaryFile() as stderr:
        try:
            data = subprocess_query.query_process(
                [python, "-c", _PROGRAM],
                {"code": code, "module": module, "path": list(path), "names": list(names)},
                cwd="/",
                env=inherited_environ(os.environ),
                timeout_seconds=PROBE_SECONDS,
                stderr=stderr,
                sandbox=sandbox,
                limits=probe_limits(None, PROBE_SECONDS),
            )
            return _FINDINGS.validate_python({**data, "version": data["version"]})
        except TimeoutError:
            return Findings(error=f"it did not answer within {PROBE_SECONDS:g} s")
        except OSError as error:
            return Findings(error=f"it could not be run: {error}")
        except (ValueError, TypeError, KeyError):  # perhaps no Python at all
            return Findings(error=f"it did not answer: {subprocess_query.last_line(stderr) or 'no output'}")


def find_interpreter(python: str) -> Path | None:
    """Return the interpreter that ``spec.python`` names: the file, or ``bin/python`` of a directory; None: there is no such
    file."""
    path = Path(python)
    if exists(path, directory=True):
        path = path / "bin" / "python"
    # links are not resolved: the python of a virtual environment is a link, and belongs to it only under that name
    return path if exists(path, directory=False) else None


def python_fault(path: Path, findings: Findings) -> tuple[str, str] | None:
    """Return why no rank can run under the interpreter ``path``, as code and text of a problem; None: no reason is known."""
    install = pip_install_command(str(path), "ratchet-train[worker]")
    if findings.error is not None:
        return "python-unusable", f"{path}: {findings.error}"
    if findings.version < OLDEST_PYTHON:
        have, need = ".".join(map(str, findings.version)), ".".join(map(str, OLDEST_PYTHON))
        text = f"{path} is Python {have}, Ratchet needs {need} or newer: create an environment with python{need} -m venv DIR"
        return "python-too-old", text
    if findings.worker_error is not None:
        return "worker-missing", f"{path} cannot import ratchet_worker ({findings.worker_error}): {install}"
    if findings.protocol != PROTOCOL_VERSION:
        text = (
            f"{path} has a Ratchet with protocol {findings.protocol}, the service uses {PROTOCOL_VERSION}: install "
            "the service's "
        )
        return (
            "protocol-mismatch",
            f"{text}version there, {pip_install_command(str(path), f'ratchet-train[worker]=={RATCHET_VERSION}')}",
        )
    if not findings.torch:
        return "torch-missing", f"{path} has no torch: {install}"
    if findings.torch_version is not None and not satisfies(findings.torch_version, f">={OLDEST}"):
        text = f"{path} has torch {findings.torch_version}, Ratchet needs torch {OLDEST} or newer: "
        return "torch-version", text + pip_install_command(str(path), f"torch>={OLDEST}")
    return None


def pip_install_command(python: str, *packages: str) -> str:
    """Return the shell command that installs ``packages`` with the interpreter ``python``, with all arguments quoted."""
    return shlex.join([python, "-m", "pip", "install", *packages])
