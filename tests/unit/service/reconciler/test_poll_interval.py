"""How often one reconciler looks at what runs: as rarely as it must to leave the core to others."""

from __future__ import annotations

import pytest

from ratchet_service.reconciler.loop import next_poll_at


@pytest.mark.parametrize(
    ("took", "pause"),
    [(0.0, 0.0), (0.04, 0.0), (0.1, 0.4), (0.4, 1.6), (30.0, 2.0)],
    ids=["nothing", "few attempts", "some hundred", "more", "a disk that hangs"],
)
def test_poll_pause_is_four_times_duration_up_to_two_seconds(took: float, pause: float) -> None:
    assert next_poll_at(100.0, 100.0 + took) == pytest.approx(100.0 + took + pause)
