"""Lightning, alone: a training that goes on from one of its checkpoints ends in the bits of one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from tests.support.full_matrix import full
from tests.support.gloo_ranks import Named, Ranks
from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("lightning")
runs = Named("tests.support.lightning_runs")


@full
def test_unmanaged_lightning_does_not_resume_exactly_under_powersgd(two_ranks: Ranks, tmp_path: Path) -> None:
    """The control: nothing random in the net, so that what is missing is the hook's state alone."""
    found = two_ranks.run(runs.resume_difference, str(tmp_path), "plain", 6, {"noise": False})
    assert min(found) > 1e-3


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "end of an epoch": ("ratchet", 6, {}),
    "within an epoch": ("ratchet", 8, {"every_steps": 4, "resumable": True}),
    "last batch of an epoch": ("ratchet", 6, {"every_steps": 3, "resumable": True}),
    "accumulation": ("ratchet", 4, {"every_steps": 2, "resumable": True, "accumulate": 2}),
    "static graph": ("static_graph", 6, {}),
    "post_localSGD": ("post_localSGD", 6, {}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_managed_lightning_resumes_exactly(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    kind, step, options = CASES[name]
    assert two_ranks.run(runs.resume_difference, str(tmp_path), kind, step, options) == [0.0, 0.0]


def test_managed_hook_runs_on_cpu_and_rank_0_logs_that_lightning_skips(two_ranks: Ranks, tmp_path: Path) -> None:
    assert [hooks for hooks, _ in two_ranks.run(runs.hooks_on_cpu, str(tmp_path / "plain"), "skipping")] == [[], []]
    for rank, (hooks, said) in enumerate(two_ranks.run(runs.hooks_on_cpu, str(tmp_path / "ours"), "ratchet")):
        assert hooks == ["ManagedHook.on_bucket"]
        assert ("would have skipped it" in said) == (rank == 0)


def test_hook_entry_of_lightning_checkpoint_is_plain_tensors(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(runs.hook_entry, str(tmp_path)) == [{"version": 1, "dtypes": ["torch.uint8"] * 2}] * 2


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("manual optimization", "does not support manual optimization"),
        ("float16", "could skip a step"),
        ("ratchet", "holds no hook state"),
        ("reset", "nothing was refused"),
        ("other ranks", "recorded on 4 ranks, but this run has 2"),
        ("redistribute", "recorded on 4 ranks, resumed on 2: the state of hook powerSGD is redistributed"),
    ],
)
def test_unresumable_lightning_training_is_refused(two_ranks: Ranks, tmp_path: Path, what: str, answer: str) -> None:
    """``ratchet`` and ``reset``: a checkpoint that Lightning's own strategy wrote. ``redistribute``: rank 0 warns."""
    first, second = two_ranks.run(runs.refusal_message, str(tmp_path), what)
    assert answer in first and (answer in second or what == "redistribute")


STATE = power_sgd.PowerSGDState(None, matrix_approximation_rank=4)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"hook": "powerSGD", "ddp_comm_hook": power_sgd.powerSGD_hook}, "give hook or ddp_comm_hook, not both"),
        (
            {"hook": "powerSGD", "ddp_comm_state": STATE},
            "give ddp_comm_hook too and no hook, or hook with its parameters",
        ),
        ({"ddp_comm_state": STATE}, "ddp_comm_state is the state of ddp_comm_hook, which is missing"),
        (
            {
                "hook": "powerSGD",
                "wrapper": "fp16_compress_wrapper",
                "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
            },
            "give wrapper or ddp_comm_wrapper, not both",
        ),
    ],
)
def test_strategy_refuses_argument_that_it_would_ignore(arguments: dict[str, Any], answer: str) -> None:
    from ratchet_hooks.integrations.lightning import MisconfigurationException, RatchetDDPStrategy

    with pytest.raises(MisconfigurationException, match=answer):
        RatchetDDPStrategy(**arguments)


@pytest.mark.parametrize(("recorded_by", "stops"), [("mine", True), ("parent", False)])
def test_trainer_stopped_by_callback_stays_stopped_on_resume_but_not_in_a_fork(
    two_ranks: Ranks, tmp_path: Path, recorded_by: str, stops: bool
) -> None:
    """Killed after its last step, in a test behind ``fit``, the job asked for another step, and was refused it or trained on."""
    assert two_ranks.run(runs.resume_stopped_trainer, str(tmp_path), recorded_by) == [stops] * 2


def test_resume_with_other_batches_per_epoch_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    """On another number of ranks the epoch that was begun ended without its validation and its scheduler's step."""
    for said in two_ranks.run(runs.resume_stopped_trainer, str(tmp_path), "mine", 44):
        assert "batches_per_epoch was 22, now it is 44" in str(said) and "batch_size times the number of ranks" in str(
            said
        )
