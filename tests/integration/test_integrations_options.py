"""Every callback of the Trainer and, one at a time, options of the Trainer and of Accelerate: killed within an epoch, a job
ends in the bits of one that nobody disturbed. What is refused is in ``e2e/test_integrations_service.py``.

A few by default; RATCHET_TEST_OPTIONS=all: all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from typing_extensions import override

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_store.compare import compare, render
from tests.support.interpreters import LIBRARIES, Program
from tests.support.launch import Attempt, Job

pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.skipif(find_spec(extra) is None, reason=f"the extra `{extra}` is not installed")
        for extra in ("accelerate", "transformers")
    ),
]

ALL: Final = os.environ.get("RATCHET_TEST_OPTIONS") == "all"
CODE: Final = Path(__file__).parents[1] / "support" / "options_job"
EVERY: Final = 5
KILL: Final = 17  # behind step 15, which ends no epoch (12 steps; accumulated by two 6)
WATCHED: Final = {"eval_strategy": "steps", "eval_steps": 4}
STOPPING: Final = {**WATCHED, "metric_for_best_model": "eval_loss", "greater_is_better": False}

CALLBACKS: Final[dict[str, dict[str, Any]]] = {
    "TrainerCallback": {},
    "DefaultFlowCallback": {},
    "ProgressCallback": {},
    "PrinterCallback": {},
    "EarlyStoppingCallback": {"early_stopping_patience": 4, "early_stopping_threshold": 0.1},
}
"""What each is made with. The Trainer adds some of them itself: then there are two."""
SCHEDULERS: Final[dict[str, dict[str, Any]]] = {
    "linear": {"warmup_steps": 5},
    "cosine": {"warmup_steps": 0.1},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 3}},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0}},
    "constant": {},
    "constant_with_warmup": {"warmup_steps": 20},
    "inverse_sqrt": {"warmup_steps": 3},
    "reduce_lr_on_plateau": {**STOPPING, "lr_scheduler_kwargs": {"patience": 0, "factor": 0.7}},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-5}, "warmup_steps": 4},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 10}, "warmup_steps": 4},
    "greedy": {**STOPPING},
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "max_steps": {"max_steps": 30},
    "optim_args": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"},
    "weight_decay": {"weight_decay": 0.1},
    "adam": {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2, "num_train_epochs": 6},
    "uneven accumulation": {"gradient_accumulation_steps": 5, "num_train_epochs": 12},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "no max_grad_norm": {"max_grad_norm": 0.0},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "bf16": {"bf16": True},
    "bf16_full_eval": {**WATCHED, "bf16_full_eval": True},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 2},
    "logging_strategy": {"logging_strategy": "epoch"},
    "logging_steps": {"logging_steps": 3, "logging_first_step": True},
    "logging_nan_inf_filter": {"logging_nan_inf_filter": False},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "all"},
    "eval_strategy": {"eval_strategy": "epoch"},
    "eval_steps": WATCHED,
    "eval_delay": {**WATCHED, "eval_delay": 9},
    "eval_on_start": {**WATCHED, "eval_on_start": True},
    "eval_accumulation_steps": {**WATCHED, "eval_accumulation_steps": 1, "per_device_eval_batch_size": 2},
    "batch_eval_metrics": {**WATCHED, "eval_do_concat_batches": False, "eval_use_gather_object": True},
    "metric_for_best_model": STOPPING,
    "dataloader_drop_last": {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "num_train_epochs": 8},
    "no dataloader_drop_last": {"per_device_train_batch_size": 5, "num_train_epochs": 8},
    "dataloader_num_workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3},
    "remove_unused_columns": {"remove_unused_columns": False},
    "train_sampling_strategy": {"train_sampling_strategy": "sequential"},
    "full_determinism": {"full_determinism": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "restore_callback_states_from_checkpoint": {"restore_callback_states_from_checkpoint": True},
    "skip_memory_metrics": {"skip_memory_metrics": False},
    "debug": {"debug": "underflow_overflow"},
    "even_batches": {"accelerator_config": {"even_batches": False}},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "use_seedable_sampler": {"accelerator_config": {"use_seedable_sampler": False}},
}
ACCELERATE: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "accumulation": {"accumulated": 3},
    "a step in the midst of an accumulation": {"accumulated": 2, "taken": 3},
    "adjust_scheduler": {"accumulated": 2, "plugin": {"adjust_scheduler": False}},
    "sync_with_dataloader": {"accumulated": 2, "plugin": {"sync_with_dataloader": False}},
    "sync_each_batch": {"accumulated": 2, "plugin": {"sync_each_batch": True}},
    "step_scheduler_with_optimizer": {"accelerator": {"step_scheduler_with_optimizer": False}, "accumulated": 2},
    "one cycle": {"scheduler": "cycle"},
    "warm restarts": {"scheduler": "warm restarts", "accelerator": {"step_scheduler_with_optimizer": False}},
    "plateau": {"scheduler": "plateau", "accelerator": {"step_scheduler_with_optimizer": False}},
    "even_batches": {"loader": {"even_batches": False}},
    "dispatch_batches": {"loader": {"dispatch_batches": True}},
    "split_batches": {"loader": {"split_batches": True}},
    "use_seedable_sampler": {"loader": {"use_seedable_sampler": True, "data_seed": 3}},
    "clip_grad_norm_": {"clip": "norm", "accumulated": 2},
    "clip_grad_value_": {"clip": "value"},
    "autocast": {"accelerator": {"mixed_precision": "bf16"}},
    "no autocast": {"accelerator": {"mixed_precision": "bf16"}, "autocast": {"enabled": False}},
    "tracker": {"accelerator": {"log_with": "tensorboard", "project_dir": "logs"}},
    "rng_types": {"accelerator": {"rng_types": ["torch", "generator"]}},
}
FEW: Final = {"EarlyStoppingCallback", "reduce_lr_on_plateau", "neftune_noise_alpha", "clip_grad_norm_"}


class Cell(Job):
    """A job of ``script`` in ``options_job``, whose libraries are imported already."""

    def __init__(self, home: Path, script: str, case: dict[str, Any], *, killed: bool) -> None:
        told = {**case, "every": EVERY, "kill": KILL if killed else -1}
        super().__init__(
            home / ("killed" if killed else "whole"),
            {
                "script": [script, json.dumps(told)],
                "code": {"path": str(CODE)},
                "checkpoint": {"every_steps": EVERY, "first": "off"},
                "seed": 7,
            },
            CODE,
            job_id="job",
        )

    @override
    def start_agent(self, paths: AttemptPaths) -> subprocess.Popen[bytes] | Program:
        with paths.agent_log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file)]
            return LIBRARIES.start(command, log.fileno())


def attempts(jobs: list[Job], home: Path, script: str, case: dict[str, Any]) -> tuple[Attempt, Attempt]:
    """The first ones, undisturbed and killed, over."""
    whole, killed = (Cell(home, script, case, killed=killed) for killed in (False, True))
    jobs += [whole, killed]
    first = whole.launch(), killed.launch()
    for attempt in first:
        attempt.wait(120)
    return first


def assert_exact(jobs: list[Job], home: Path, script: str, case: dict[str, Any]) -> None:
    undisturbed, killed = attempts(jobs, home, script, case)
    assert undisturbed.wait().cause is Cause.COMPLETED, undisturbed.logs()
    assert killed.wait().cause is Cause.RANK_KILLED, killed.logs()
    resumed = killed.job.launch()
    assert resumed.wait(120).cause is Cause.COMPLETED, resumed.logs()
    assert (resumed.report().base.step, resumed.report().verdict) == (15, "exact"), resumed.report()
    comparison = compare(undisturbed.job.newest(), killed.job.newest())
    assert comparison.tensors and comparison.identical, render(comparison)
    logged = {**lasting(killed), **lasting(resumed)}
    assert logged == lasting(undisturbed) != {}


def lasting(attempt: Attempt) -> dict[int, dict[str, float]]:
    """Its metrics, without the time and the memory that something took."""

    def lasts(name: str) -> bool:
        return not name.endswith(("_runtime", "_per_second")) and "_mem_" not in name

    return {step: {k: v for k, v in at.items() if lasts(k)} for step, at in attempt.metrics().items()}


def some(names: dict[str, Any]) -> list[str]:
    return [name for name in names if ALL or name in FEW]


def trainer(callbacks: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return {"callbacks": callbacks, "arguments": arguments}


def classes() -> set[str]:
    """Of callbacks that the installed transformers ships for every training."""
    from transformers import trainer_callback

    found = {n: one for n, one in vars(trainer_callback).items() if isinstance(one, type)}
    return {
        n for n, one in found.items() if issubclass(one, trainer_callback.TrainerCallback) and n != "CallbackHandler"
    }


def test_the_walk_has_every_callback_and_every_scheduler() -> None:
    from transformers.trainer_utils import SchedulerType

    assert classes() == set(CALLBACKS) and {one.value for one in SchedulerType} == set(SCHEDULERS)


@pytest.mark.parametrize("name", some(CALLBACKS))
def test_the_trainer_with_a_callback_is_exact(jobs: list[Job], tmp_path: Path, name: str) -> None:
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({name: CALLBACKS[name]}, **STOPPING))


@pytest.mark.parametrize("name", some(SCHEDULERS))
def test_the_trainer_with_a_scheduler_is_exact(jobs: list[Job], tmp_path: Path, name: str) -> None:
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({}, lr_scheduler_type=name, **SCHEDULERS[name]))


@pytest.mark.parametrize("name", some(OPTIONS))
def test_the_trainer_with_an_option_is_exact(jobs: list[Job], tmp_path: Path, name: str) -> None:
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({}, **OPTIONS[name]))


@pytest.mark.parametrize("name", some(ACCELERATE))
def test_accelerate_with_an_option_is_exact(jobs: list[Job], tmp_path: Path, name: str) -> None:
    assert_exact(jobs, tmp_path, "accelerate_options.py", ACCELERATE[name])
