"""What a run without a service tells on a terminal on which the script draws a progress bar."""

from __future__ import annotations

import sys
from functools import partial

import pytest

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
