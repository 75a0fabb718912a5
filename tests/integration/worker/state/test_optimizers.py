"""Every optimizer, scheduler and average of the installed torch, and of schedulefree: registered, trained, saved, put back."""

from __future__ import annotations

import pytest

from tests.support.gloo_ranks import Named, Ranks

WALK = Named("tests.support.optimizer_coverage")


@pytest.mark.parametrize(
    ("package", "some"),
    [
        ("optimizers", {"SGD", "AdamW", "LBFGS", "SparseAdam", "Adafactor"}),
        ("schedulers", {"LambdaLR", "MultiStepLR", "ReduceLROnPlateau", "ChainedScheduler", "SequentialLR", "SWALR"}),
        ("averages", {"AveragedModel", "get_ema_multi_avg_fn"}),
        ("schedulefree", {"AdamWScheduleFree", "SGDScheduleFreeClosure", "ScheduleFreeWrapper"}),
    ],
)
def test_every_optimizer_and_scheduler_class_resumes_exactly_in_new_objects(
    two_ranks: Ranks, package: str, some: set[str]
) -> None:
    if package == "schedulefree":
        pytest.importorskip(package)
    for found in two_ranks.run(WALK.resume_differences_by_class, package):
        assert some <= found.keys()
        assert {name: problems for name, problems in found.items() if problems} == {}


def test_evaluation_with_weight_switching_optimizer_changes_no_bit(two_ranks: Ranks) -> None:
    pytest.importorskip("schedulefree")
    for found in two_ranks.run(WALK.evaluation_differences_by_class):
        assert found.pop("rounding"), "to switch there and back would lose nothing"
        assert {name: problems for name, problems in found.items() if problems} == {}
