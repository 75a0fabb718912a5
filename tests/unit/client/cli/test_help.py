"""``ratchet --help`` ends with the exit codes, each with its text beside it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_client.cli.shared.exit_codes import MEANINGS


@pytest.mark.parametrize("width", [60, 200])
def test_help_lists_exit_codes_in_aligned_column(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = CliRunner().invoke(app, ["--help"]).output.partition("Exit codes:\n")[2].rstrip().splitlines()
    assert all(len(line) <= width and (line[:6].strip().isdigit() or line.startswith(" " * 6)) for line in lines)
    assert [int(line[:6]) for line in lines if line[:6].strip()] == [code.value for code in MEANINGS]
