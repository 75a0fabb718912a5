"""The script of a job that dumps, as JSON in the attempt's directory, what each rank finds when its script starts, then waits.
Attempts that start cold and in parked agents are compared by it."""

import atexit
import ctypes
import decimal
import faulthandler
import gc
import hashlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

_NOT_STABLE = (
    "Name", "State", "Tgid", "Ngid", "Pid", "PPid", "FDSize", "NStgid", "NSpid", "NSpgid", "NSsid", "Vm", "Rss", "HugetlbPages",
    "SigQ", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches", "x86_Thread_features",
)  # fmt: skip
"""Fields of /proc/self/status, by their first letters, that no two processes have in common."""
_GET_PDEATHSIG, _GET_DUMPABLE, _GET_KEEPCAPS, _GET_SUBREAPER, _GET_THP = 2, 3, 7, 37, 42  # prctl(2)


_IOPRIO_GET: Final = {"x86_64": 252, "aarch64": 31}
"""Number of the system call; the C library has no function for it."""

SELF: Final = Path("/proc/self")


def read(path: Path) -> str:
    return path.read_text()


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def name_of(function: Any) -> str:
    """Without an address."""
    if function is None or isinstance(function, int):  # SIG_DFL is one
        return repr(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def fds() -> list[str]:
    """Targets and flags of all descriptors but sockets: those of the ranks' group are opened and closed while the script runs.
    Numbers of pipes differ in each process."""
    found = []
    for fd in list((SELF / "fd").iterdir()):
        with suppress(FileNotFoundError):  # that of the list is closed
            if str(fd.readlink()).startswith("socket:"):
                continue
            flags = next(line for line in read(SELF / "fdinfo" / fd.name).splitlines() if line.startswith("flags"))
            found.append(str(fd.readlink()).partition(":[")[0] + " " + flags)
    return sorted(found)


def agent_fds(agent: Path) -> list[str]:
    """Targets of the agent's descriptors, once ten listings in turn are equal: it opens and closes some while ranks start."""
    last: list[list[str]] = []
    end = time.monotonic() + 30.0
    while len(last) < 10 or any(found != last[0] for found in last):
        with suppress(FileNotFoundError):
            found = sorted(str(entry.readlink()).partition(":[")[0] for entry in (agent / "fd").iterdir())
            last = [*last[-9:], found]
        assert time.monotonic() < end, f"the agent's descriptors change: {last}"
        time.sleep(0.03)
    return last[0]


def process() -> dict[str, Any]:
    """What the kernel knows of the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    status = dict(line.split(":", 1) for line in read(SELF / "status").splitlines())
    value, words = ctypes.c_int(), {}
    for option in (_GET_PDEATHSIG, _GET_SUBREAPER):
        libc.prctl(option, ctypes.byref(value), 0, 0, 0)
        words[option] = value.value
    for option in (_GET_DUMPABLE, _GET_KEEPCAPS, _GET_THP):
        words[option] = libc.prctl(option, 0, 0, 0, 0)
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {
        "status": {name: text for name, text in status.items() if not name.startswith(_NOT_STABLE)},
        "limits": limits,
        "prctl": words,
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "disk priority": libc.syscall(_IOPRIO_GET[os.uname().machine], 1, 0),  # of this process
        "cores": sorted(os.sched_getaffinity(0)),
        "oom": read(SELF / "oom_score_adj"),
        "slack": read(SELF / "timerslack_ns"),
        "cgroup": read(SELF / "cgroup"),
        "personality": read(SELF / "personality"),
        "coredump": read(SELF / "coredump_filter"),
        "login": [read(SELF / "loginuid"), read(SELF / "sessionid")],
        "name": read(SELF / "comm"),
        "threads": sorted(read(task / "comm") for task in (SELF / "task").iterdir()),
        "namespaces": {entry.name: str(entry.readlink()) for entry in (SELF / "ns").iterdir()},
        "root": str((SELF / "root").readlink()),
        "exe": str((SELF / "exe").readlink()),
        "leader": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "parent": os.getppid() == int(os.environ["RATCHET_AGENT_PID"]),
        "timers": [
            signal.getitimer(number) for number in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
    }


def interpreter() -> dict[str, Any]:
    """What Python has of its own."""
    main, seed = sys.modules["__main__"], os.environ.get("PYTHONHASHSEED")
    return {
        "handlers": {number.name: name_of(signal.getsignal(number)) for number in signal.Signals},
        "hash": None if seed is None else [hash("seed"), list({"a", "b", "c", "d"})],
        "path": sys.path,
        "flags": list(sys.flags),
        "argv": [sys.argv, sys.orig_argv, sys.executable, sys.prefix, sys.exec_prefix],
        "main": [
            main.__name__,
            getattr(main, "__file__", None),
            getattr(main.__spec__, "name", None),
        ],
        "modules": sorted(set(sys.modules) - {"ratchet_worker.rank.preload"}),
        "finders": [name_of(one) for one in (*sys.meta_path, *sys.path_hooks)],
        "hooks": [name_of(one) for one in (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)],
        "traced": [name_of(sys.getprofile()), name_of(sys.gettrace()), faulthandler.is_enabled()],
        "at exit": atexit._ncallbacks(),
        "numbers": [sys.getswitchinterval(), sys.getrecursionlimit(), sys.get_int_max_str_digits(), repr(0.1 + 0.2)],
        "decimal": repr(decimal.getcontext()),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "frozen": gc.get_freeze_count() > 0,
        "warnings": [repr(one) for one in warnings.filters],
        "streams": [[one.encoding, one.errors, one.line_buffering] for one in (sys.stdin, sys.stdout, sys.stderr)],
        "encodings": [sys.getdefaultencoding(), sys.getfilesystemencoding(), locale.getpreferredencoding(False)],
        "locale": [locale.setlocale(locale.LC_ALL, None), *time.tzname],
        "logging": [
            logging.root.level,
            [name_of(type(one)) for one in logging.root.handlers],
            logging.root.manager.disable,
        ],
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "main thread": threading.main_thread().native_id == os.getpid(),
        "directories": [str(Path.cwd()), tempfile.gettempdir()],
        "timeout": socket.getdefaulttimeout(),
        "multiprocessing": multiprocessing.get_start_method(allow_none=True),
    }


def libraries() -> dict[str, Any]:
    """Generators, and settings of torch on which bits depend."""
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    return {
        "random": digest(random.getstate()),
        "numpy": [digest([part if isinstance(part, str | int | float) else part.tolist() for part in np.random.get_state()]),
                  {key: str(value) for key, value in np.geterr().items()}],
        "torch": [digest(torch.get_rng_state().tolist()), torch.initial_seed()],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info()],
        "denormals": float(tiny * 0.5) != 0.0,
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            vars(torch.utils)["deterministic"].fill_uninitialized_memory, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(),
        ],
        "bits": digest((torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) @ torch.ones(64, 64)).tolist()),
    }  # fmt: skip


def found() -> dict[str, Any]:
    states = {"libraries": libraries(), "interpreter": interpreter(), "process": process()}
    agent = Path(f"/proc/{os.getppid()}")
    status = read(agent / "status").splitlines()
    return {
        **{f"{part}: {name}": value for part, values in states.items() for name, value in values.items()},
        "pid": os.getpid(),
        "fds": fds(),
        "environ": dict(os.environ),
        "listed": read(SELF / "environ"),
        "command": read(SELF / "cmdline"),
        "agent": read(agent / "cmdline"),
        "agent listed": read(agent / "environ"),
        "agent session": os.getsid(os.getppid()) == os.getppid(),
        "agent nice": os.getpriority(os.PRIO_PROCESS, os.getppid()),
        "agent name": read(agent / "comm"),
        "agent directory": str((agent / "cwd").readlink()),
        "agent limits": read(agent / "limits"),
        "agent oom": read(agent / "oom_score_adj"),
        "agent fds": agent_fds(agent),
        "agent status": [
            line for line in status if line.startswith(("SigB", "SigI", "SigC", "Cap", "Umask", "Groups"))
        ],
    }


def main() -> None:
    while any(thread.name == "ratchet-resume" for thread in threading.enumerate()):
        time.sleep(0.01)  # it reads the checkpoint while the script begins
    out = Path(os.environ["RATCHET_ATTEMPT_DIR"], "dump-" + os.environ["RANK"])
    out.with_suffix(".new").write_text(json.dumps(found()))
    out.with_suffix(".new").rename(out)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
