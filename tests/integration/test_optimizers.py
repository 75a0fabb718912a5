"""Every optimizer, scheduler and average of the installed torch, and of schedulefree: registered, trained, saved, put back."""

from __future__ import annotations

import pytest

from tests.support.groups import Named, Ranks

WALK = Named("tests.support.optimizer_walk")


@pytest.mark.parametrize(
    ("package", "some"),
    [
        ("optimizers", {"SGD", "AdamW", "LBFGS", "SparseAdam", "Adafactor"}),
        ("schedulers", {"LambdaLR", "MultiStepLR", "ReduceLROnPlateau", "ChainedScheduler", "SequentialLR", "SWALR"}),
        ("averages", {"AveragedModel", "get_ema_multi_avg_fn"}),
        ("schedulefree", {"AdamWScheduleFree", "SGDScheduleFreeClosure", "ScheduleFreeWrapper"}),
    ],
)
def test_every_class_trains_on_bit_for_bit_in_new_objects(two: Ranks, package: str, some: set[str]) -> None:
    if package == "schedulefree":
        pytest.importorskip(package)
    for found in two.run(WALK.walked, package):
        assert some <= found.keys()
        assert {name: problems for name, problems in found.items() if problems} == {}


def test_an_evaluation_leaves_no_trace_where_the_optimizer_switches_weights(two: Ranks) -> None:
    pytest.importorskip("schedulefree")
    for found in two.run(WALK.evaluated):
        assert found.pop("rounding"), "to switch there and back would lose nothing"
        assert {name: problems for name, problems in found.items() if problems} == {}
