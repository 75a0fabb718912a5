"""Imports installed packages in a parked fork server, without those whose import changes more than ``sys.modules``. They are
imported in a fork of the server, which takes an attempt of the same code; the server itself takes any other."""

from __future__ import annotations

import importlib
import locale
import os
import random
import sys
import sysconfig
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ratchet_worker.host.cpu import gc_disabled
from ratchet_worker.ipc.child_processes import die_with_parent
from ratchet_worker.ipc.log_lines import print_to_log
from ratchet_worker.state.import_draws import is_only_drawn

OTHER_CODE: Final = 75
"""Exit code of the fork if it does not take the attempt."""
_LEFT_OUT: Final = 76
_TASKS: Final = Path("/proc/self/task")
_MAX_TRIES: Final = 6
"""Each package that is left out costs the imports again."""


def fork_with_packages(modules: Sequence[str], code: Sequence[str]) -> bool:
    """Return True in a fork that has imported those of ``modules`` that can be imported in advance. In the server, wait for the
    fork: return False after its ``OTHER_CODE``, or if there is nothing to import; after any other end, exit with its code.
    ``code``: the directories of the job's code, whose modules must not be hidden."""
    wanted = [name for name in modules if _is_package(name)]
    for _ in range(_MAX_TRIES):
        if not wanted:
            return False
        server = os.getpid()
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            die_with_parent(server)
            unfit = _import(wanted, code)
            os.write(write_fd, unfit.encode())
            os.close(write_fd)
            if unfit:
                os._exit(_LEFT_OUT)
            return True
        os.close(write_fd)
        with os.fdopen(read_fd) as pipe:
            unfit = pipe.read()
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if ended == OTHER_CODE:
            return False
        if ended != _LEFT_OUT:
            if unfit or ended >= 0:
                os._exit(ended)
            unfit = wanted[0].partition(".")[0]
        wanted = [name for name in wanted if name.partition(".")[0] != unfit]
    return False


def visible_state() -> dict[str, object]:
    """Return what an import may change of this process, apart from modules and what these add to lists of Python, by names for
    users."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "variables": dict(os.environ),
        "the current directory": str(Path.cwd()),
        "the umask": status["Umask"],
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "the import path": [*sys.path],
        "numpy's generator": str(np.random.get_state(legacy=False)),
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "torch's settings": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        ),
        "handlers of exceptions": (sys.excepthook, threading.excepthook),
        "output": (sys.stdout, sys.stderr),
        "the locale": locale.setlocale(locale.LC_ALL),
        "open files": _open_files(),
        "processes": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }


def thread_count() -> int:
    """Return the number of threads that a fork leaves running."""
    if len([*_TASKS.iterdir()]) > 1:
        # OpenBLAS ends its threads before a fork, so one process is forked and ended first.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len([*_TASKS.iterdir()])


def uses_cuda() -> bool:
    """True if this process has called CUDA's driver: its forks cannot."""
    return torch.cuda.is_initialized() or any(file.startswith("/dev/nvidia") for file in _open_files())  # type: ignore[no-untyped-call]


def _open_files() -> list[str]:
    """Return what the descriptors of this process lead to."""
    found = []
    for link in [*Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the descriptor of that directory itself
            found.append(str(link.readlink()))
    return sorted(found)


def _is_package(name: str) -> bool:
    """True if ``name`` is that of a module whose top-level package lies in this interpreter's site-packages, and not elsewhere
    by a link or an editable installation."""
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        spec = PathFinder.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and _is_below(spec.origin, "purelib", "platlib")


def _is_below(path: str | None, *names: str) -> bool:
    """True if the file lies in one of these directories of ``sysconfig``, links resolved."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in names}
    return path is not None and any(Path(path).resolve().is_relative_to(folder) for folder in folders)


def _import(names: Sequence[str], code: Sequence[str]) -> str:
    """Import the modules. Return the first top-level package that cannot be imported in advance, after printing why; empty if
    all can."""
    own = {entry.name.partition(".")[0] for folder in code if Path(folder).is_dir() for entry in Path(folder).iterdir()}
    random.seed(0)
    before = visible_state()
    for name in names:
        drawn, known = random.getstate(), {*sys.modules}
        try:
            with gc_disabled():
                importlib.import_module(name)
        except BaseException as error:  # such as a SystemExit
            return _leave_out(name, f"{type(error).__name__}: {error}")
        after = visible_state()
        if changed := [what for what in before if before[what] != after[what]]:
            return _leave_out(name, f"its import changes {', '.join(changed)}")
        if not is_only_drawn(drawn, random.getstate()):
            return _leave_out(name, "its import changes the generator random")
        if (threads := thread_count()) > 1:
            return _leave_out(name, f"its import leaves {threads - 1} threads running")
        if uses_cuda():
            return _leave_out(name, "its import uses CUDA")
        new = {module for module in sys.modules.keys() - known if not module.startswith("ratchet")}
        if hidden := sorted({module.partition(".")[0] for module in new} & own):
            return _leave_out(name, f"the job's code has modules of the same name as it imports: {', '.join(hidden)}")
        files = {str(getattr(sys.modules[module], "__file__", None) or "") for module in new} - {""}
        if foreign := sorted(
            file for file in files if not _is_below(file, "purelib", "platlib", "stdlib", "platstdlib")
        ):
            return _leave_out(name, f"it imports {foreign[0]}, which is not in site-packages")
    return ""


def _leave_out(name: str, why: str) -> str:
    """Print that the package of the module ``name`` is not imported in advance, and return its name."""
    package = name.partition(".")[0]
    print_to_log(f"ratchet: {package} is not imported in advance: {why}")
    return package
