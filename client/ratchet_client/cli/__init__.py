"""The command line ``ratchet``. Modules import what is heavy inside their commands, so that ``ratchet --help`` stays quick."""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Entry point of the executable; exits with a code of ``exits.Exit``."""
    from ratchet_client.cli.app import app

    warnings.showwarning = _say
    app()


def _say(message: Warning | str, *_where: object, **_more: object) -> None:
    """For people: without the place in the source."""
    sys.stderr.write(f"ratchet: warning: {message}\n")
