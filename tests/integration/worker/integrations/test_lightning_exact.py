"""Every callback that Lightning ships, every argument of its Trainer and every way to step a scheduler, killed and stopped, in
validations too, and resumed in a Session: the same bits. RATCHET_TEST_LIGHTNING=all: all of them, by default a part."""

from __future__ import annotations

import csv
import inspect
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from tests.support.launch import Job
from tests.support.lightning_jobs import Kill, LightningJob, resume_differences
from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("lightning")
AGENTS = "libraries"
ALL = os.environ.get("RATCHET_TEST_LIGHTNING") == "all"

# Six batches in an epoch, a save every three steps: in the validation before the first step, in the middle of an epoch, within a
# validation, stopped in one, at the last batch of an epoch, and at the start of one.
EVERYWHERE: list[Kill] = [
    ("sanity", 0, None), ("batch", 7, 3), ("validation", 1, 9), ("validation", 1, None, "SIGTERM"), ("batch", 17, 15),
    ("validation", 2, 15), ("epoch", 3, 15),
]  # fmt: skip
AVERAGED: list[Kill] = [("batch", 9, 3), ("validation", 2, 9)]  # with two batches in each step of the first epochs
WITHIN: list[Kill] = [("batch", 10, 9)]
TIMES = ("train/", "train|", "validate/", "validate|", "DeviceStatsMonitor")
# in an epoch, at its first batch, at the start of one, and before the first batch
TOUCHED: list[Kill] = [("batch", 8, 6), ("batch", 10, 9), ("epoch", 3, 15), ("epoch", 3, None, "SIGTERM")]

WATCHING = [
    "Callback", "Checkpoint", "Curriculum", "DeviceStatsMonitor", "EarlyStopping", "LambdaCallback", "LearningRateMonitor",
    "ModelCheckpoint", "OnExceptionCheckpoint", "RichModelSummary", "SpikeDetection", "TQDMProgressBar",
    "ThroughputMonitor", "Timer",
]  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], list[Kill]]] = {
    "watching": ({"callbacks": WATCHING, "scheduler": ["plateau", "epoch", "loss_epoch"], "epochs": 6}, EVERYWHERE),
    "averaging": ({"callbacks": ["EMAWeightAveraging", "GradientAccumulationScheduler", "RichProgressBar"]}, AVERAGED),
    "default file": ({"csv": True}, [("batch", 8, 6), ("validation", 2, 15)]),
    "hooks": ({"callbacks": ["Keeps", "ModelSummary"], "groups": True, "trainer": {"val_check_interval": 0.5}}, WITHIN),
    "finder": ({"callbacks": ["LearningRateFinder", "WeightAveraging", "BasePredictionWriter"]}, WITHIN),
    "touching": ({"touching": True, "epochs": 5}, TOUCHED),
    "reloaded data": (
        {"touching": True, "reload": True, "epochs": 5, "trainer": {"reload_dataloaders_every_n_epochs": 1}}, TOUCHED,
    ),
    "swa": ({"callbacks": ["StochasticWeightAveraging", "ProgressBar"], "norm": False}, [("batch", 10, 9), ("batch", 20, 18)]),
}  # fmt: skip
ARGUMENTS: dict[str, tuple[dict[str, Any], list[Kill]]] = {
    "an interval beyond an epoch": (
        {"val_check_interval": 8, "check_val_every_n_epoch": None}, [("batch", 10, 9), ("validation", 2, 15)],
    ),
    "parts of epochs": (
        {
            "limit_train_batches": 0.7, "limit_val_batches": 1, "val_check_interval": 0.5, "check_val_every_n_epoch": 2,
            "reload_dataloaders_every_n_epochs": 1,
        },
        [("batch", 7, 6), ("batch", 13, 12)],
    ),
    "clipped": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "bf16-mixed", "detect_anomaly": True},
        WITHIN,
    ),
    "clipped by norm": ({"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, [("batch", 13, 6)]),
    "64 bits": ({"precision": "64-true", "max_steps": 17, "inference_mode": False}, WITHIN),
    "16 bits": ({"precision": "bf16-true", "min_epochs": 2, "min_steps": 20}, WITHIN),
    "time": ({"max_time": {"hours": 1}, "profiler": "simple", "deterministic": True, "benchmark": False}, WITHIN),
    "a short run": ({"fast_dev_run": 6}, [("batch", 4, 3)]),
    "few batches again": ({"overfit_batches": 4, "check_val_every_n_epoch": 2}, [("batch", 10, 9)]),
    "every sample on each rank": ({"use_distributed_sampler": False, "limit_train_batches": 7}, WITHIN),
    "without trial": ({"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_checkpointing": False}, WITHIN),
}  # fmt: skip
GIVEN = {"accelerator", "callbacks", "devices", "enable_progress_bar", "logger", "max_epochs", "num_nodes", "strategy"}
NOT_WALKED = {
    "barebones": "switches callbacks and logs off",
    "default_root_dir": "where files go",
    "enable_autolog_hparams": "what is logged",
    "enable_model_summary": "what is printed",
    "limit_predict_batches": "not of a training",
    "limit_test_batches": "not of a training",
    "model_registry": "uploads checkpoints of Lightning's",
    "plugins": "precision has its own argument; a checkpoint's form and a cluster's are the job's",
    "sync_batchnorm": "needs a GPU",
}
REFUSED = {
    "BackboneFinetuning": "BackboneFinetuning is not supported",
    "BaseFinetuning": "Mine is not supported",
    "BatchSizeFinder": "not supported with distributed strategies",  # Lightning's own
    "ModelPruning": "ModelPruning is not supported",
    "StochasticWeightAveraging": "with batch norm is not supported",
}


def test_every_lightning_callback_is_covered() -> None:
    from lightning.pytorch import callbacks

    shipped = {n for n in callbacks.__all__ if inspect.isclass(getattr(callbacks, n))}
    walked = {name for case, _ in CASES.values() for name in case.get("callbacks", [])}
    assert shipped == (walked | REFUSED.keys()) - {"Curriculum", "Keeps"}


@pytest.mark.parametrize("name", CASES if ALL else ["swa"])
def test_lightning_callback_resumes_exactly(tmp_path: Path, name: str) -> None:
    case, kills = CASES[name]
    assert resume_differences(tmp_path, case, kills, unlike=TIMES) == []


def test_what_a_hook_adds_and_cannot_be_stored_is_left_out_and_named(tmp_path: Path, jobs: list[Job]) -> None:
    case = {"callbacks": ["Keeps"], "epochs": 1, "kills": [("batch", 5, 3)]}
    jobs.append(job := LightningJob(tmp_path, case, "job"))
    for cause in (Cause.RANK_KILLED, Cause.COMPLETED):
        attempt = job.run()
        assert attempt.wait().cause is cause, attempt.logs()
        assert [note.data["names"] for note in attempt.notes()] == [["loops.type"]]
    assert attempt.report().sentence() == "exact"


def test_csv_file_that_a_kill_left_empty_does_not_stop_the_job(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(whole := LightningJob(tmp_path, {"csv": True, "epochs": 3}, "whole"))
    assert whole.run().wait().cause is Cause.COMPLETED
    kills: list[Kill] = [("batch", 8, 6), ("batch", 11, None)]
    jobs.append(cut := LightningJob(tmp_path, {"csv": True, "epochs": 3, "kills": kills}, "cut"))
    name = "logs/lightning_logs/version_0/metrics.csv"
    assert cut.run().wait().cause is Cause.RANK_KILLED
    (cut.paths.work_dir / name).write_bytes(b"")  # as while Lightning rewrites its header
    second = cut.run()
    assert second.wait().cause is Cause.RANK_KILLED, second.logs()
    assert [note.type for note in second.notes()] == ["csv-rows-lost"]
    last = cut.run()
    assert last.wait().cause is Cause.COMPLETED and last.report().sentence() == "exact", last.logs()
    assert last.notes() == []
    wanted, found = ([*csv.DictReader((job.paths.work_dir / name).read_text().splitlines())] for job in (whole, cut))
    lost = [n for n, row in enumerate(found) if not any(row.values())]
    assert lost and lost == [*range(len(lost))] and found[len(lost) :] == wanted[len(lost) :]


@pytest.mark.skipif(not ALL, reason="RATCHET_TEST_LIGHTNING=all runs it")
def test_manual_optimization_resumes_exactly(tmp_path: Path) -> None:
    kills: list[Kill] = [("batch", 10, 9), ("validation", 2, 15, "SIGTERM"), ("batch", 21, 18)]
    assert resume_differences(tmp_path, {"manual": True}, kills, ddp={"find_unused_parameters": True}) == []


def test_every_lightning_trainer_argument_is_covered_or_excluded() -> None:
    from lightning.pytorch import Trainer

    walked = {name for arguments, _ in ARGUMENTS.values() for name in arguments} | GIVEN
    known = inspect.signature(Trainer).parameters.keys()
    assert known == walked | NOT_WALKED.keys() and not walked & NOT_WALKED.keys()


LEFT_OUT = [pytest.param("all", marks=pytest.mark.skip(reason="RATCHET_TEST_LIGHTNING=all runs them"))]


@pytest.mark.parametrize("name", ARGUMENTS if ALL else LEFT_OUT)
def test_lightning_trainer_argument_resumes_exactly(tmp_path: Path, name: str) -> None:
    arguments, kills = ARGUMENTS[name]
    assert resume_differences(tmp_path, {"trainer": arguments, "epochs": 5}, kills, unlike=TIMES) == []


INTERVALS, MONITORS = ("step", "epoch"), ("accuracy", "loss_epoch", "loss_step")
STEPPED = [("plateau", i, m) for i, m in product(INTERVALS, MONITORS)]
STEPPED += [(kind, i, None) for kind, i in product(("exponential", "cosine"), INTERVALS)]


@pytest.mark.parametrize("scheduler", STEPPED if ALL else STEPPED[:1], ids=lambda s: "-".join(map(str, s)))
def test_lightning_scheduler_resumes_exactly(tmp_path: Path, scheduler: tuple[str, str, str | None]) -> None:
    case = {"scheduler": scheduler, "batches": 5, "trainer": {"accumulate_grad_batches": 2}}
    assert (
        resume_differences(tmp_path, case, [("batch", 13, 6)] if not ALL else [("batch", 8, 3), ("validation", 3, 9)])
        == []
    )


@pytest.mark.parametrize("name", REFUSED if ALL else ["BackboneFinetuning", "StochasticWeightAveraging"])
def test_unresumable_callback_is_refused_before_first_step(tmp_path: Path, name: str) -> None:
    job = LightningJob(tmp_path, {"callbacks": [name]}, "refused")
    try:
        attempt = job.run()
        assert attempt.wait().cause is not Cause.COMPLETED and REFUSED[name] in attempt.logs()
        assert job.checkpoints() == []
    finally:
        job.close()
