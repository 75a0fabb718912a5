"""``serve`` runs the API, by default with a reconciler in the same process; ``reconcile`` runs a reconciler alone."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from pydantic import ValidationError

from ratchet_contract.api.fleet import ParkedView
from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import parent_death
from ratchet_contract.protocol.messages import ServiceFile
from ratchet_service.api.health_server import serve_health
from ratchet_service.api.server import Server, Shutdown, handle_signals
from ratchet_service.app import create_app
from ratchet_service.commands.backup import database_url
from ratchet_service.config.network import FIRST_TOKEN, Listening, read_ca_certificates
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, first_line, redacted_url
from ratchet_service.db.migrate import MigrationBlocked
from ratchet_service.db.models import ApiToken
from ratchet_service.errors import StartError
from ratchet_service.isolation import run_as
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import Launchers
from ratchet_service.launchers.registry import load as load_launchers
from ratchet_service.observability import disk_space
from ratchet_service.observability.health import Health
from ratchet_service.observability.metrics import Instruments
from ratchet_service.preflight.paths import Roots
from ratchet_service.reconciler.loop import LEASE_SECONDS, Reconciler
from ratchet_service.scheduling import slot_host_lease
from ratchet_service.scheduling.machine import Machine, detect_machine, read_machine, write_machine
from ratchet_service.scheduling.scheduler import Preemption
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.trackers.export import Exporter
from ratchet_service.trackers.open import open_sinks
from ratchet_service.usecases.trackers import job_facts
from ratchet_service.user_code.interpreter_probe import Interpreters
from ratchet_service.webhooks.deliver import Deliverer
from ratchet_service.webhooks.send import Sender

log = logging.getLogger(__name__)

_ROUND_SECONDS: Final = 10.0
"""Seconds that the reconciler's current round gets at a clean shutdown; after that, its leases are left to expire."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``serve``. ``reconcile``: also run a reconciler. ``launchers``: replaces those of the launchers file, for
    tests."""

    settings: Settings
    listen: Listening = field(default_factory=Listening)
    cpu_slots: int | None = None
    reconcile: bool = True
    launchers: Launchers | None = None
    preemption: Preemption = field(default_factory=Preemption)
    drain_seconds: float = 0.0
    """Seconds between SIGTERM, from which on ``/readyz`` is 503, and the end of listening, so that load balancers can react."""


def serve(options: ServeOptions) -> None:
    """Run the API, and with ``options.reconcile`` a reconciler, until SIGTERM or SIGINT. Running agents continue after the
    shutdown. Raises ``StartError``."""
    settings, listen = options.settings, options.listen
    listen.check()
    _require_tokens_with_run_as(settings, listen)
    tls, sinks = listen.tls_context(), open_sinks(settings)
    make_home(settings.home)
    with _hold_service_lock(settings), listen.bind() as bound:
        prepare_job_user(settings)
        database = open_database(settings)
        try:
            settings = with_access_defaults(settings, tokens_required=listen.requires_tokens(database.is_sqlite))
            write_ca_certificates(settings.paths, listen)
            launchers = options.launchers or open_launchers(settings)
            _log_job_user(settings, launchers)
            machine = machine_of_jobs(settings, launchers if options.reconcile else Launchers({}), options.cpu_slots)
            instruments, reconciler = Instruments(), None
            if options.reconcile:
                instruments.show_parked(partial(count_parked, launchers))
                instruments.view_parked = partial(_view_parked, launchers)
                acquire_slots(database, launchers)
                reconciler = Reconciler(
                    database,
                    settings.paths,
                    launchers,
                    machine.capacity,
                    preemption=options.preemption,
                    bounds=settings.bounds,
                    instruments=instruments,
                )
            submission = LocalSubmission(
                settings.paths,
                machine,
                launchers,
                reconciler.wake if reconciler else None,
                reconciler_here=options.reconcile and machine.is_this_machine,
                roots=Roots(settings.home, settings.code_roots, settings.uri_roots),
                sandbox=settings.sandbox,
                trackers=settings.trackers,
            )
            url = listen.service_url(bound)
            _log_auth_mode(settings, listen, url, database)
            health = Health(heartbeat=reconciler.heartbeat if reconciler else None)
            app = create_app(settings, submission, database, health, instruments)
            on_drain = reconciler.stop if reconciler else lambda: None
            server = Server(app, settings.paths, url, tls, Shutdown(health, options.drain_seconds, on_drain))
            deliverer = Deliverer(database, Sender(settings.webhook_networks))
            exporter = Exporter(database, sinks, job_facts(settings.paths))
            if sinks:
                log.info("metrics are exported to %s", ", ".join(settings.trackers))
            with (
                instruments.count_commits(database),
                handle_signals(server),
                _run_reconciler(reconciler),
                deliverer.running(),
                exporter.running(),
            ):
                parent_death.end_with_parent(os.environ)
                server.run(sockets=[bound])
        finally:
            database.dispose()
    log.info("ended; running agents continue, and are found again at the next start")


def make_home(home: Path) -> None:
    """Create the run directory if it does not exist, and in it a ``.gitignore`` by which git ignores it."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError), (home / ".gitignore").open("x", encoding="utf-8") as file:
        file.write("*\n")


def reconcile(
    settings: Settings,
    cpu_slots: int | None,
    preemption: Preemption | None = None,
    metrics: Listening | None = None,
) -> None:
    """Run only a reconciler until SIGTERM or SIGINT. ``metrics``: where its metrics and health are served; None: they are not
    served. Raises ``StartError``."""
    make_home(settings.home)
    prepare_job_user(settings)
    database = open_database(settings)
    try:
        launchers = open_launchers(settings)
        machine = machine_of_jobs(settings, launchers, cpu_slots)
        _log_job_user(settings, launchers)
        acquire_slots(database, launchers)
        instruments = Instruments()
        instruments.show_parked(partial(count_parked, launchers))
        reconciler = Reconciler(
            database, settings.paths, launchers, machine.capacity, preemption=preemption, bounds=settings.bounds,
            instruments=instruments,
        )  # fmt: skip
        health = Health(heartbeat=reconciler.heartbeat)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda sig, _: _stop(sig, reconciler, health))
        if machine.is_this_machine:  # otherwise the agent host has written its own
            write_machine(settings.home, machine, _torch_has_cuda(machine, settings))
        log.info(
            "reconciling for %s; %d GPUs, %d CPU slots", ", ".join(launchers), len(machine.gpus), machine.capacity.cpus
        )
        with instruments.count_commits(database), serve_health(metrics, health, database, settings.paths, instruments):
            reconciler.run()
    finally:
        database.dispose()
    log.info("ended; running agents continue")


def _stop(sig: int, reconciler: Reconciler, health: Health) -> None:
    """Handle a signal: begin to stop the reconciler. A second signal ends the process at once."""
    if health.stopping:
        os._exit(128 + sig)
    health.stopping = True
    # another thread: this one, interrupted by the signal, may hold the lock that ``reconciler.stop`` takes
    threading.Thread(target=reconciler.stop, name="stop").start()


def machine_of_jobs(settings: Settings, launchers: Launchers, cpu_slots: int | None) -> Machine:
    """Return the machine of local jobs: this one, or the one that an agent host has recorded. Raises ``StartError``."""
    if uses_agent_host(launchers):
        found = read_machine(settings.home)
        if found is None:
            raise StartError(
                f"no agent host has run in {settings.home} yet, but in the launchers file local jobs need one: start "
                "`ratchet agent-host` with the same --home first"
            )
        return replace(found, cpu_slots=cpu_slots or found.cpu_slots)
    try:
        return detect_machine(cpu_slots)
    except ValueError as error:
        raise StartError(str(error)) from None


def count_parked(launchers: Launchers) -> int:
    """Return how many agents are parked here with all their imports made."""
    return sum(launcher.standby.ready for launcher in launchers.values() if isinstance(launcher, LocalLauncher))


def _view_parked(launchers: Launchers) -> ParkedView | None:
    """Return the number and memory of the agents that are parked here; None without a local launcher here."""
    views = [launcher.standby.view for launcher in launchers.values() if isinstance(launcher, LocalLauncher)]
    return next(iter(views), None)


def uses_agent_host(launchers: Launchers) -> bool:
    """True if an agent host starts the agents of local jobs."""
    return "local" in launchers and not launchers["local"].same_files


def open_launchers(settings: Settings) -> Launchers:
    """Return the launchers that the launchers file names; without such a file, ``local`` alone. Raises ``StartError``."""
    try:
        return load_launchers(settings.paths, settings.launchers_file, settings.sandbox, settings.standby)
    except ValueError as error:
        raise StartError(str(error)) from None


def prepare_job_user(settings: Settings) -> None:
    """Prepare the run directory for the jobs' user (``run_as.prepare_run_directory``). Raises ``StartError``."""
    url = database_url(settings)
    database = Path(url.database) if url.drivername.startswith("sqlite") and url.database is not None else None
    try:
        run_as.prepare_run_directory(settings.paths, settings.user, database)
    except OSError as error:
        raise StartError(f"{settings.home} cannot be prepared for --run-as: {error}") from None


def _log_job_user(settings: Settings, launchers: Launchers) -> None:
    """Log the user of ``--run-as``, if it is set; otherwise warn if jobs of this machine run as root."""
    if settings.user is not None:
        log.info(
            "agents, ranks and checks of users' code run as %s for all owners: one owner's code can read and change "
            "another's jobs (docs/security.md). That user's limit is %s processes, threads included",
            settings.user,
            settings.user_limits.processes,
        )
    elif os.geteuid() == 0 and any(launcher.slots and launcher.same_files for launcher in launchers.values()):
        log.warning(
            "the service runs as root, and so does the code of every job of the local launcher: --run-as USER --auth token gives "
            "it a user of its own"
        )


def acquire_slots(database: Database, launchers: Launchers) -> None:
    """On PostgreSQL, take the lease of the slots for this host, if a launcher has slots. May block. Raises ``StartError`` if
    another host holds it."""
    kinds = [kind for kind, launcher in launchers.items() if launcher.slots]
    other = slot_host_lease.acquire_or_other_host(database, LEASE_SECONDS) if kinds else None
    if other is not None:
        raise StartError(
            f"a reconciler on {other} manages the slots of this database, and all slots must be on one machine: the launcher "
            f"{', '.join(kinds)} cannot run here as well. Stop that reconciler first, give this one a launchers "
            "file without "
            f"{', '.join(kinds)}, or a database of its own"
        )


def open_database(settings: Settings) -> Database:
    """Open the database and migrate it to this version's schema. Blocks while another process migrates. Raises ``StartError``."""
    try:
        database = Database(settings.url)
    except ValueError as error:
        raise StartError(str(error)) from None
    try:
        migrate.upgrade(database)
    except (migrate.NewerSchema, migrate.UnsupportedSchema, MigrationBlocked) as error:
        database.dispose()
        raise StartError(error.detail) from None
    except Exception as error:
        database.dispose()
        shown = redacted_url(database.url)
        raise StartError(f"the database {shown} cannot be opened or brought up to date: {first_line(error)}") from error
    disk_space.reserve_space(database)
    return database


@contextmanager
def _run_reconciler(reconciler: Reconciler | None) -> Iterator[None]:
    """Run the reconciler, if there is one, in a thread during the block, and stop it at the end."""
    if reconciler is None:
        yield
        return
    thread = threading.Thread(target=reconciler.run, name="reconciler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        reconciler.stop()
        thread.join(_ROUND_SECONDS)
        if thread.is_alive():
            log.warning("a round of the reconciler was interrupted; its leases expire in %g s", LEASE_SECONDS)


@contextmanager
def _hold_service_lock(settings: Settings) -> Iterator[None]:
    """Hold the run directory's lock during the block, with SQLite only. Raises ``StartError`` if a service holds it already."""
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
                f"a service already runs in {paths.home}{other}: use it, stop it, or set another --home"
            ) from None
        yield


def with_access_defaults(settings: Settings, *, tokens_required: bool) -> Settings:
    """Return ``settings`` with ``tokens_required``. ``code_roots`` and ``uri_roots`` that are None (all allowed) become empty
    (none allowed) if tokens are required. ``code_roots`` that are None become empty also if jobs run as a separate user."""
    is_restricted = tokens_required or settings.user is not None
    roots = settings.code_roots if settings.code_roots is not None or not is_restricted else ()
    uris = settings.uri_roots if settings.uri_roots is not None or not tokens_required else ()
    return replace(settings, tokens_required=tokens_required, code_roots=roots, uri_roots=uris)


def write_ca_certificates(paths: HomePaths, listen: Listening) -> None:
    """Write the file of certificate authorities by which agents verify the service; delete it if none is
    configured. Raises ``StartError``."""
    if listen.ca_file is None:
        paths.service_authorities.unlink(missing_ok=True)
    else:
        write_atomic(paths.service_authorities, read_ca_certificates(listen.ca_file).encode("ascii"), durable=False)


def _require_tokens_with_run_as(settings: Settings, listen: Listening) -> None:
    """Raise ``StartError`` if jobs run as a separate user without tokens: their code would have the role admin."""
    if settings.user is not None and not listen.requires_tokens(settings.url.startswith("sqlite")):
        raise StartError(
            f"--run-as {settings.user.name}: without tokens the code of jobs, which can connect to {listen.host} like any "
            "process on this machine, would have the role admin: add --auth token (or RATCHET_AUTH=token); then "
            f"`{FIRST_TOKEN}`, with the same --home and database, creates the first token"
        )


def _log_auth_mode(settings: Settings, listen: Listening, url: str, database: Database) -> None:
    """Log whether tokens are needed at ``url``, and warn of exposed plain HTTP and of a database without tokens."""
    if not settings.tokens_required:
        log.info(
            "no token needed: any process on this machine that connects to %s has the role admin; set --auth token to "
            "require tokens",
            url,
        )
        return
    log.info("tokens are needed at %s", url)
    if listen.insecure_http and listen.is_exposed:
        log.warning(
            "%s uses plain HTTP: tokens can be read from its traffic, unless a proxy in front terminates TLS", url
        )
    with database.read() as session:
        if session.scalar(sa.select(ApiToken.id).limit(1)) is None:
            log.warning("there is no token yet: %s, with the same --home and database, creates the first", FIRST_TOKEN)


def _torch_has_cuda(machine: Machine, settings: Settings) -> bool:
    """True if torch of the machine's interpreter is known to have CUDA. Starts that interpreter, and blocks."""
    return Interpreters(settings.sandbox).query(machine.python).torch_cuda
