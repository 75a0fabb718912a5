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

from ratchet_service.confined import User

UID: Final = 48213
USER: Final = User(UID, UID, (UID,), "/", str(UID))
AS_ROOT: Final = pytest.mark.skipif(
    os.geteuid() != 0, reason="not root: only root starts processes as another user (run the tests as root)"
)


def closed_on_the_way(path: Path) -> Path | None:
    """The first directory above ``path`` that keeps others out."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def through(scratch: Path) -> tuple[str, ...]:
    """The beginning of a command that runs where the interpreter can be reached by everybody; skips where that cannot be had."""
    base = Path(sys.base_prefix)
    closed = closed_on_the_way(base / "bin")
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
