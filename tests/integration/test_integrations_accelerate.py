"""Accelerate, alone: after ``load_state`` a training ends in the bits of one that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.groups import Named, Ranks
from tests.support.packages import needs

pytestmark = needs("accelerate")
transformers = needs("transformers")
runs = Named("tests.support.accelerate_runs")


def test_accelerate_itself_does_not_resume_exactly_under_powersgd(two: Ranks, tmp_path: Path) -> None:
    """The control: nothing random in the net, so that what is missing is the hook's state alone."""
    assert min(two.run(runs.accelerate_difference, str(tmp_path), "plain", False)) > 1e-3


@pytest.mark.parametrize("kind", ["taken over", "own", "post_localSGD"])
def test_ours_does(two: Ranks, tmp_path: Path, kind: str) -> None:
    assert two.run(runs.accelerate_difference, str(tmp_path), kind, True) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("twice", "one DDP has one hook"),
        ("not prepared", "accelerator.prepare"),
        ("file is gone", "no such file"),
        ("another hook", "wrapper"),
        ("no rank's state", "ratchet_hook_0.safetensors: version: not a rank's state"),
        ("half a rank's state", "ratchet_hook_0.safetensors: world_size: not a rank's state"),
    ],
)
def test_what_cannot_be_managed_is_refused(two: Ranks, tmp_path: Path, what: str, advice: str) -> None:
    for said in two.run(runs.accelerate_refusal, str(tmp_path), what):
        assert advice in said


def test_another_number_of_ranks_is_refused_unless_it_is_asked_for(two: Ranks, tmp_path: Path) -> None:
    """Rank 1 is rank 0 of its group, too."""
    for answer in two.run(runs.other_ranks, str(tmp_path), False):
        assert "recorded on 2 ranks, and there are 1" in answer["refused"] and "redistribute=True" in answer["refused"]
    for answer in two.run(runs.other_ranks, str(tmp_path), True):
        assert answer["apart"] > 0 and answer["iteration"]
        assert answer["means"] and all(answer["means"]) and answer["rest"] and all(answer["rest"])
        assert len(answer["said"]) == 1 and "redistributed (the mean of the old residuals" in answer["said"][0]
    for answer in two.run(runs.other_ranks, str(tmp_path), True, "post_localSGD"):
        assert "whose models differ" in answer["refused"]


@transformers
def test_the_trainer_with_a_stock_hook_does_not_resume_exactly(two: Ranks, tmp_path: Path) -> None:
    assert min(two.run(runs.trainer_difference, str(tmp_path), "plain", 6)) > 1e-4


@transformers
@pytest.mark.parametrize(("kind", "step"), [("powerSGD", 6), ("powerSGD", 9), ("post_localSGD", 6)])
def test_the_managed_trainer_does(two: Ranks, tmp_path: Path, kind: str, step: int) -> None:
    """Step 6 ends an epoch, step 9 lies within one."""
    assert two.run(runs.trainer_difference, str(tmp_path), kind, step) == [0.0, 0.0]


@transformers
def test_the_trainer_refuses_a_checkpoint_without_hook_state(two: Ranks, tmp_path: Path) -> None:
    for said in two.run(runs.trainer_refusal, str(tmp_path)):
        assert "without a managed hook" in said


@transformers
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("recorded_by", ["mine", "parent"])
def test_an_evaluation_before_the_first_step_ends_no_job_and_a_fork_of_one_that_has_ended_goes_on(
    two: Ranks, tmp_path: Path, recorded_by: str, ended: bool
) -> None:
    expected = (ended and recorded_by == "mine", 0, [4.0])
    assert two.run(runs.trainer_in_a_session, str(tmp_path), recorded_by, ended) == [expected] * 2
