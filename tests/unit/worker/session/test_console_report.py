"""What a run without a service tells on a terminal on which the script draws a progress bar."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.resume_report import StepDifference
from ratchet_contract.protocol.messages import RedoneSteps
from ratchet_worker.session import console_report
from tests.support.optional_packages import skip_if_missing


@skip_if_missing("tqdm")
def test_console_line_is_printed_above_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    with tqdm(range(4), file=sys.stderr, mininterval=0) as bar:
        bar.update()
        console_report.print_line("step 1 is saved")
        bar.update()
    shown = [part.strip() for part in capsys.readouterr().err.replace("\r", "\n").split("\n")]
    assert "ratchet: step 1 is saved" in shown
    at = shown.index("ratchet: step 1 is saved")
    assert any("25%" in part for part in shown[:at]) and any("50%" in part for part in shown[at:])


@skip_if_missing("tqdm")
def test_console_line_is_printed_when_tqdm_is_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm

    monkeypatch.setattr(tqdm, "tqdm", partial(tqdm.tqdm, ncols=80))
    console_report.print_line("step 1 is saved")
    assert capsys.readouterr().err == "ratchet: step 1 is saved\n"


@pytest.mark.parametrize("differs", [False, True])
def test_redone_steps_that_differ_are_not_said_to_be_the_same_at_the_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, differs: bool
) -> None:
    found: dict[str, Any] = {
        "rank": 0,
        "at": "2030-01-01T00:00:00Z",
        "world_size": 1,
        "steps": 5,
        "reason": "no room for more",
    }
    first = StepDifference(step=2, rank=0, part="parameters") if differs else None
    report = console_report.ConsoleReport(tmp_path / "spool", ".", lambda: True)
    report.append(RedoneSteps(**found, compared=3, equal=1 if differs else 3, first_difference=first))
    report.close()
    printed = capsys.readouterr().err
    assert ("not exact: step 2" in printed) is differs
    assert ("3 were compared and are the same" in printed) is not differs
