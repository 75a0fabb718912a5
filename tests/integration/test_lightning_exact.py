"""Every callback that Lightning ships and every way to step a scheduler, killed and resumed in a Session: the same bits."""

from __future__ import annotations

import inspect
import os
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from tests.support.lightning_jobs import LightningJob, difference

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="the extra `lightning` is not installed")
AGENTS = "libraries"
ALL = os.environ.get("RATCHET_TEST_LIGHTNING") == "all"

# Six batches in an epoch, a save every three steps: in the middle of an epoch, at its last batch, within a validation, and at
# the start of an epoch.
EVERYWHERE = [("batch", 7, 3), ("batch", 11, 6), ("validation", 2, 12), ("epoch", 3, 15)]
AVERAGED = [("batch", 9, 3), ("validation", 2, 9)]  # with two batches in each step of the first epochs
WITHIN = [("batch", 10, 9)]
TIMES = ("train/", "train|", "validate/", "validate|", "DeviceStatsMonitor")

WATCHING = [
    "Callback", "Checkpoint", "Curriculum", "DeviceStatsMonitor", "EarlyStopping", "LambdaCallback", "LearningRateMonitor",
    "ModelCheckpoint", "OnExceptionCheckpoint", "RichModelSummary", "SpikeDetection", "TQDMProgressBar",
    "ThroughputMonitor", "Timer",
]  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]]]] = {
    "watching": ({"callbacks": WATCHING, "scheduler": ["plateau", "epoch", "loss_epoch"], "epochs": 6}, EVERYWHERE),
    "averaging": ({"callbacks": ["EMAWeightAveraging", "GradientAccumulationScheduler", "RichProgressBar"]}, AVERAGED),
    "hooks": ({"callbacks": ["Keeps", "ModelSummary"], "trainer": {"val_check_interval": 0.5}}, WITHIN),
    "finder": ({"callbacks": ["LearningRateFinder", "WeightAveraging", "BasePredictionWriter"]}, WITHIN),
    "swa": ({"callbacks": ["StochasticWeightAveraging", "ProgressBar"], "norm": False}, [("batch", 10, 9), ("batch", 20, 18)]),
}  # fmt: skip
REFUSED = {
    "BackboneFinetuning": "BackboneFinetuning is not supported",
    "BaseFinetuning": "Mine is not supported",
    "BatchSizeFinder": "not supported with distributed strategies",  # Lightning's own
    "ModelPruning": "ModelPruning is not supported",
    "StochasticWeightAveraging": "with batch norm is not supported",
}


def test_every_callback_that_lightning_ships_is_walked() -> None:
    from lightning.pytorch import callbacks

    shipped = {n for n in callbacks.__all__ if inspect.isclass(getattr(callbacks, n))}
    walked = {name for case, _ in CASES.values() for name in case["callbacks"]}
    assert shipped == (walked | REFUSED.keys()) - {"Curriculum", "Keeps"}


@pytest.mark.parametrize("name", CASES)
def test_callbacks(tmp_path: Path, name: str) -> None:
    case, kills = CASES[name]
    assert difference(tmp_path, case, kills, unlike=TIMES) == []


INTERVALS, MONITORS = ("step", "epoch"), ("accuracy", "loss_epoch", "loss_step")
STEPPED = [("plateau", i, m) for i, m in product(INTERVALS, MONITORS)]
STEPPED += [(kind, i, None) for kind, i in product(("exponential", "cosine"), INTERVALS)]


@pytest.mark.parametrize("scheduler", STEPPED if ALL else STEPPED[:1], ids=lambda s: "-".join(map(str, s)))
def test_schedulers(tmp_path: Path, scheduler: tuple[str, str, str | None]) -> None:
    case = {"scheduler": scheduler, "batches": 5, "trainer": {"accumulate_grad_batches": 2}}
    assert difference(tmp_path, case, [("batch", 13, 6)] if not ALL else [("batch", 8, 3), ("validation", 3, 9)]) == []


@pytest.mark.parametrize("name", REFUSED if ALL else ["BackboneFinetuning", "StochasticWeightAveraging"])
def test_what_cannot_be_resumed_is_refused_before_the_first_step(tmp_path: Path, name: str) -> None:
    job = LightningJob(tmp_path, {"callbacks": [name]}, "refused")
    try:
        attempt = job.run()
        assert attempt.wait().cause is not Cause.COMPLETED and REFUSED[name] in attempt.logs()
        assert job.checkpoints() == []
    finally:
        job.close()
