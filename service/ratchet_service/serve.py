"""``python -m ratchet_service serve``: API and reconciler in one process, over an already bound socket."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from pydantic import ValidationError

from ratchet_contract import parent_death
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths
from ratchet_service import disk, migrate, slot_host, worker_user
from ratchet_service.app import create_app
from ratchet_service.database import Database, first_line, printable
from ratchet_service.health import Health
from ratchet_service.http_server import Ending, Server, signals
from ratchet_service.instruments import Instruments
from ratchet_service.interpreters import Interpreters
from ratchet_service.launchers.table import Launchers
from ratchet_service.launchers.table import load as load_launchers
from ratchet_service.listening import FIRST_TOKEN, Listening, StartError, read_authorities
from ratchet_service.machine import Machine, probe, read_machine, write_machine
from ratchet_service.metrics_port import telling
from ratchet_service.migrate_locks import MigrationBlocked
from ratchet_service.models import ApiToken
from ratchet_service.queueing import Preemption
from ratchet_service.reconciler import LEASE_SECONDS, Reconciler
from ratchet_service.roots import Roots
from ratchet_service.settings import Settings
from ratchet_service.submission import LocalSubmission

log = logging.getLogger(__name__)

_ROUND: Final = 10.0
"""Seconds that the reconciler's round under way gets at a clean end; then its leases are left to expire."""


@dataclass(frozen=True)
class ServeOptions:
    """``launchers``: others than those of the launchers file, for tests. Whether tokens are needed, and what a spec may name
    where the settings leave it open, follows from ``listen`` and the database."""

    settings: Settings
    listen: Listening = field(default_factory=Listening)
    cpu_slots: int | None = None
    reconcile: bool = True
    launchers: Launchers | None = None
    preemption: Preemption = field(default_factory=Preemption)
    drain: float = 0.0
    """Seconds between SIGTERM, from which on ``/readyz`` is 503, and the end of listening: for whoever routes requests here."""


def serve(options: ServeOptions) -> None:
    """Run until SIGTERM or SIGINT. Raises ``StartError``. Agents are not touched by the end: training goes on."""
    settings, listen = options.settings, options.listen
    listen.check()
    _keep_jobs_out(settings, listen)
    tls = listen.tls()
    make_home(settings.home)
    with _alone(settings), listen.bound() as bound:
        settle_user(settings)
        database = open_database(settings)
        try:
            settings = settled(settings, tokens=listen.tokens(database.is_sqlite))
            write_authorities(settings.paths, listen)
            launchers = options.launchers or open_launchers(settings)
            _say_as_whom(settings, launchers)
            machine = machine_of_jobs(settings, launchers if options.reconcile else Launchers({}), options.cpu_slots)
            instruments, reconciler = Instruments(), None
            if options.reconcile:
                take_slots(database, launchers)
                reconciler = Reconciler(
                    database,
                    settings.paths,
                    launchers,
                    machine.capacity,
                    preemption=options.preemption,
                    bounds=settings.bounds,
                    instruments=instruments,
                )
            ports = LocalSubmission(
                settings.paths,
                machine,
                launchers,
                reconciler.wake if reconciler else None,
                here=options.reconcile and machine.here,
                roots=Roots(settings.home, settings.code_roots, settings.uri_roots),
                confined=settings.confined,
            )
            url = listen.address(bound)
            _say_who_may_come_in(settings, listen, url, database)
            health = Health(beat=reconciler.beat if reconciler else None)
            app = create_app(settings, ports, database, health, instruments)
            leave = reconciler.stop if reconciler else lambda: None
            server = Server(app, settings.paths, url, tls, Ending(health, options.drain, leave))
            with instruments.listening(database), signals(server), _running(reconciler):
                parent_death.end_with_parent(os.environ)
                server.run(sockets=[bound])
        finally:
            database.dispose()
    log.info("ended; agents that were running go on, and are found again at the next start")


def make_home(home: Path) -> None:
    """The run directory, which git leaves out of the project that it lies in."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError), (home / ".gitignore").open("x", encoding="utf-8") as file:
        file.write("*\n")


def reconcile(
    settings: Settings,
    cpu_slots: int | None,
    preemption: Preemption | None = None,
    metrics: Listening | None = None,
) -> None:
    """Run a reconciler alone until SIGTERM or SIGINT. Several may run side by side. ``metrics``: where it tells its own, and
    whether it is well. Raises ``StartError``."""
    make_home(settings.home)
    settle_user(settings)
    database = open_database(settings)
    try:
        launchers = open_launchers(settings)
        machine = machine_of_jobs(settings, launchers, cpu_slots)
        _say_as_whom(settings, launchers)
        take_slots(database, launchers)
        instruments = Instruments()
        reconciler = Reconciler(
            database, settings.paths, launchers, machine.capacity, preemption=preemption, bounds=settings.bounds,
            instruments=instruments,
        )  # fmt: skip
        health = Health(beat=reconciler.beat)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda sig, _: _stop(sig, reconciler, health))
        if machine.here:  # else it has told of itself
            write_machine(settings.home, machine, _torch_has_cuda(machine, settings))
        log.info(
            "reconciling for %s; %d GPUs, %d CPU slots", ", ".join(launchers), len(machine.gpus), machine.capacity.cpus
        )
        with instruments.listening(database), telling(metrics, health, database, settings.paths, instruments):
            reconciler.run()
    finally:
        database.dispose()
    log.info("ended; agents that were running go on")


def _stop(sig: int, reconciler: Reconciler, health: Health) -> None:
    """In a signal handler of the thread that reconciles, and may hold the very lock that ``stop`` takes: another thread does it.
    The second signal ends the process at once."""
    if health.stopping:
        os._exit(128 + sig)
    health.stopping = True
    threading.Thread(target=reconciler.stop, name="stop").start()


def machine_of_jobs(settings: Settings, launchers: Launchers, cpu_slots: int | None) -> Machine:
    """What the machine of local jobs has: this one, or the one that an agent host has told of. Raises ``StartError`` where that
    has not run yet, or it cannot be told which GPUs may be lent."""
    if hosted(launchers):
        found = read_machine(settings.home)
        if found is None:
            raise StartError(
                f"no agent host has run in {settings.home} yet, and the launchers file has local jobs started by one: start "
                "`ratchet agent-host` with the same --home first"
            )
        return replace(found, cpu_slots=cpu_slots or found.cpu_slots)
    try:
        return probe(cpu_slots)
    except ValueError as error:
        raise StartError(str(error)) from None


def hosted(launchers: Launchers) -> bool:
    """Does an agent host start the agents of local jobs?"""
    return "local" in launchers and not launchers["local"].same_files


def open_launchers(settings: Settings) -> Launchers:
    """Those of the launchers file. Raises ``StartError``."""
    try:
        return load_launchers(settings.paths, settings.launchers_file, settings.confined)
    except ValueError as error:
        raise StartError(str(error)) from None


def settle_user(settings: Settings) -> None:
    """See ``worker_user.settle``. Raises ``StartError``."""
    database = Path(settings.url.removeprefix("sqlite:///")) if settings.url.startswith("sqlite:///") else None
    try:
        worker_user.settle(settings.paths, settings.user, database)
    except OSError as error:
        raise StartError(f"{settings.home} cannot be prepared for --run-as: {error}") from None


def _say_as_whom(settings: Settings, launchers: Launchers) -> None:
    """Whom users' code runs as; a warning where that is root."""
    if settings.user is not None:
        log.info(
            "agents, ranks, and what is asked of users' code run as %s, of all owners: one owner's code can read and change "
            "another's jobs (docs/security.md). That user has %s processes at the most, threads counted",
            settings.user,
            settings.user_limits.processes,
        )
    elif os.geteuid() == 0 and any(launcher.slots and launcher.same_files for launcher in launchers.values()):
        log.warning(
            "the service runs as root, and so does the code of every job of the local launcher: --run-as USER --auth token gives "
            "it a user of its own"
        )


def take_slots(database: Database, launchers: Launchers) -> None:
    """For this host, where a launcher needs them. Raises ``StartError`` while another host's reconciler lends them."""
    kinds = [kind for kind, launcher in launchers.items() if launcher.slots]
    other = slot_host.other_host(database, LEASE_SECONDS) if kinds else None
    if other is not None:
        raise StartError(
            f"a reconciler on {other} lends the slots of this database, and slots are of one machine: the launcher "
            f"{', '.join(kinds)} cannot run here as well. End that one first, give this one a launchers file without "
            f"{', '.join(kinds)}, or a database of its own"
        )


def open_database(settings: Settings) -> Database:
    """Open and migrate. Raises ``StartError``."""
    try:
        database = Database(settings.url)
    except ValueError as error:
        raise StartError(str(error)) from None
    try:
        migrate.upgrade(database)
    except (migrate.NewerSchema, MigrationBlocked) as error:
        database.dispose()
        raise StartError(error.detail) from None
    except Exception as error:
        database.dispose()
        shown = printable(database.url)
        raise StartError(f"the database {shown} cannot be opened or brought up to date: {first_line(error)}") from error
    disk.reserve(database)
    return database


@contextmanager
def _running(reconciler: Reconciler | None) -> Iterator[None]:
    """The reconciler in a thread of its own while the block runs."""
    if reconciler is None:
        yield
        return
    thread = threading.Thread(target=reconciler.run, name="reconciler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        reconciler.stop()
        thread.join(_ROUND)
        if thread.is_alive():
            log.warning(
                "a round of the reconciler is left where it is; its leases end by themselves in %g s", LEASE_SECONDS
            )


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """One service per run directory with SQLite; with PostgreSQL any number. Raises ``StartError``."""
    paths = settings.paths
    if not settings.url.startswith("sqlite"):
        yield
        return
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


def settled(settings: Settings, *, tokens: bool) -> Settings:
    """Where others than the run directory's owner submit, specs name no directory and no object store that was not allowed. No
    directory either where jobs have a user of their own: it can read the copies that root makes, and may ask for them itself
    where no token is needed."""
    bounded = tokens or settings.user is not None
    roots = settings.code_roots if settings.code_roots is not None or not bounded else ()
    uris = settings.uri_roots if settings.uri_roots is not None or not tokens else ()
    return replace(settings, tokens=tokens, code_roots=roots, uri_roots=uris)


def write_authorities(paths: HomePaths, listen: Listening) -> None:
    """Where agents and the reconciler find by which authorities the service is known; none, no file."""
    if listen.ca_file is None:
        paths.service_authorities.unlink(missing_ok=True)
    else:
        paths.service_authorities.write_text(read_authorities(listen.ca_file), encoding="ascii")


def _keep_jobs_out(settings: Settings, listen: Listening) -> None:
    """Who gives jobs a user of their own does not trust their code, and it reaches every port of this machine. Raises
    ``StartError`` where it would be admin there."""
    if settings.user is not None and not listen.tokens(settings.url.startswith("sqlite")):
        raise StartError(
            f"--run-as {settings.user.name}: without tokens the code of jobs, which reaches {listen.host} like everybody on this "
            "machine, would be admin of the service: add --auth token (or RATCHET_AUTH=token); then "
            f"`{FIRST_TOKEN}`, with the same --home and database, makes the first token"
        )


def _say_who_may_come_in(settings: Settings, listen: Listening, url: str, database: Database) -> None:
    if not settings.tokens:
        log.info(
            "no token needed: whoever reaches %s, from this machine alone, is its owner with the role admin; --auth token asks "
            "for tokens",
            url,
        )
        return
    log.info("tokens are needed at %s", url)
    if listen.insecure_http and listen.open:
        log.warning(
            "%s speaks plain HTTP: whoever sees its traffic has its tokens, unless a proxy in front ends TLS", url
        )
    with database.read() as session:
        if session.scalar(sa.select(ApiToken.id).limit(1)) is None:
            log.warning("there is no token yet: %s, with the same --home and database, makes the first", FIRST_TOKEN)


def _torch_has_cuda(machine: Machine, settings: Settings) -> bool:
    return Interpreters(settings.confined).ask(machine.python).torch_cuda
