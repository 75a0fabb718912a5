"""``ratchet --help`` ends with the exit codes, each with its text beside it; a number out of range is a usage error."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_client.cli.shared.exit_codes import MEANINGS, Exit


@pytest.mark.parametrize("width", [60, 200])
def test_help_lists_exit_codes_in_aligned_column(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = CliRunner().invoke(app, ["--help"]).output.partition("Exit codes:\n")[2].rstrip().splitlines()
    assert all(len(line) <= width and (line[:6].strip().isdigit() or line.startswith(" " * 6)) for line in lines)
    assert [int(line[:6]) for line in lines if line[:6].strip()] == [code.value for code in MEANINGS]


@pytest.mark.parametrize(
    "command",
    [
        "quota set me --queued 2147483648",
        "quota set me --jobs 2147483648",
        "quota set me --ranks 2147483648",
        "quota set me --gpus 2147483648",
        "list --limit 9223372036854775808",
        "files job-02nhcp463rdc --limit 9223372036854775808",
        "top --every inf",
        f"token create --expires 1{400 * '0'}d",
    ],
)
def test_number_beyond_the_range_of_an_option_is_a_usage_error(command: str, tmp_path: Path) -> None:
    """No service is needed to refuse it."""
    done = CliRunner().invoke(app, ["--home", str(tmp_path), *command.split()])
    assert done.exit_code == Exit.USAGE and "Invalid value" in done.output
