"""Accelerate, alone: after ``load_state`` a training ends in the bits of one that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.full_matrix import full
from tests.support.gloo_ranks import Named, Ranks
from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("accelerate")
transformers = skip_if_missing("transformers")
runs = Named("tests.support.accelerate_runs")


def test_unmanaged_accelerate_does_not_resume_exactly_under_powersgd(two_ranks: Ranks, tmp_path: Path) -> None:
    """The control: nothing random in the net, so that what is missing is the hook's state alone."""
    assert min(two_ranks.run(runs.accelerate_difference, str(tmp_path), "plain", False)) > 1e-3


@pytest.mark.parametrize("kind", ["taken over", "own", "post_localSGD"])
def test_managed_accelerate_resumes_exactly(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert two_ranks.run(runs.accelerate_difference, str(tmp_path), kind, True) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("twice", "one DDP has one hook"),
        ("not prepared", "accelerator.prepare"),
        ("file is gone", "no such file"),
        ("another hook", "wrapper"),
        ("no rank's state", "ratchet_hook_0.safetensors: version: not the state of a rank"),
        ("half a rank's state", "ratchet_hook_0.safetensors: world_size: not the state of a rank"),
    ],
)
def test_unsupported_accelerate_setup_is_refused_with_advice(
    two_ranks: Ranks, tmp_path: Path, what: str, advice: str
) -> None:
    for said in two_ranks.run(runs.accelerate_refusal, str(tmp_path), what):
        assert advice in said


def test_hook_refused_with_a_scaler_is_not_registered(two_ranks: Ranks) -> None:
    for said, accepted in two_ranks.run(runs.refusals_with_scaler):
        assert len(said) == 2 and all("could skip a step" in message for message in said)
        assert accepted == "allreduce"


def test_changed_rank_count_is_refused_without_redistribute(two_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 is rank 0 of its group, too."""
    for answer in two_ranks.run(runs.load_on_one_rank, str(tmp_path), False):
        assert "on 2 ranks, but this run has 1" in answer["refused"] and "redistribute=True" in answer["refused"]
    for answer in two_ranks.run(runs.load_on_one_rank, str(tmp_path), True):
        assert answer["apart"] > 0 and answer["iteration"]
        assert answer["means"] and all(answer["means"]) and answer["rest"] and all(answer["rest"])
        assert len(answer["said"]) == 1 and "redistributed (the mean of the old residuals" in answer["said"][0]
    for answer in two_ranks.run(runs.load_on_one_rank, str(tmp_path), True, "post_localSGD"):
        assert "whose models differ" in answer["refused"]


@full
@transformers
def test_the_trainer_with_a_stock_hook_does_not_resume_exactly(two_ranks: Ranks, tmp_path: Path) -> None:
    assert min(two_ranks.run(runs.trainer_difference, str(tmp_path), "plain", 6)) > 1e-4


@transformers
@pytest.mark.parametrize(("kind", "step"), [("powerSGD", 6), ("powerSGD", 9), ("post_localSGD", 6)])
def test_managed_trainer_resumes_exactly(two_ranks: Ranks, tmp_path: Path, kind: str, step: int) -> None:
    """Step 6 ends an epoch, step 9 lies within one."""
    assert two_ranks.run(runs.trainer_difference, str(tmp_path), kind, step) == [0.0, 0.0]


@transformers
def test_trainer_refuses_checkpoint_without_hook_state(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks.run(runs.trainer_refusal, str(tmp_path)):
        assert "without a managed hook" in said


@transformers
def test_trainer_refuses_hook_with_a_scaler_at_every_attempt(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks.run(runs.trainer_refusals_with_scaler, str(tmp_path)):
        assert len(said) == 3 and all("could skip a step" in message for message in said)


@transformers
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("recorded_by", ["mine", "parent"])
def test_early_stopping_at_eval_on_start_ends_only_a_job_that_had_ended(
    two_ranks: Ranks, tmp_path: Path, recorded_by: str, ended: bool
) -> None:
    expected = (ended and recorded_by == "mine", 0, [4.0])
    assert two_ranks.run(runs.resume_trainer_in_session, str(tmp_path), recorded_by, ended) == [expected] * 2
