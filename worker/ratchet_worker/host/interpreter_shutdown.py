"""The end of a process that was forked from one that has imported torch. Python's own shutdown takes all modules apart, with the
registries of torch's libraries: 0.2 s of a core, to free memory that the kernel frees at once."""

from __future__ import annotations

import _io
import atexit
import ctypes
import gc
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Inherited:
    """What a process has when it is forked: the imported ``modules`` by name, and the native ``libraries`` that are known to need
    no exit handler of C."""

    modules: Mapping[str, ModuleType]
    libraries: frozenset[str]

    @classmethod
    def current(cls) -> Inherited:
        """Return what a process would have that is forked now."""
        return cls(sys.modules.copy(), _native_libraries())


def _native_libraries() -> frozenset[str]:
    """Return the paths of the files of which this process executes code, without Python's own extension modules and the C
    library's name services, which it loads for a host or user name."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {Path(line[5]) for line in lines if len(line) == 6 and "x" in line[1] and line[5].startswith("/")}
    # not the virtual environment's
    folder = sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})
    own = (Path(folder) / "lib-dynload").resolve()
    return frozenset(str(path) for path in mapped if path.parent != own and not path.name.startswith("libnss_"))


def shut_down(code: int, inherited: Inherited) -> None:
    """End this process with ``code`` as Python's shutdown would: run Python's exit handlers, destroy what modules hold that were
    imported since the fork, and flush all files. What was inherited is left to the kernel. Returns if that could lose something:
    threads of the user run, a file cannot be flushed, an inherited module holds an object with a destructor, or native code was
    loaded that may have exit handlers of its own."""
    threads = [thread for thread in threading.enumerate() if not (thread.daemon and thread.name.startswith("ratchet-"))]
    if len(threads) > 1:
        return
    threading._shutdown()  # type: ignore[attr-defined]  # calls the exit handlers of concurrent.futures and joblib
    atexit._run_exitfuncs()
    if "LD_PRELOAD" in os.environ or _native_libraries() - inherited.libraries:
        return
    try:
        _flush_files()  # before the collector may close a file below the buffer that writes to it
        _destroy_modules([name for name, module in sys.modules.items() if inherited.modules.get(name) is not module])
        _flush_files()
        if any(hasattr(type(each), "__del__") for each in gc.get_objects()):
            return
    except BaseException:  # such as a SystemExit, which would change the exit code
        return
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _flush_files() -> None:
    """Flush all open files of Python. Raises the error of one that cannot be flushed."""
    files = [each for each in gc.get_objects() if issubclass(type(each), _io._IOBase)]  # io.IOBase: slower
    for file in (*files, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if file is not None and not file.closed and file.writable():
            file.flush()


def _destroy_modules(imported: list[str]) -> None:
    """Destroy these modules, in order of their import, and what only they hold, in the order of Python's shutdown: first modules
    that nothing else refers to, whose destructors still find their names."""
    popped = [sys.modules.pop(name) for name in imported]
    modules = [weakref.ref(module) for module in popped if isinstance(module, ModuleType)]
    del popped
    gc.collect()  # does not look at what was inherited, which is frozen
    for found in reversed(modules):
        if (module := found()) is not None:
            _clear(vars(module))
    gc.collect()


def _clear(names: dict[str, object]) -> None:
    """Set a module's names to None as Python does: first those that begin with one underscore, whose destructors find the others,
    and never those of Python."""
    for private in (True, False):
        for name in [*names]:
            if name != "__builtins__" and (not private or (name[:1] == "_" and name[1:2] != "_")):
                names[name] = None
