"""A program that is forked is as one that was started afresh, as far as it and others can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import FORKS
from tests.support.fork_server import SERVICES, Program
from tests.support.server import wait_for

FACTS = """
import json, os, pathlib, resource, signal, sys, threading
facts = {
    "variables": dict(os.environ), "arguments": [sys.argv, sys.orig_argv], "path": sys.path, "main": __name__,
    "leader": os.getsid(0) == os.getpgid(0) == os.getpid(), "directory": os.getcwd(), "mask": os.umask(0o22),
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd")[:-1]),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "handlers": {n: getattr(h := signal.getsignal(n), "__qualname__", str(h)) for n in range(1, 32)},
    "threads": len(os.listdir("/proc/self/task")), "main thread": threading.main_thread().native_id == os.getpid(),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "shown": [sorted(filter(None, pathlib.Path("/proc/self", what).read_bytes().decode().split(chr(0))))
              for what in ("cmdline", "environ")],
}
print(json.dumps(facts), flush=True)
sys.exit(sys.argv[1] == "wrong" and "said why" or int(sys.argv[1]))
"""
WAITS = "import time; print('here', flush=True); time.sleep(600)"


def _start(directory: Path, text: str, *arguments: str, afresh: bool = False, **variables: str) -> tuple[Any, Path]:
    program, log = directory / "program.py", directory / "log"
    program.write_text(text)
    command, env = [sys.executable, "-P", str(program), *arguments], os.environ | {"OWN": "its value"} | variables
    with log.open("wb") as file:
        if afresh:
            return subprocess.Popen(
                command,
                env=env,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            ), log
        return SERVICES.start(command, file.fileno(), env=env, cwd=directory), log


def test_forked_program_behaves_like_newly_started_program(tmp_path: Path) -> None:
    found = []
    for afresh in (True, False):
        process, log = _start(tmp_path, FACTS, "7", "--an", "argument", afresh=afresh)
        assert process.wait(60) == 7, log.read_text()
        assert isinstance(process, Program) is not afresh
        found.append(json.loads(log.read_text()))
    assert found[0] == found[1]
    assert found[1]["variables"]["OWN"] == "its value" and "OWN=its value" in found[1]["shown"][1]


def test_forked_program_reports_exit_code_and_signal(tmp_path: Path) -> None:
    process, log = _start(tmp_path, FACTS, "wrong")
    assert process.wait(60) == 1 and log.read_text().endswith("said why\n")
    process, log = _start(tmp_path, "raise ValueError('wrong')")
    assert process.wait(60) == 1 and "ValueError: wrong" in log.read_text()
    process, log = _start(tmp_path, WAITS)
    wait_for(lambda: log.read_text() == "here\n", "the program to run")
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_program_with_sitecustomize_is_started_without_fork(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('at the start', flush=True)")
    process, log = _start(tmp_path, "print('then')", PYTHONPATH=str(tmp_path))
    assert process.wait(60) == 0 and log.read_text() == "at the start\nthen\n"
    assert not isinstance(process, Program)


@pytest.mark.parametrize("time", ["first", "second"])
def test_variables_set_by_imports_do_not_leak_into_later_programs(time: str) -> None:
    """Neither those of collecting all tests nor those of a test: else what is started would be started afresh, in silence."""
    assert FORKS.can_fork(os.environ), "since the tests' process began, variables were set"
    os.environ["KMP_INIT_AT_FORK"] = "FALSE"  # as scikit-learn does
    assert not FORKS.can_fork(os.environ)
