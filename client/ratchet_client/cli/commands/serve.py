"""``ratchet serve``, ``reconcile``, ``agent-host`` and ``agent``: replace this process with the service, one of its parts, or
an agent."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import SETUP, settings
from ratchet_contract import env_vars

Home = Annotated[
    Path | None,
    typer.Option(help="Run directory: database, jobs, checkpoints. (default: RATCHET_HOME, else ./.ratchet)"),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(envvar=env_vars.DATABASE_URL, help="SQLAlchemy URL. (default: SQLite in the run directory)"),
]
CpuSlots = Annotated[int | None, typer.Option(min=1, help="CPU cores to give to jobs. (default: all of the machine)")]
Launchers = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Launchers file: which engines jobs may run on. (default: RATCHET_LAUNCHERS, else local alone)",
    ),
]
Preemption = Annotated[
    str | None,
    typer.Option(
        metavar="owner|any|off",
        help="Whose jobs are preempted for a job of higher priority that waits for slots: its owner's, any owner's, none. "
        "(default: owner)",
    ),
]
MinRun = Annotated[
    float | None,
    typer.Option(
        "--preemption-min-run",
        min=0,
        metavar="SECONDS",
        help="Seconds that a job preempted this way trains before it is preempted again. (default: 60)",
    ),
]
RunAs = Annotated[
    str | None,
    typer.Option(
        metavar="USER[:GROUP]",
        help="User that runs local jobs' code; the service must be root, and needs --auth token. (default: RATCHET_RUN_AS, else "
        "the service's own user)",
    ),
]
RunAsLimits = Annotated[
    str | None,
    typer.Option(
        metavar="processes=NUMBER,file_size=SIZE",
        help="Limits of that user, for all jobs together: processes and threads, the size of a file that it writes. "
        "(default: RATCHET_RUN_AS_LIMITS, else half of the machine's processes)",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        metavar="text|json", help="Format of the log on standard error. (default: RATCHET_LOG_FORMAT, else text)"
    ),
]
LogLevel = Annotated[
    str | None, typer.Option(metavar="debug|info|warning|error", help="Level of that log. (default: info)")
]
Bounds = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=NUMBER,...",
        help="Limits on the kept output of a job; docs/limits.md lists the names. (default: RATCHET_BOUNDS)",
    ),
]


def register(app: typer.Typer) -> None:
    for command in (serve, reconcile, agent_host, agent):
        app.command(rich_help_panel=SETUP)(command)


def serve(
    ctx: typer.Context,
    home: Home = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one (found through service.json).")
    ] = 0,
    database_url: DatabaseUrl = None,
    cpu_slots: CpuSlots = None,
    launchers: Launchers = None,
    run_as: RunAs = None,
    run_as_limits: RunAsLimits = None,
    preemption: Preemption = None,
    preemption_min_run: MinRun = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    bounds: Bounds = None,
    no_reconciler: Annotated[
        bool, typer.Option("--no-reconciler", help="Only the API; `ratchet reconcile` runs elsewhere.")
    ] = False,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds after SIGTERM in which requests are still accepted; /readyz is already 503. (default: 0)",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL at which agents reach the service, if not the address it listens on.")
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(
            metavar="auto|token",
            help="auto: no token with SQLite and a loopback address, else every caller needs one; token: every caller needs one, "
            "always. (default: RATCHET_AUTH, else auto)",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate, PEM. (default: RATCHET_TLS_CERT)")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, PEM. (default: RATCHET_TLS_KEY)")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CA certificates with which agents verify it, PEM. (default: RATCHET_CA_FILE, else the system's)",
        ),
    ] = None,
    insecure_http: Annotated[
        bool,
        typer.Option("--insecure-http", help="Allow plain HTTP at a non-loopback address: a proxy terminates TLS."),
    ] = False,
    code_root: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="Directory below which specs may name code and files; may be repeated. (default: RATCHET_CODE_ROOTS; "
            "else any directory if no token is needed and --run-as is not set, else none)",
        ),
    ] = None,
    checkpoint_uri_root: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI",
            help="Likewise, an allowed prefix of checkpoint.uri. (default: RATCHET_CHECKPOINT_URI_ROOTS, else likewise)",
        ),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(min=0.01, max=1e6, help="Maximum requests per second of one caller. (default: 100)")
    ] = None,
) -> None:
    """Run the service (API and reconciler) in the foreground. Ctrl-C ends it; jobs continue, the next service finds them."""
    arguments = [
        "serve",
        *_common_arguments(ctx, home, cpu_slots, launchers, log_format, log_level, bounds, run_as, run_as_limits),
        *_preemption_arguments(preemption, preemption_min_run),
        "--host",
        host,
        "--port",
        str(port),
    ]
    arguments += ["--no-reconciler"] * no_reconciler + ["--insecure-http"] * insecure_http
    given = {"--url": url, "--auth": auth, "--tls-cert": tls_cert, "--tls-key": tls_key, "--ca-file": ca_file,
             "--request-rate": request_rate, "--drain": drain}  # fmt: skip
    for option, value in given.items():
        arguments += [] if value is None else [option, str(value)]
    for option, values in (("--code-root", code_root), ("--checkpoint-uri-root", checkpoint_uri_root)):
        arguments += [part for value in values or () for part in (option, value)]
    exec_module("ratchet_service", "fastapi", "service", arguments, database_url)


def reconcile(
    ctx: typer.Context,
    home: Home = None,
    database_url: DatabaseUrl = None,
    cpu_slots: CpuSlots = None,
    launchers: Launchers = None,
    run_as: RunAs = None,
    run_as_limits: RunAsLimits = None,
    preemption: Preemption = None,
    preemption_min_run: MinRun = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
    bounds: Bounds = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port that serves /metrics, /healthz and /readyz, without a token. (default: none)"
        ),
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address of that port. (default: 127.0.0.1)")] = None,
) -> None:
    """Run only a reconciler, for a service started with --no-reconciler. Several may share one database."""
    arguments = [
        "reconcile",
        *_common_arguments(ctx, home, cpu_slots, launchers, log_format, log_level, bounds, run_as, run_as_limits),
        *_preemption_arguments(preemption, preemption_min_run),
    ]
    for option, value in (("--metrics-port", metrics_port), ("--metrics-host", metrics_host)):
        arguments += [] if value is None else [option, str(value)]
    exec_module("ratchet_service", "fastapi", "service", arguments, database_url)


def agent_host(
    ctx: typer.Context,
    home: Home = None,
    cpu_slots: CpuSlots = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Only start agents, for a reconciler in another process; needs no database. On SIGTERM every job saves and stops."""
    arguments = ["agent-host", *_common_arguments(ctx, home, cpu_slots, None, log_format, log_level)]
    exec_module("ratchet_service", "fastapi", "service", arguments)


def _common_arguments(
    ctx: typer.Context,
    home: Path | None,
    cpu_slots: int | None,
    launchers: Path | None,
    log_format: str | None,
    log_level: str | None,
    bounds: str | None = None,
    run_as: str | None = None,
    run_as_limits: str | None = None,
) -> list[str]:
    """Return the command line arguments of ``ratchet_service`` for the options that several commands have."""
    from ratchet_client.http.discovery import home_directory

    arguments = ["--home", str(home_directory(home or settings(ctx).home))]
    arguments += [] if cpu_slots is None else ["--cpu-slots", str(cpu_slots)]
    given = {"--log-format": log_format, "--log-level": log_level, "--bounds": bounds, "--run-as": run_as,
             "--run-as-limits": run_as_limits}  # fmt: skip
    for option, value in given.items():
        arguments += [] if value is None else [option, value]
    return arguments if launchers is None else [*arguments, "--launchers", str(launchers)]


def _preemption_arguments(scope: str | None, min_run: float | None) -> list[str]:
    """Return the command line arguments for the options on preemption that are set."""
    arguments = [] if scope is None else ["--preemption", scope]
    return arguments if min_run is None else [*arguments, "--preemption-min-run", str(min_run)]


def agent(launch_file: Annotated[Path, typer.Argument(help="The attempt's launch.json.", exists=True)]) -> None:
    """Run one attempt's ranks on this machine. Called by launchers, rarely by hand."""
    exec_module("ratchet_worker.agent", "torch", "worker", [str(launch_file)])


def exec_module(
    module: str, required_module: str, extra: str, arguments: list[str], database_url: str | None = None
) -> NoReturn:
    """Replace this process with ``python -P -m module``. Raise ``typer.Exit`` if ``required_module`` is not installed; the
    printed error names the ``extra`` to install. ``database_url``: passed as a variable."""
    if find_spec(required_module) is None:
        command = shlex.join([sys.executable, "-m", "pip", "install", f"ratchet-train[{extra}]"])
        typer.echo(f"ratchet: this needs {required_module}, which {sys.executable} does not have: {command}", err=True)
        raise typer.Exit(Exit.FAULT)
    variables = dict(os.environ)
    if database_url is not None:
        variables[env_vars.DATABASE_URL] = database_url  # not an argument: it may hold a password
    # -P: a ``secrets.py`` or ``yaml.py`` in the current directory must not be imported.
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], variables)
