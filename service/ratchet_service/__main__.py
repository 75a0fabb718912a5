"""``python -m ratchet_service serve``, ``reconcile``, ``agent-host``, ``token``, ``backup`` and ``restore``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ratchet_contract.paths import HomePaths
from ratchet_contract.service_options import COMMANDS, DATABASE, Option
from ratchet_service.commands import backup, token
from ratchet_service.config.network import Listening
from ratchet_service.config.output_limits import parse_bounds
from ratchet_service.config.settings import Settings
from ratchet_service.config.standby_bounds import parse as parse_standby
from ratchet_service.db.engine import passwords
from ratchet_service.errors import StartError
from ratchet_service.isolation import run_as
from ratchet_service.observability import logging as service_logging


def main(argv: list[str] | None = None) -> int:
    """Run one command of the service until it ends, and return the exit status: 2 after a ``StartError``, which is printed.
    ``argv`` None: this process's arguments."""
    options = _parser().parse_args(argv)
    service_logging.configure(options.log_level, options.log_format, passwords(options.database_url, os.environ))
    home = _absolute(options.home)
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
    from ratchet_service.scheduling.scheduler import Preemption

    user = run_as.parse_user(options.run_as)
    limits = run_as.with_defaults(options.run_as_limits, user)
    if user is not None:
        run_as.restrict_process()
    launchers = None if options.launchers is None else _absolute(options.launchers)
    preemption = Preemption(options.preemption, options.preemption_min_run)
    if options.command == "reconcile":
        settings = Settings(
            home, options.database_url, launchers, user=user, user_limits=limits, bounds=options.bounds,
            standby=options.standby,
        )  # fmt: skip
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
        standby=options.standby,
        webhook_networks=tuple(options.webhook_network or ()),
        tensorboard_dir=None if options.tensorboard_dir is None else _absolute(options.tensorboard_dir),
        mlflow_uri=options.mlflow_uri,
        wandb_dir=None if options.wandb_dir is None else _absolute(options.wandb_dir),
        wandb_mode=options.wandb_mode,
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
    """Return the parser of all commands. Defaults come from the environment variables of ``service_options``."""
    parser = argparse.ArgumentParser(prog="python -m ratchet_service", description="The control plane of Ratchet.")
    parser.set_defaults(database_url=None)  # for `agent-host`, which has no such option
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.description, description=command.description)
        _add_options(added, command.options)
    database = argparse.ArgumentParser(add_help=False)
    _add_options(database, DATABASE)
    token.add_parser(commands, database)
    backup.add_parsers(commands, database)
    return parser


def _add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add ``options``. A variable that is empty counts as not set."""
    for option in options:
        if option.kind is bool:
            parser.add_argument(option.flag, action="store_true", help=option.description)
            continue
        text = os.environ.get(option.variable) if option.variable else None
        default: Any = text or option.default  # argparse checks a text as it checks a value
        if option.separator is not None:
            default = option.split(text) if text else None
        parser.add_argument(
            option.flag,
            action="store" if option.separator is None else "append",
            type=_type(option),
            default=default,
            metavar=option.value_name,
            help=option.description,
        )


def _type(option: Option) -> Callable[[str], Any]:
    """Return the function by which argparse parses a value of ``option``. It raises ``argparse.ArgumentTypeError``."""
    parsers: dict[str, Callable[[str], Any]] = {
        "bounds": parse_bounds,
        "run_as_limits": run_as.parse_limits,
        "standby": parse_standby,
    }
    parse = parsers.get(option.name, option.parse)

    def parse_value(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            names = "" if option.variable is None else f" ({option.flag}, {option.variable})"
            raise argparse.ArgumentTypeError(f"{error}{names}") from None

    return parse_value


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


if __name__ == "__main__":
    sys.exit(main())
