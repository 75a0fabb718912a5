"""A sample of the tests under a condition that this machine does not have; ``make conditions`` runs all under each of six."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import conditions

SAMPLES = {
    "boot": [
        "unit/service/lifecycle/test_monotonic_deadlines.py",
        "unit/service/agent_reports/test_report_pacing.py", "unit/worker/agent/test_hang_detector.py",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("condition", SAMPLES)
def test_sample_of_tests_passes_under_condition(condition: str) -> None:
    files = [f"tests/{name}" for name in SAMPLES[condition]]
    try:
        found = conditions.run(condition, ["-n0", "-q", *files])
    except conditions.NotHere as why:
        pytest.skip(str(why))
    assert found.passed, found.counts
    assert not found.skipped
    assert int(found.counts.split()[0]) > 10


def test_boot_condition_shows_an_uptime_of_about_a_minute() -> None:
    """The condition itself: without it the sample above would say nothing."""
    try:
        with conditions.boot() as setting:
            shown = subprocess.run([*setting.before, "cat", "/proc/uptime"], capture_output=True, text=True, check=True)
    except conditions.NotHere as why:
        pytest.skip(str(why))
    assert float(shown.stdout.split()[0]) < 120
