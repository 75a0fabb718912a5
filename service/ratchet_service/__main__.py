"""``python -m ratchet_service serve``, ``reconcile``, ``agent-host``, ``token``, ``backup`` and ``restore``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from ratchet_contract import env_vars
from ratchet_contract.paths import HomePaths
from ratchet_service.commands import backup, token
from ratchet_service.config.network import Listening
from ratchet_service.config.output_limits import Bounds, parse_bounds
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import passwords
from ratchet_service.errors import StartError
from ratchet_service.isolation.sandbox import Limits
from ratchet_service.observability import logging as service_logging
from ratchet_service.scheduling.preemption import SCOPES

DEFAULT_PORT: Final = 0


def main(argv: list[str] | None = None) -> int:
    """Run one command of the service until it ends, and return the exit status: 2 after a ``StartError``, which is printed.
    ``argv`` None: this process's arguments."""
    options = _parser().parse_args(argv)
    service_logging.configure(options.log_level, options.log_format, passwords(options.database_url, os.environ))
    home = options.home.expanduser().absolute()
    try:
        if options.command == "token":
            return token.run(Settings(home, options.database_url), options)
        if options.command in ("backup", "restore"):
            return backup.run(Settings(home, options.database_url), options)
        if options.command == "agent-host":
            from ratchet_service.commands import agent_host

            agent_host.run(HomePaths(home.resolve()), options.cpu_slots)
            return 0
        return _run(home, options)
    except StartError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 2


def _run(home: Path, options: argparse.Namespace) -> int:
    """Run ``serve`` or ``reconcile`` with the parsed options, and return 0 after its clean end. Raises ``StartError``."""
    from ratchet_service.commands.serve import ServeOptions, reconcile, serve
    from ratchet_service.isolation import run_as
    from ratchet_service.scheduling.scheduler import Preemption

    user = run_as.parse_user(options.run_as)
    limits = run_as.with_defaults(options.run_as_limits, user)
    if user is not None:
        run_as.restrict_process()
    launchers = options.launchers.expanduser().absolute() if options.launchers else None
    preemption = Preemption(options.preemption, options.preemption_min_run)
    if options.command == "reconcile":
        settings = Settings(home, options.database_url, launchers, user=user, user_limits=limits, bounds=options.bounds)
        listen = Listening(host=options.metrics_host, port=options.metrics_port or 0)
        reconcile(settings, options.cpu_slots, preemption, None if options.metrics_port is None else listen)
        return 0
    settings = Settings(
        home,
        options.database_url,
        launchers,
        user=user,
        user_limits=limits,
        code_roots=None if options.code_root is None else tuple(map(_absolute, options.code_root)),
        uri_roots=None if options.checkpoint_uri_root is None else tuple(options.checkpoint_uri_root),
        bounds=options.bounds,
        request_rate=options.request_rate,
        request_burst=max(1, int(10 * options.request_rate)),
    )
    listen = Listening(
        host=options.host,
        port=options.port,
        url=options.url,
        auth=options.auth,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        ca_file=options.ca_file,
        insecure_http=options.insecure_http,
    )
    serve(
        ServeOptions(
            settings,
            listen,
            options.cpu_slots,
            not options.no_reconciler,
            preemption=preemption,
            drain_seconds=options.drain,
        )
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Defaults come from the environment where their help names a variable."""
    base = argparse.ArgumentParser(add_help=False)
    home = os.environ.get(env_vars.HOME) or ".ratchet"
    base.add_argument(
        "--home", type=Path, default=Path(home), help="run directory (default: RATCHET_HOME or ./.ratchet)"
    )
    base.add_argument(
        "--log-format",
        # not ``choices``: argparse would not check a default from the environment against them
        type=_log_format,
        metavar="{text,json}",
        default=os.environ.get(env_vars.LOG_FORMAT) or "text",
        help="format of the log on standard error; json: one object per line (default: RATCHET_LOG_FORMAT, else text)",
    )
    base.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    database = argparse.ArgumentParser(add_help=False, parents=[base])
    database.add_argument(
        "--database-url",
        default=os.environ.get(env_vars.DATABASE_URL) or None,
        help="sqlite:///FILE or postgresql://... (default: RATCHET_DATABASE_URL, else SQLite in the run directory)",
    )
    machine = argparse.ArgumentParser(add_help=False)
    machine.add_argument(
        "--cpu-slots", type=_positive, help="CPU slots available to jobs (default: the cores of this process)"
    )
    common = argparse.ArgumentParser(add_help=False, parents=[database, machine])
    common.add_argument(
        "--launchers",
        type=Path,
        default=_path_from_env(env_vars.LAUNCHERS),
        help="YAML file of the launchers and their settings (default: RATCHET_LAUNCHERS, else local alone)",
    )
    common.add_argument(
        "--run-as",
        default=os.environ.get(env_vars.RUN_AS) or None,
        metavar="USER[:GROUP]",
        help="user that runs local agents, their ranks and checks of users' code; the service must be root (default: "
        "RATCHET_RUN_AS, else the service's own user). It requires tokens: --auth token",
    )
    common.add_argument(
        "--run-as-limits",
        type=_run_as_limits,
        default=os.environ.get(env_vars.RUN_AS_LIMITS) or "",
        metavar="processes=NUMBER,file_size=SIZE",
        help="limits of that user for all jobs together: number of processes and threads (default: half of the machine's "
        "limit), and size of any file it writes, checkpoints included (like 100Gi; default: no limit), or "
        "RATCHET_RUN_AS_LIMITS",
    )
    common.add_argument(
        "--preemption",
        choices=SCOPES,
        default="owner",
        help="which jobs may be stopped for a job of higher priority that waits for slots. owner: those of the same owner; "
        "any: those of all owners (each submitter can then stop all others' jobs); off: none (default: %(default)s)",
    )
    common.add_argument(
        "--preemption-min-run",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="minimum training time of a preempted job before it may be preempted again (default: %(default)g)",
    )
    common.add_argument(
        "--bounds",
        type=_bounds,
        default=os.environ.get(env_vars.BOUNDS) or "",
        metavar="NAME=NUMBER,...",
        help="how much of a job's output is kept (default: RATCHET_BOUNDS); docs/limits.md has the names",
    )
    parser = argparse.ArgumentParser(prog="python -m ratchet_service", description="The control plane of Ratchet.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("serve", parents=[common], help="API and reconciler")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    one.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    one.add_argument("--url", help="URL at which agents connect to the service, if not the address it listens on")
    one.add_argument("--no-reconciler", action="store_true", help="run the API only; `reconcile` runs elsewhere")
    one.add_argument(
        "--drain",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="time after SIGTERM in which requests are still accepted, while /readyz already returns 503 (default: "
        "%(default)g)",
    )
    _add_access_options(one)
    two = commands.add_parser("reconcile", parents=[common], help="a reconciler alone")
    two.add_argument(
        "--metrics-port",
        type=_port,
        help="port that serves /metrics, /healthz and /readyz without a token (default: none)",
    )
    two.add_argument("--metrics-host", default="127.0.0.1", help="address of that port (default: %(default)s)")
    agents = "starts the agents of local jobs for a reconciler elsewhere, without a database"
    commands.add_parser("agent-host", parents=[base, machine], help=agents).set_defaults(database_url=None)
    token.add_parser(commands, database)
    backup.add_parsers(commands, database)
    return parser


def _add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``serve`` for tokens, TLS, allowed paths and request rates."""
    parser.add_argument(
        "--auth",
        choices=("auto", "token"),
        default=os.environ.get(env_vars.AUTH) or "auto",
        help="auto: no token if the database is SQLite and the address is local to this machine, else every request needs "
        "one; token: every request needs one (default: RATCHET_AUTH, else auto)",
    )
    parser.add_argument(
        "--tls-cert", type=Path, default=_path_from_env(env_vars.TLS_CERT), help="PEM (or RATCHET_TLS_CERT)"
    )
    parser.add_argument(
        "--tls-key", type=Path, default=_path_from_env(env_vars.TLS_KEY), help="PEM (or RATCHET_TLS_KEY)"
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        default=_path_from_env(env_vars.CA_FILE),
        help="PEM of the CAs with which agents verify the certificate, if not the system's (or RATCHET_CA_FILE)",
    )
    parser.add_argument(
        "--insecure-http",
        action="store_true",
        help="allow plain HTTP at an address that other machines reach: a proxy in front terminates TLS",
    )
    parser.add_argument(
        "--code-root",
        action="append",
        default=_split_env(env_vars.CODE_ROOTS, ":"),
        help="a directory below which specs may name code and files; may be repeated (or RATCHET_CODE_ROOTS, separated by "
        ":). Default: any if no token is needed and --run-as is not set, else only uploaded code",
    )
    parser.add_argument(
        "--checkpoint-uri-root",
        action="append",
        default=_split_env(env_vars.URI_ROOTS, None),
        help="a prefix of checkpoint.uri that specs may name; may be repeated (or RATCHET_CHECKPOINT_URI_ROOTS, separated by "
        "spaces). Default: as for --code-root",
    )
    parser.add_argument(
        "--request-rate", type=_rate, default=100.0, help="requests per second of one caller, with bursts of ten times as many "
        "(default: %(default)g)",
    )  # fmt: skip


def _split_env(variable: str, separator: str | None) -> list[str] | None:
    """Return the non-empty parts of an environment variable; None if it is not set or empty. ``separator`` None: blanks."""
    text = os.environ.get(variable)
    return [part for part in text.split(separator) if part] if text else None


def _path_from_env(variable: str) -> Path | None:
    """Return the path in an environment variable; None if it is not set or empty."""
    text = os.environ.get(variable)
    return Path(text) if text else None


def _log_format(text: str) -> str:
    """Return ``text`` if it is a log format, else raise ``argparse.ArgumentTypeError``."""
    if text not in service_logging.FORMATS:
        raise argparse.ArgumentTypeError(
            f"must be {' or '.join(service_logging.FORMATS)}, not {text!r} (--log-format, {env_vars.LOG_FORMAT})"
        )
    return text


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _rate(text: str) -> float:
    """Parse a rate, a number more than 0 and at most a million. Raises ``argparse.ArgumentTypeError`` for other numbers."""
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _seconds(text: str) -> float:
    """Parse seconds, a number of 0 or more and at most a billion. Raises ``argparse.ArgumentTypeError`` for other numbers."""
    value = float(text)
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _bounds(text: str) -> Bounds:
    """Parse the value of ``--bounds``. Raises ``argparse.ArgumentTypeError``."""
    try:
        return parse_bounds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run_as_limits(text: str) -> Limits:
    """Parse the value of ``--run-as-limits``. Raises ``argparse.ArgumentTypeError``."""
    from ratchet_service.isolation.run_as import parse_limits

    try:
        return parse_limits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be between 0 and 65535")
    return value


if __name__ == "__main__":
    sys.exit(main())
