"""``python -m ratchet_service serve`` and ``python -m ratchet_service reconcile``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Final

from ratchet_contract import environment
from ratchet_service.settings import Settings

DEFAULT_PORT: Final = 0


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 after a clean end, 2 when the service could not start."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from ratchet_service.serve import ServeOptions, StartError, reconcile, serve

    settings = Settings(
        home=options.home.expanduser().absolute(),
        database_url=options.database_url,
        launchers_file=options.launchers.expanduser().absolute() if options.launchers else None,
    )
    try:
        if options.command == "reconcile":
            reconcile(settings, options.cpu_slots)
        else:
            serve(
                ServeOptions(
                    settings,
                    host=options.host,
                    port=options.port,
                    cpu_slots=options.cpu_slots,
                    reconcile=not options.no_reconciler,
                    allow_remote=options.allow_remote,
                    url=options.url,
                )
            )
    except StartError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    home = os.environ.get(environment.HOME) or ".ratchet"
    common.add_argument(
        "--home", type=Path, default=Path(home), help="run directory (default: RATCHET_HOME or ./.ratchet)"
    )
    common.add_argument(
        "--database-url",
        default=os.environ.get(environment.DATABASE_URL) or None,
        help="sqlite:///FILE or postgresql://... (default: RATCHET_DATABASE_URL, else SQLite in the run directory)",
    )
    common.add_argument(
        "--cpu-slots", type=_positive, help="CPU slots lent to jobs (default: the cores of this process)"
    )
    launchers = os.environ.get(environment.LAUNCHERS)
    common.add_argument(
        "--launchers",
        type=Path,
        default=Path(launchers) if launchers else None,
        help="YAML file of the launchers and their settings (default: RATCHET_LAUNCHERS, else local alone)",
    )
    common.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser = argparse.ArgumentParser(prog="python -m ratchet_service", description="The control plane of Ratchet.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("serve", parents=[common], help="API and reconciler")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    one.add_argument("--port", type=_port, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    one.add_argument("--url", help="how agents reach the service, if not by the address it listens on")
    one.add_argument("--no-reconciler", action="store_true", help="the API alone; `reconcile` runs elsewhere")
    one.add_argument("--allow-remote", action="store_true", help="allow an address that other machines can reach")
    commands.add_parser("reconcile", parents=[common], help="a reconciler alone")
    return parser


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
