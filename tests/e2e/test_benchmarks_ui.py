"""The benchmark of the web pages runs and prints what its readers look for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM
from tests.support.full_matrix import full

FIGURE = r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]"
RATIO = rf"{FIGURE}; modules {FIGURE}; ratio {FIGURE}"


@full
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_pages_benchmark_prints_bytes_times_and_what_open_pages_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import ui  # needs playwright, as Chromium does

    ui.measure(tmp_path, rounds=1, steps=1000, seconds=3, pages=13)
    out = capsys.readouterr().out
    bundled, single = (int(found) for found in re.findall(r"first page +(\d+) in", out))
    assert 0 < bundled < single and "first page: 0." in out and "MISSED" not in out, out
    assert len(re.findall(rf"first contentful paint +{RATIO}$", out, re.MULTILINE)) == 2, out
    assert len(re.findall(rf"rows of jobs +{RATIO}$", out, re.MULTILINE)) == 2, out
    assert re.search(r"bytes of the answer: \d+; every point \d+; ratio \d\.\d+$", out, re.MULTILINE), out
    for what in ("drawn, with an empty cache", "the points of a zoom are drawn"):
        assert re.search(rf"ms until {what}: {FIGURE}; every point {FIGURE}; ratio {FIGURE}$", out, re.MULTILINE), out
    assert re.search(r"requests of one page in 3 s: jobs [2-9], overview \d+, ", out), out
    assert "hidden: 0 of all 13 together" in out, out
    assert re.search(r"13 visible pages, of each kind as many: [1-9][\d.]* requests/s", out), out
    assert re.search(r"answers: median \d+\.\d ms, 95 % within \d+\.\d ms$", out, re.MULTILINE), out
