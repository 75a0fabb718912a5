"""The command line ``ratchet``. Modules import what is heavy inside their commands, so that ``ratchet --help`` stays quick."""

from __future__ import annotations


def main() -> None:
    """Entry point of the executable; exits with a code of ``exits.Exit``."""
    from ratchet_client.cli.app import app

    app()
