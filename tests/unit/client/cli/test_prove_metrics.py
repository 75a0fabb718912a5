"""Which values of two runs ``ratchet prove JOB`` compares."""

from __future__ import annotations

from ratchet_client.cli.prove.proof import _comparable, _metrics_differ


def test_only_steps_that_both_runs_have_are_compared() -> None:
    recorded, redone = _comparable({"loss": {5: 1.0, 11: 0.5, 13: 0.25}}, {"loss": {11: 0.5, 12: 0.3}}, range(11, 21))
    assert recorded == redone == {"loss": {11: 0.5}}


def test_series_that_the_second_run_does_not_log_at_all_is_a_difference() -> None:
    recorded, redone = _comparable({"loss": {11: 0.5}, "accuracy": {12: 0.9}}, {"loss": {11: 0.5}}, range(11, 21))
    assert [*_metrics_differ(recorded, redone).values()] == ["accuracy at step 12: 0.9 against none"]


def test_series_before_the_first_step_is_not_compared() -> None:
    assert _comparable({"loss": {5: 1.0}}, {}, range(11, 21)) == ({"loss": {}}, {"loss": {}})
