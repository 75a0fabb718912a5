"""Fixtures for all tests."""

import gc
import os
import signal
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

# Parked agents take cores and memory: only tests of theirs have some.
os.environ.setdefault("RATCHET_STANDBY", "off")

# OpenMP's threads spin while they wait for each other, which takes most of the time of processors that are busy anyway. Set
# before torch is imported, and what starts processes.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")

import pytest

from ratchet_service.db.engine import Database
from ratchet_worker.host.cpu import gc_disabled
from tests.support import fork_server
from tests.support.api import api, api_server
from tests.support.cli import cli
from tests.support.control_plane import Plane
from tests.support.databases import ENGINES, database, migrated_database, postgres_url
from tests.support.gloo_ranks import Ranks
from tests.support.launch import jobs
from tests.support.server import idle_server, server, token_required_server

__all__ = [
    "api",
    "api_server",
    "cli",
    "database",
    "idle_server",
    "jobs",
    "migrated_database",
    "postgres_url",
    "server",
    "token_required_server",
]


def pytest_configure(config: pytest.Config) -> None:
    """Tests that a script starts in the background ignore SIGINT, and under nohup SIGHUP. Every command that they start and
    interrupt would ignore it too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        fork_server.export_fork_server_addresses()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests of both databases, and those of the API, take turns: by their names, one half runs on SQLite, the other one on
    PostgreSQL. RATCHET_TEST_DATABASES=all, or tests chosen by name: each runs on both."""
    chosen = config.option.keyword or any("::" in argument for argument in config.args)
    if chosen or os.environ.get("RATCHET_TEST_DATABASES") == "all":
        return
    every, left = {item.nodeid for item in items}, []
    for item in items:
        api_test = "integration/service/api" in item.path.as_posix()
        turns = api_test or item.get_closest_marker("takes_turns")
        if isinstance(item, pytest.Function) and turns and not item.get_closest_marker("both_databases"):
            ours, other = ENGINES if zlib.crc32(item.originalname.encode()) % 2 else reversed(ENGINES)
            if other in item.nodeid and item.nodeid.replace(other, ours) in every:
                left.append(item)
    if left:
        gone = {id(item) for item in left}
        items[:] = [item for item in items if id(item) not in gone]
        config.hook.pytest_deselected(items=left)


@contextmanager
def environment_restored() -> Iterator[None]:
    """Imports set variables (scikit-learn's sets KMP_INIT_AT_FORK). What is started with others than the forking processes were
    is not forked but started afresh: seconds of a core, for every rank and every command of all later tests."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported here stays: looking through it again and again took half of the time of every worker's collection."""
    with gc_disabled(), environment_restored():
        yield
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with environment_restored():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _no_configuration_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server or a token that the person who runs the tests has set, and a service that runs, must reach no test, and no test
    their home. Each service of a test has a run directory that its clients name: none is to be found in any other way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_CONFIG", str(tmp_path_factory.mktemp("config") / "none.json"))
        for name in ("RATCHET_SERVER", "RATCHET_TOKEN"):
            patch.delenv(name, raising=False)
        runtime = tmp_path_factory.mktemp("runtime")
        (runtime / "ratchet").touch()  # so that no service of a test can leave a pointer to itself there
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        yield


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """One gloo group for all tests of a module: a rank's start costs more than most of them."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    """An API on the test's database; who needs it otherwise makes its own."""
    made = Plane(tmp_path, database)
    made.serve_api()
    yield made
    made.close()


@pytest.fixture
def no_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is copied at the step boundary because of its size: tests of later copies need no large ones."""
    monkeypatch.setattr("ratchet_worker.checkpoint.host_copy._SMALL_BYTES", 0)
