"""Every callback, scheduler, optimizer and, one at a time, option of the Trainer and of Accelerate: killed within an epoch, and
some in an evaluation and stopped in the next one, a job ends in the bits of one that nobody disturbed. Every option is walked, or
it is said why not; ``e2e/test_integrations_service.py`` has what is refused.

A few by default; RATCHET_TEST_OPTIONS=all: all of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from ratchet_contract.errors import UserError
from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.fork_server import LIBRARIES
from tests.support.full_matrix import FULL, full
from tests.support.launch import Attempt, Job
from tests.support.optional_packages import missing_reason, skip_if_missing

pytestmark = [
    pytest.mark.slow,
    skip_if_missing("accelerate"),
    skip_if_missing("transformers"),
]

CODE: Final = Path(__file__).parents[3] / "support" / "options_job"
EVERY: Final = 5
KILL: Final = 16  # in it, or in its evaluation: behind step 15, which ends no epoch (12 steps; accumulated by two 6)
STOP: Final = 24  # asked for in the evaluation of this step
WATCHED: Final = {"eval_strategy": "steps", "eval_steps": 4}
STOPPING: Final = {**WATCHED, "metric_for_best_model": "eval_loss", "greater_is_better": False}

CALLBACKS: Final[dict[str, dict[str, Any]]] = {
    "TrainerCallback": {},
    "DefaultFlowCallback": {},
    "ProgressCallback": {},
    "PrinterCallback": {},
    "EarlyStoppingCallback": {"early_stopping_patience": 6, "early_stopping_threshold": 0.1},
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
OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "adafactor": {},
    "sgd": {"optim_args": "momentum=0.9"},
    "adagrad": {"optim_args": "lr_decay=0.01"},
    "rmsprop": {"optim_args": "momentum=0.5,centered=True"},
}
_LOW_RANK: Final = {"optim_target_modules": "all-linear", "optim_args": "rank=2,update_proj_gap=7"}
OF_A_PACKAGE: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "adamw_torch_xla": ("torch_xla", {}),
    "adamw_torch_npu_fused": ("torch_npu", {}),
    "adamw_anyprecision": ("torchdistx", {}),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("torchao", {})),
    **dict.fromkeys(
        (
            "ademamix", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
            "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
            "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
        ),
        ("bitsandbytes", {}),
    ),
    **dict.fromkeys(
        (
            "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
        ),
        ("galore_torch", _LOW_RANK),
    ),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), ("apollo_torch", _LOW_RANK)),
    **dict.fromkeys(("lomo", "adalomo"), ("lomo_optim", {})),
    "grokadamw": ("grokadamw", {}),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), ("schedulefree", {})),
    "stable_adamw": ("optimi", {}),
}  # fmt: skip
"""Optimizers that another package brings: walked where it is installed."""
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
    "fp16_full_eval": {**WATCHED, "fp16_full_eval": True},
    "activation_checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
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
    "eval_do_concat_batches": {**WATCHED, "eval_do_concat_batches": False, "eval_use_gather_object": True},
    "batch_eval_metrics": {**WATCHED, "batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]},
    "prediction_loss_only": {**WATCHED, "prediction_loss_only": True, "label_names": ["labels"]},
    "use_cache": {"use_cache": True},
    "metric_for_best_model": STOPPING,
    "dataloader_drop_last": {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "num_train_epochs": 8},
    "no dataloader_drop_last": {"per_device_train_batch_size": 5, "num_train_epochs": 8},
    "dataloader_num_workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3},
    "remove_unused_columns": {"remove_unused_columns": False},
    "sequential": {"train_sampling_strategy": "sequential"},
    "train_sampling_strategy": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "save_strategy": {**STOPPING, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 2},
    "load_best_model_at_end": {**STOPPING, "save_strategy": "best", "load_best_model_at_end": True},
    "seed": {"seed": 5},
    "data_seed": {"data_seed": 5},
    "torch_compile": {"torch_compile": True},
    "torch_compile_backend": {"torch_compile_backend": "eager"},
    "ddp_find_unused_parameters": {"ddp_find_unused_parameters": False},
    "dataloader_multiprocessing_context": {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"},
    "full_determinism": {"full_determinism": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "restore_callback_states_from_checkpoint": {"restore_callback_states_from_checkpoint": True},
    "skip_memory_metrics": {"skip_memory_metrics": False},
    "debug": {"debug": "underflow_overflow"},
    "even_batches": {"accelerator_config": {"even_batches": False}},
    "use_seedable_sampler": {"accelerator_config": {"use_seedable_sampler": False, "non_blocking": True}},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "gradient_accumulation_kwargs": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 6,
    },
}
ACCELERATE: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "accumulation": {"accumulated": 3},
    "adjust_scheduler": {"accumulated": 2, "plugin": {"adjust_scheduler": False}},
    "sync_with_dataloader": {"accumulated": 2, "plugin": {"sync_with_dataloader": False}},
    "sync_each_batch": {"accumulated": 2, "plugin": {"sync_each_batch": True}},
    "step_scheduler_with_optimizer": {"accelerator": {"step_scheduler_with_optimizer": False}, "accumulated": 2},
    "one cycle": {"scheduler": "cycle"},
    "warm restarts": {"scheduler": "warm restarts", "accelerator": {"step_scheduler_with_optimizer": False}},
    "plateau": {"scheduler": "plateau", "accelerator": {"step_scheduler_with_optimizer": False}},
    "even_batches": {"loader": {"even_batches": False}},
    "split_batches": {"loader": {"split_batches": True}},
    "use_seedable_sampler": {"loader": {"use_seedable_sampler": True, "data_seed": 3, "non_blocking": True}},
    "an evaluation": {"clip": "norm", "accumulated": 2, "evaluation": 2},
    "clip_grad_value_": {"clip": "value"},
    "autocast": {"accelerator": {"mixed_precision": "bf16"}},
    "no autocast": {"accelerator": {"mixed_precision": "bf16"}, "autocast": {"enabled": False}},
    "tracker": {"accelerator": {"log_with": "tensorboard", "project_dir": "logs"}},
    "rng_types": {"accelerator": {"rng_types": ["torch", "generator"]}},
}
FEW: Final = {"an evaluation"}

IN_EVERY_CASE: Final = {"per_device_train_batch_size", "learning_rate", "use_cpu"}
REFUSED: Final[dict[str, Any]] = {
    "accelerator_config": SimpleNamespace(dispatch_batches=True),
    "auto_find_batch_size": True,
    "deepspeed": "zero.json",
    "enable_jit_checkpoint": True,
    "fsdp": True,
    "ignore_data_skip": True,
    "parallelism_config": object(),
}
"""What ``training_arguments.refuse`` refuses by the field's name."""
NO_EFFECT: Final[dict[str, str]] = {
    **dict.fromkeys(("save_only_model", "save_on_each_node"), "what is in checkpoints of its own"),
    **dict.fromkeys(("ddp_backend", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), "of the spec, which an event tells"),
    "ddp_static_graph": "of the spec, which an event tells",
    "ddp_timeout": "until train(), which an event tells",
    "resume_from_checkpoint": "for scripts to read; test_trainer_jobs.py",
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"), "uploads copies, over the network"
    ),
    **dict.fromkeys(("hub_strategy", "hub_always_push", "hub_revision"), "uploads copies, over the network"),
    **dict.fromkeys(("report_to", "run_name", "project", "output_dir"), "where logs and files go"),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "where logs go"),
    **dict.fromkeys(("log_on_each_node", "log_level", "log_level_replica", "disable_tqdm"), "what is printed"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "for scripts to read"),
    "torch_compile_mode": "how long the compiler searches",
    "dataloader_in_order": "False is told as what is not exact",
    "dataloader_pin_memory": "where batches lie on their way to a GPU",
    "fsdp_config": "of fsdp, which is refused",
    "length_column_name": "of datasets that have one",
    "local_rank": "the launcher's variables tell",
}
NOT_HERE: Final[dict[str, str]] = {
    "fp16": "needs a GPU",
    "tf32": "needs a GPU",
    "use_liger_kernel": "needs a GPU and liger_kernel",
    "liger_kernel_config": "needs a GPU and liger_kernel",
    "optim_target_modules": "of GaLore's and APOLLO's optimizers, which packages bring",
}
ACCELERATE_GIVEN: Final = {"cpu", "gradient_accumulation_steps", "gradient_accumulation_plugin", "dataloader_config"}
ACCELERATE_OTHER: Final[dict[str, str]] = {
    "deepspeed_plugin": "refused as deepspeed_plugins",
    "deepspeed_plugins": "refused",
    "device_placement": "where tensors lie",
    "dynamo_backend": "refused",
    "dynamo_plugin": "refused",
    "fsdp_plugin": "refused on a GPU, where alone it means something",
    "megatron_lm_plugin": "refused",
    "parallelism_config": "refused",
    "project_config": "where files go",
    "split_batches": "Accelerate itself does not read it; dataloader_config",
    "torch_tp_plugin": "refused as parallelism_config",
}


def command(script: str, case: dict[str, Any], *, killed: bool) -> list[str]:
    told = {**case, "every": EVERY, "kill": KILL if killed else -1, "stop": STOP if killed else -1}
    return [script, json.dumps(told)]


class Cell(Job):
    """A job of ``script`` in ``options_job``, whose libraries are imported already."""

    def __init__(self, home: Path, script: str, case: dict[str, Any], *, killed: bool) -> None:
        super().__init__(
            home / ("killed" if killed else "whole"),
            {
                "script": command(script, case, killed=killed),
                "code": {"path": str(CODE)},
                "checkpoint": {"every_steps": EVERY, "first": "off"},
                "seed": 7,
            },
            CODE,
            job_id="job",
            interpreters=LIBRARIES,
        )


def attempts(jobs: list[Job], home: Path, script: str, case: dict[str, Any]) -> tuple[Attempt, Attempt]:
    """The first ones, undisturbed and killed, over."""
    whole, killed = (Cell(home, script, case, killed=killed) for killed in (False, True))
    jobs += [whole, killed]
    first = whole.launch(), killed.launch()
    for attempt in first:
        attempt.wait(900 if "torch_compile" in case.get("arguments", {}) else 120)  # by inductor
    return first


def assert_exact(jobs: list[Job], home: Path, script: str, case: dict[str, Any]) -> None:
    undisturbed, killed = attempts(jobs, home, script, case)
    assert undisturbed.wait().cause is Cause.COMPLETED, undisturbed.logs()
    assert killed.wait().cause is Cause.RANK_KILLED, killed.logs()
    bases = [{15}]
    if "evaluation" in case:
        stopped = killed.job.launch()
        assert stopped.wait(120).cause is Cause.SIGTERM, stopped.logs()
        bases += [{STOP, STOP + 1}]  # another rank may have begun the next step before it heard of the stop
    resumed = killed.job.launch()
    assert resumed.wait(900 if "torch_compile" in case.get("arguments", {}) else 120).cause is Cause.COMPLETED, (
        resumed.logs()
    )
    reports = [attempt.report() for attempt in killed.job.attempts[1:]]
    assert all(one.verdict == "exact" for one in reports), reports
    assert all(one.base.step in steps for one, steps in zip(reports, bases, strict=True)), reports
    comparison = compare(undisturbed.job.newest(), killed.job.newest())
    assert comparison.tensors and comparison.identical, render(comparison)
    logged = {step: values for attempt in killed.job.attempts for step, values in lasting(attempt).items()}
    assert logged == lasting(undisturbed) != {}


def lasting(attempt: Attempt) -> dict[int, dict[str, float]]:
    """Its metrics, without the time and the memory that something took."""

    def lasts(name: str) -> bool:
        return not name.endswith(("_runtime", "_per_second")) and "_mem_" not in name

    return {step: {k: v for k, v in at.items() if lasts(k)} for step, at in attempt.metrics().items()}


def some(names: dict[str, Any]) -> list[Any]:
    return [name for name in names if FULL or name in FEW] or [pytest.param("all", marks=full)]


def trainer(callbacks: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    evaluation = {"evaluation": 2} if "EarlyStoppingCallback" in callbacks else {}
    return {"callbacks": callbacks, "arguments": arguments, **evaluation}


def classes() -> set[str]:
    """Of callbacks that the installed transformers ships for every training."""
    from transformers import trainer_callback

    found = {n: one for n, one in vars(trainer_callback).items() if isinstance(one, type)}
    return {
        n for n, one in found.items() if issubclass(one, trainer_callback.TrainerCallback) and n != "CallbackHandler"
    }


def values(enum: type[Enum]) -> set[str]:
    return {one.value for one in enum}


def test_every_trainer_callback_scheduler_and_optimizer_is_covered() -> None:
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert classes() == set(CALLBACKS) and values(SchedulerType) == set(SCHEDULERS)
    assert values(OptimizerNames) == {*OPTIMIZERS, *OF_A_PACKAGE} and not OPTIMIZERS.keys() & OF_A_PACKAGE.keys()


def names(kind: type) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)}


def test_every_training_argument_is_covered_or_excluded() -> None:
    from transformers.trainer_pt_utils import AcceleratorConfig
    from transformers.training_args import TrainingArguments

    cases = [*OPTIONS.values(), *SCHEDULERS.values(), *OPTIMIZERS.values()]
    walked = {name for case in cases for name in case} | {"lr_scheduler_type", "optim"} | IN_EVERY_CASE
    told = [walked, REFUSED.keys() - walked, NO_EFFECT.keys(), NOT_HERE.keys()]
    assert names(TrainingArguments) == {name for part in told for name in part}
    assert sum(map(len, told)) == len({name for part in told for name in part}), "in one place each"
    of_accelerate = {name for case in cases for name in case.get("accelerator_config", {})}
    # refused; of a Trainer's own start
    assert names(AcceleratorConfig) == of_accelerate | {"dispatch_batches", "use_configured_state"}


@pytest.mark.parametrize("name", REFUSED)
def test_trainer_refuses_unsupported_argument_by_name(tmp_path: Path, name: str) -> None:
    from transformers.training_args import TrainingArguments

    from ratchet_worker.integrations.training_arguments import check_arguments

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    check_arguments(arguments)
    object.__setattr__(arguments, name, REFUSED[name])
    with pytest.raises(UserError, match=f"^{name}"):
        check_arguments(arguments)


def test_every_accelerate_argument_is_covered_or_excluded() -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import GradientAccumulationPlugin

    cases = ACCELERATE.values()
    walked = {name for case in cases for name in case.get("accelerator", {})} | {"kwargs_handlers"} | ACCELERATE_GIVEN
    given = inspect.signature(Accelerator).parameters.keys()
    assert given == walked | ACCELERATE_OTHER.keys() and not walked & ACCELERATE_OTHER.keys()
    loader = {name for case in cases for name in case.get("loader", {})}
    assert names(DataLoaderConfiguration) == loader | {"dispatch_batches", "use_stateful_dataloader"}  # refused
    assert names(GradientAccumulationPlugin) == {n for case in cases for n in case.get("plugin", {})} | {"num_steps"}


@pytest.mark.parametrize("name", some(OPTIMIZERS | OF_A_PACKAGE))
def test_trainer_with_optimizer_resumes_exactly(jobs: list[Job], tmp_path: Path, name: str) -> None:
    package, arguments = OF_A_PACKAGE[name] if name in OF_A_PACKAGE else ("torch", OPTIMIZERS[name])
    if why := missing_reason(package):
        pytest.skip(why)
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({}, optim=name, **arguments))


@pytest.mark.parametrize("name", some(CALLBACKS))
def test_trainer_with_callback_resumes_exactly(jobs: list[Job], tmp_path: Path, name: str) -> None:
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({name: CALLBACKS[name]}, **STOPPING))


@pytest.mark.parametrize("name", some(SCHEDULERS))
def test_trainer_with_scheduler_resumes_exactly(jobs: list[Job], tmp_path: Path, name: str) -> None:
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({}, lr_scheduler_type=name, **SCHEDULERS[name]))


@pytest.mark.parametrize("name", some(OPTIONS))
def test_trainer_with_option_resumes_exactly(jobs: list[Job], tmp_path: Path, name: str) -> None:
    if name == "torch_compile" and shutil.which("g++") is None:
        pytest.skip("no g++, which inductor needs on the CPU: apt-get install g++")
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer({}, **OPTIONS[name]))


@pytest.mark.skipif(FULL, reason="each of them has a job of its own")
def test_trainer_with_callback_scheduler_and_option_resumes_exactly(jobs: list[Job], tmp_path: Path) -> None:
    arguments = {**STOPPING, **SCHEDULERS["reduce_lr_on_plateau"], **OPTIONS["neftune_noise_alpha"]}
    callbacks = {"EarlyStoppingCallback": CALLBACKS["EarlyStoppingCallback"]}
    arguments["lr_scheduler_type"] = "reduce_lr_on_plateau"
    assert_exact(jobs, tmp_path, "trainer_options.py", trainer(callbacks, **arguments))


def test_trainer_resumes_on_another_number_of_ranks(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(Cell(tmp_path, "trainer_options.py", trainer({}), killed=True))
    assert jobs[0].launch().wait(120).cause is Cause.RANK_KILLED, jobs[0].attempts[0].logs()
    one = {"world": {"ranks_per_node": 1, "device": "cpu"}, "policy": {"on_hook_mismatch": "redistribute"}}
    refused = jobs[0].launch(spec=one)
    result = refused.wait(120)
    assert result.cause is Cause.USER_ERROR and "steps_per_epoch was 12, now it is 24" in str(result.message), result
    assert "on half of the ranks twice per_device_train_batch_size" in str(result.message)
    twice = command("trainer_options.py", trainer({}, per_device_train_batch_size=4, ddp_timeout=60), killed=True)
    resumed = jobs[0].launch(spec={"script": twice})
    assert resumed.wait(120).cause is Cause.COMPLETED, resumed.logs()
    assert [note.type for note in resumed.messages(kind="note")].count("ddp-timeout") == 1
    report = resumed.report()
    assert report.verdict == "not-exact" and report.base.step == 15
    (data,) = (component for component in report.components if component.component == "data")
    assert "epoch 1 begins again" in str(data.reason)
    logged = resumed.metrics()
    assert {step: at["epoch"] for step, at in logged.items()} == {
        20: 1 + 8 / 12,
        25: 2 + 1 / 12,
        30: 2.5,
        35: 2 + 11 / 12,
        36: 3.0,
    }


@pytest.mark.parametrize("name", some(ACCELERATE))
def test_accelerate_with_option_resumes_exactly(jobs: list[Job], tmp_path: Path, name: str) -> None:
    if name == "tracker" and (why := missing_reason("tensorboard")):  # without it Accelerate has none, and says nothing
        pytest.skip(why)
    assert_exact(jobs, tmp_path, "accelerate_options.py", ACCELERATE[name])
