"""A user for jobs' code, with numbers that no account of the machine has, and a machine that lets it through to the interpreter.

Temporary directories of tests are their owner's alone, and so may be the directory of the interpreter (``/root``): the run
directory lies in one that is open, and the service has a mount namespace in which the interpreter can be reached, nothing else.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs
from ratchet_service.isolation.sandbox import Command, Limits, Sandbox, User
from tests.support.server import processes_below, wait_for

UID: Final = 48213
USER: Final = User(UID, UID, (UID,), "/", str(UID))
AS_ROOT: Final = pytest.mark.skipif(
    os.geteuid() != 0, reason="not root: only root starts processes as another user (run the tests as root)"
)


def first_inaccessible_parent(path: Path) -> Path | None:
    """The first directory above ``path`` that keeps others out."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def command_prefix(scratch: Path) -> tuple[str, ...]:
    """The beginning of a command that runs where the interpreter can be reached by everybody; skips where that cannot be had."""
    base = Path(sys.base_prefix)
    closed = first_inaccessible_parent(base / "bin")
    if closed is None:
        return ()
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{closed} keeps others from the interpreter, and no mount namespace can be made (CAP_SYS_ADMIN)")
    kept = scratch / "interpreter"
    kept.mkdir(exist_ok=True)
    words = {name: shlex.quote(str(path)) for name, path in (("base", base), ("kept", kept), ("closed", closed))}
    script = (
        "set -e; mount --bind {base} {kept}; mount -t tmpfs -o mode=755 tmpfs {closed}; mkdir -p {base}; "
        'mount --bind {kept} {base}; exec "$@"'
    ).format(**words)
    return (unshare, "-m", "sh", "-c", script, "sh")


@contextmanager
def open_directory() -> Iterator[Path]:
    """A temporary directory that others may look into, gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="run-as-"))
    root.chmod(0o755)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def open_home() -> Iterator[HomePaths]:
    """A run directory made ready for ``USER``; afterwards no process that names it is alive."""
    with open_directory() as root:
        paths = HomePaths(root / "home")
        for folder in (paths.home, paths.jobs):
            folder.mkdir(mode=0o711)
            folder.chmod(0o711)
        paths.run_as_file.touch()
        yield paths
        for pid in processes_below(root):
            procfs.kill(pid)
        wait_for(lambda: not processes_below(root), "the test's processes to go", 10)


TELL: Final = "cat /proc/self/status; env; pwd; ulimit -Hn; ulimit -Hd; ulimit -Ht"


def shell_output(confined: Sandbox, environ: dict[str, str], limits: Limits | None = None, script: str = TELL) -> str:
    """What a shell started so says of itself."""
    with confined.command(["/bin/sh", "-c", script], environ, limits, cwd="/") as started:
        return run_command(started)


def run_command(started: Command) -> str:
    done = subprocess.run(
        started.argv, env=started.env, pass_fds=started.fds, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def parse_proc_status(text: str) -> dict[str, list[str]]:
    """Of ``/proc/PID/status``, words by name."""
    rows = (line.partition(":") for line in text.splitlines())
    return {key: value.split() for key, _, value in rows}
