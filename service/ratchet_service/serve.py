"""``python -m ratchet_service serve``: API and reconciler in one process, over an already bound socket."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths
from ratchet_service import disk, migrate
from ratchet_service.app import create_app
from ratchet_service.database import Database, utc_now
from ratchet_service.interpreters import Interpreters
from ratchet_service.launchers.table import Launchers
from ratchet_service.launchers.table import load as load_launchers
from ratchet_service.machine import Machine, probe, write_machine
from ratchet_service.reconciler import Reconciler
from ratchet_service.settings import Settings
from ratchet_service.submission import LocalSubmission

log = logging.getLogger(__name__)

_GRACE: Final = 3
"""Seconds that open requests (followers of logs and events) get at a clean end."""


class StartError(Exception):
    """The service cannot start; the text says what to do."""


@dataclass(frozen=True)
class ServeOptions:
    """``url``: what ``service.json`` tells agents, where the bound address is not how they reach it. ``launchers``: others
    than those of the launchers file, for tests."""

    settings: Settings
    host: str = "127.0.0.1"
    port: int = 0
    cpu_slots: int | None = None
    reconcile: bool = True
    allow_remote: bool = False
    url: str | None = None
    launchers: Launchers | None = None


def serve(options: ServeOptions) -> None:
    """Run until SIGTERM or SIGINT. Raises ``StartError``. Agents are not touched by the end: training goes on."""
    settings = options.settings
    _check_host(options)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _only_one(settings.paths), _bound_socket(options.host, options.port) as bound:
        database = open_database(settings)
        try:
            launchers = options.launchers or open_launchers(settings)
            machine = probe(options.cpu_slots)
            reconciler = None
            if options.reconcile:
                reconciler = Reconciler(database, settings.paths, launchers, machine.capacity)
            ports = LocalSubmission(
                settings.paths, machine, launchers, reconciler.wake if reconciler else None, here=options.reconcile
            )
            url = options.url or _url(bound)
            _warn_remote(options, url)
            server = _Server(create_app(settings, ports, database), settings.paths, url)
            with _signals(server), _running(reconciler):
                server.run(sockets=[bound])
        finally:
            database.dispose()
    log.info("ended; agents that were running go on, and are found again at the next start")


def reconcile(settings: Settings, cpu_slots: int | None) -> None:
    """Run a reconciler alone until SIGTERM or SIGINT. Several may run side by side. Raises ``StartError``."""
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = open_database(settings)
    try:
        machine = probe(cpu_slots)
        launchers = open_launchers(settings)
        reconciler = Reconciler(database, settings.paths, launchers, machine.capacity)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: reconciler.stop())
        write_machine(settings.home, machine, _torch_has_cuda(machine))
        log.info(
            "reconciling for %s; %d GPUs, %d CPU slots", ", ".join(launchers), len(machine.gpus), machine.capacity.cpus
        )
        reconciler.run()
    finally:
        database.dispose()
    log.info("ended; agents that were running go on")


def open_launchers(settings: Settings) -> Launchers:
    """Those of the launchers file. Raises ``StartError``."""
    try:
        return load_launchers(settings.paths, settings.launchers_file)
    except ValueError as error:
        raise StartError(str(error)) from None


def open_database(settings: Settings) -> Database:
    """Open and migrate. Raises ``StartError``."""
    try:
        database = Database(settings.url)
    except ValueError as error:
        raise StartError(str(error)) from None
    try:
        migrate.upgrade(database)
    except Exception as error:
        database.dispose()
        shown = database.url.render_as_string(hide_password=True)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartError(f"the database {shown} cannot be opened or brought up to date: {first}") from error
    disk.reserve(database)
    return database


class _Server(uvicorn.Server):
    """Writes ``service.json`` once requests are answered, and takes it away at a clean end if it is still its own."""

    def __init__(self, app: FastAPI, paths: HomePaths, url: str) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE, server_header=False
        )
        super().__init__(config)
        self._paths = paths
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            write_service_file(self._paths.service_file, self._url)
            log.info("listening on %s", self._url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        remove_service_file(self._paths.service_file)
        await super().shutdown(sockets)


def write_service_file(path: Path, url: str) -> None:
    """By rename, readable by the owner alone."""
    content = ServiceFile(url=url, pid=os.getpid(), started_at=utc_now().isoformat()).model_dump_json()
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".service-")  # mode 0600
    with os.fdopen(fd, "w") as handle:
        handle.write(content)
    Path(temporary).rename(path)


def remove_service_file(path: Path) -> None:
    """Only if it names this process: a later service may have written its own."""
    with suppress(OSError, ValidationError):
        if ServiceFile.model_validate_json(path.read_bytes()).pid == os.getpid():
            path.unlink()


@contextmanager
def _signals(server: _Server) -> Iterator[None]:
    """uvicorn raises the signal that ended it once more after its clean end, which would be a death by signal: it lands here."""

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _running(reconciler: Reconciler | None) -> Iterator[None]:
    """The reconciler in a thread of its own while the block runs."""
    if reconciler is None:
        yield
        return
    thread = threading.Thread(target=reconciler.run, name="reconciler")
    thread.start()
    try:
        yield
    finally:
        reconciler.stop()
        thread.join()


@contextmanager
def _only_one(paths: HomePaths) -> Iterator[None]:
    """One service per run directory. Raises ``StartError``."""
    with (paths.home / "service.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = ""
            with suppress(OSError, ValidationError):
                found = ServiceFile.model_validate_json(paths.service_file.read_bytes())
                other = f" (pid {found.pid}, {found.url})"
            raise StartError(
                f"a service runs in {paths.home} already{other}: use that one, end it, or give another --home"
            ) from None
        yield


@contextmanager
def _bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Bound before anything else is done, so that nobody can take the port meanwhile. Raises ``StartError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartError(f"{host!r} is no address of this machine: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
            bound.listen(socket.SOMAXCONN)
        except OSError as error:
            raise StartError(
                f"cannot listen on {host} port {port}: {error.strerror}; end what uses it, or give --port 0 for a free port"
            ) from None
        yield bound


def _check_host(options: ServeOptions) -> None:
    if not options.allow_remote and not _is_loopback(options.host):
        raise StartError(
            f"{options.host} can be reached from other machines, and there is no authentication yet: anybody there could run "
            "code here. Keep 127.0.0.1, or give --allow-remote behind a proxy or network that you trust"
        )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # binding will say what is wrong
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _warn_remote(options: ServeOptions, url: str) -> None:
    if not _is_loopback(options.host):
        log.warning(
            "%s is open to other machines and there is NO authentication: whoever reaches it can run code here", url
        )


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family is socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _torch_has_cuda(machine: Machine) -> bool:
    return Interpreters().ask(machine.python).torch_cuda
