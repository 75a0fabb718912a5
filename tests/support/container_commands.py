"""The command lines of containers, taken apart by the programs themselves."""

from __future__ import annotations

import argparse
import os

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_service import __main__ as service


def options_of(command: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the service understands of ``ratchet COMMAND``: the command line runs, and what it would become is parsed."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, argv, _env: became.append(argv))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (argv,) = became
    options = service._parser().parse_args(argv[argv.index("ratchet_service") + 1 :])
    assert options.command == command[0]
    return options
