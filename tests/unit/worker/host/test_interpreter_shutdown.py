"""The end of a forked process without Python's own shutdown: nothing that this would have written is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FORK = """
import gc, os, sys, threading, atexit, ctypes, json
from pathlib import Path
from ratchet_worker.host.interpreter_shutdown import Inherited, shut_down
folder = Path(sys.argv[1])
inherited = Inherited.current()
gc.freeze()
if os.fork() == 0:
    sys.path.insert(0, str(folder))
    c = ctypes.CDLL(None)
    c.strdup.restype = ctypes.c_void_p
    c.__cxa_atexit(c.puts, ctypes.c_void_p(c.strdup(b"exit handler of C")), None)
    exec(sys.argv[2], {**globals()})
    shut_down(7, inherited)
    sys.exit(7)
print("exit code", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def fork(folder: Path, code: str, **env: str) -> str:
    """Run ``code`` in a fork that ends with code 7; return what has been printed."""
    output = folder / "output"
    with output.open("ab") as file:
        command = ["bash", "-c", 'exec "$@" 3>&1', "bash", sys.executable, "-c", _FORK, str(folder), code]
        subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "", **env}, check=True)
    return output.read_text()


KEPT = {
    "an exit handler": "atexit.register(print, 'kept')",
    "an exit handler of threads": "threading._register_atexit(print, 'kept')",
    "a line that is not flushed": "print('kept', end='')",
    "a line that is not flushed, in an output that is not used any more": "print('kept'); sys.stdout = sys.stderr",
    "a line in the buffer of the C library": "ctypes.CDLL(None).printf(b'kept')",
    "a file that a module keeps open": "import own; own.file = open('/dev/fd/3', 'a'); own.file.write('kept')",
    "a destructor of an object in a module": "import own; own.kept = own.Prints()",
    "a destructor in a module that is still used": "import own; own.kept = own.Prints(); os.mine = own",
    "a destructor that needs other names of a module that is still used": "import own; own._kept = own.Needs(); os.mine = own",
    "a destructor in the main module": "import own; own.kept = own.Prints(); sys.modules['__main__'] = os.mine = own",
    "an extension module of Python": "import cmath; print('kept')",
    "a destructor of an object in a cycle": "import own; cycle = [own.Prints()]; cycle.append(cycle); del cycle",
}


OWN = """
import io, sys
text = "kept"
class Prints:
    def __del__(self, text=text): print(text)
class Needs:
    def __del__(self): print(text)
class Exits(io.TextIOBase):
    def writable(self): return True
    def flush(self): sys.exit(3)
def generate(write=print):
    try: yield
    finally: write("kept")
"""


@pytest.mark.parametrize("code", KEPT.values(), ids=[*KEPT])
def test_what_pythons_shutdown_would_write_is_written_and_exit_handlers_of_c_do_not_run(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    printed = fork(tmp_path, code)
    assert printed.count("kept") == 1 and "exit code 7" in printed
    assert "exit handler of C" not in printed


LEFT_TO_PYTHON = {
    "a thread": "threading.Thread(target=lambda: (__import__('time').sleep(0.2), print('kept'))).start()",
    "a daemon thread": "threading.Thread(target=__import__('time').sleep, args=(60,), daemon=True).start(); print('kept')",
    "a native library": "import numpy; print('kept')",
    "a native library of an exit handler": "atexit.register(lambda: (__import__('numpy'), print('kept')))",
    "a file that an inherited module keeps open": "os.mine = open('/dev/fd/3', 'a'); os.mine.write('kept')",
    "a destructor of an object that an inherited module holds": "import own; os.mine = own.Prints()",
    "a generator that an inherited module holds": "import own; os.mine = own.generate(); next(os.mine)",
    "a file that ends the process when it is flushed": "import own; os.mine = own.Exits(); print('kept')",
    "a file that cannot be flushed": "os.mine = open('/dev/full', 'w'); os.mine.write('x'); print('kept')",
}


@pytest.mark.parametrize("code", LEFT_TO_PYTHON.values(), ids=[*LEFT_TO_PYTHON])
def test_python_shuts_down_by_itself_where_something_could_be_lost(tmp_path: Path, code: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    printed = fork(tmp_path, code)
    assert "kept" in printed and "exit handler of C" in printed and "exit code 7" in printed


def test_preloaded_library_may_have_exit_handlers(tmp_path: Path) -> None:
    assert "exit handler of C" in fork(tmp_path, "", LD_PRELOAD="libc.so.6")


def test_ratchets_own_threads_may_run(tmp_path: Path) -> None:
    code = "import time; threading.Thread(target=time.sleep, args=(60,), daemon=True, name='ratchet-own').start()"
    printed = fork(tmp_path, code)
    assert "exit handler of C" not in printed and "exit code 7" in printed
