"""The command line ``ratchet``. Commands import heavy modules (httpx, pydantic) in their functions, so that
``ratchet --help`` stays fast."""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Run the command line and exit the process. Entry point of the executable; ``exit_codes.Exit`` has the codes of commands."""
    from ratchet_client.cli.app import app

    warnings.showwarning = _show_warning
    app()


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    """Print a warning on standard error without its source location, which does not help a user."""
    sys.stderr.write(f"ratchet: warning: {message}\n")
