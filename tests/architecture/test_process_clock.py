"""No test replaces a function of the module ``time``: the event loop of a server that other tests share reads it too, and sleeps
until a time of the stand-in. A test replaces the name ``time`` in the module that it tests."""

from __future__ import annotations

import re

import pytest

from tests.support.docs import ROOT

PATCHED_CLOCK = re.compile(r"""setattr\(\s*(?:\w+\.)*time,|["'][\w.]+\.time\.\w+["']""")


def test_no_test_replaces_the_clock_of_the_whole_process() -> None:
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "test_process_clock.py"]
    assert [str(path.relative_to(ROOT)) for path in files if PATCHED_CLOCK.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("line", "whole_process"),
    [
        ('patch.setattr(time, "sleep", f)', True),
        ('patch.setattr(module.time, "time", f)', True),
        ('patch.setattr("package.module.time.time", f)', True),
        ('patch.setattr(module, "time", SimpleNamespace(monotonic=f))', False),
        ('patch.setattr("package.module.time", SimpleNamespace(monotonic=f))', False),
    ],
)
def test_search_finds_each_form_of_replacement(line: str, whole_process: bool) -> None:
    assert bool(PATCHED_CLOCK.search(line)) == whole_process
