"""What each policy allows when the recorded hook is not the one asked for, for every pair of hooks; and the mean of replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.specs.compatibility import hook_change
from ratchet_hooks.specs.hook_specs import HookSpec, PostLocalSGDSpec, hook_spec
from ratchet_hooks.specs.registry import HOOKS, is_stateful, replicas_of
from ratchet_worker.state.average_replicas import follows_model, mean
from ratchet_worker.state.hook_transfer import describe_batch_change, reset_by_policy
from ratchet_worker.state.snapshot import Snapshot

EXTRA: dict[str, dict[str, Any]] = {"custom": {"hook": "m:f", "state": "m:S"}, "post_localSGD": {"subgroup_size": 1}}
LOW_RANK = {"powerSGD", "batched_powerSGD"}


def hook(name: str, **parameters: Any) -> HookSpec:
    return hook_spec({"name": name, **EXTRA.get(name, {}), **parameters})


def allowed(old: HookSpec, new: HookSpec) -> set[str]:
    """The policies under which a checkpoint of ``old`` may be gone on from under ``new``."""
    change = hook_change(old.name, old.values(), new)
    policies = ("fail", "redistribute", "reset")
    return {p for p in policies if change is None or change.refusal(p) is None}


@pytest.mark.parametrize("old", HOOKS)
@pytest.mark.parametrize("new", HOOKS)
def test_hook_change_outcome_for_every_pair_and_policy(old: str, new: str) -> None:
    change = hook_change(old, hook(old).values(), hook(new))
    if old == new:
        assert change is None
        return
    assert change is not None and change.description == f"hook {old} -> {new}"
    carried = {old, new} == LOW_RANK
    stateful, differ = is_stateful(hook(old)), replicas_of(hook(old)) != "equal"
    assert change.state == ("carried" if carried else "lost" if stateful else "none")
    needs_equal = replicas_of(hook(new)) == "equal" or new == "post_localSGD"
    assert change.averages is (differ and needs_equal)
    expected = {"reset"}
    if carried or not stateful:
        expected.add("redistribute")
    if not stateful and not change.averages:
        expected.add("fail")
    assert allowed(hook(old), hook(new)) == expected
    for policy in {"fail", "redistribute"} - expected:
        refusal = change.refusal(policy) or ""
        assert change.description in refusal and "reset" in refusal
        assert ("redistribute" in refusal) is ("redistribute" in expected)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (hook("powerSGD"), hook("powerSGD", random_seed=7), {"fail", "redistribute", "reset"}),
        (hook("batched_powerSGD"), hook("batched_powerSGD", min_compression_rate=9), {"fail", "redistribute", "reset"}),
        (hook("powerSGD"), hook("powerSGD", min_compression_rate=9), {"redistribute", "reset"}),
        (hook("powerSGD"), hook("powerSGD", wrapper="bf16"), {"redistribute", "reset"}),
        (hook("powerSGD"), hook("powerSGD", matrix_approximation_rank=4), {"redistribute", "reset"}),
        (hook("allreduce"), hook("allreduce", wrapper="fp16"), {"fail", "redistribute", "reset"}),
        (
            hook("quantization_perchannel"),
            hook("quantization_perchannel", bucket_size=8),
            {"fail", "redistribute", "reset"},
        ),
        (hook("custom"), hook("custom", hook="m:g", state_args={"a": 1}), {"redistribute", "reset"}),
        (hook("custom"), hook("custom", state="m:T"), {"reset"}),
        (hook("custom"), hook("custom", wrapper="fp16"), {"reset"}),
        (hook("custom", state=None), hook("custom", state="m:T"), {"fail", "redistribute", "reset"}),
        (hook("custom", state=None, replicas="rank"), hook("custom", state=None), {"redistribute", "reset"}),
        (hook("post_localSGD"), hook("post_localSGD", model_averaging_period=9), {"redistribute", "reset"}),
    ],
)
def test_hook_parameter_or_wrapper_change_outcome_per_policy(old: HookSpec, new: HookSpec, expected: set[str]) -> None:
    assert allowed(old, new) == expected


def test_post_local_sgd_subgroup_change_averages_replicas() -> None:
    old = PostLocalSGDSpec(subgroup_size=2)
    for changes, averages in (
        ({"subgroup_size": 4}, True),
        ({"post_local_gradient_allreduce": False}, True),
        ({"start_localSGD_iter": 900}, True),
        ({"model_averaging_period": 9}, False),
    ):
        changed = hook_change("post_localSGD", old.values(), replace(old, **changes))
        assert changed is not None and changed.averages is averages, changes


def test_recorded_hook_with_unknown_parameters_loses_state() -> None:
    change = hook_change("powerSGD", {"name": "powerSGD", "rank": 2}, hook("powerSGD"))
    assert change is not None and change.state == "lost" and change.refusal("redistribute") is not None
    earlier = hook_change("powerSGD", {"name": "powerSGD"}, hook("powerSGD"))  # of a version with fewer parameters
    assert earlier is None


def test_reset_policy_applies_only_to_recorded_state() -> None:
    assert reset_by_policy("reset", hook("allreduce"), "why") is None
    assert reset_by_policy("redistribute", hook("powerSGD"), "why") is None
    assert reset_by_policy("reset", hook("powerSGD"), "why") == "why, and on_hook_mismatch is reset"
    assert reset_by_policy("reset", None, "why") is not None


def replica(**tensors: torch.Tensor) -> Snapshot:
    private = {f"model/{name}" if "_" not in name else name.replace("_", "/"): t for name, t in tensors.items()}
    return Snapshot(private=private, state={"model": [], "optimizer": {"lr": 0.1}, "data": {}})


def test_replica_mean_rounds_once_and_keeps_equal_values() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, 3) for _ in range(3)]
    halves = [torch.randn(7).to(torch.bfloat16) for _ in range(3)]
    equal, steps = torch.tensor([-0.0, float("nan"), 0.1]), [torch.tensor(4), torch.tensor(5), torch.tensor(5)]
    made = mean(
        (
            replica(w=w, h=h, same=equal.clone(), optimizer_w_step=s, buffers_x=w)
            for w, h, s in zip(weights, halves, steps, strict=True)
        ),
        {"model", "optimizer"},
    )
    double = (weights[0].double() + weights[1].double() + weights[2].double()) / 3
    assert torch.equal(made.tensors["model/w"], double.float())
    assert torch.equal(made.tensors["model/h"], (sum(h.double() for h in halves) / 3).to(torch.bfloat16))  # type: ignore[union-attr]
    assert made.tensors["model/same"].view(torch.int32).tolist() == equal.view(torch.int32).tolist()
    assert made.tensors["optimizer/w/step"].item() == 4 and made.from_rank_0 == ["optimizer/w/step"]
    assert made.differing_components == {"model", "optimizer"} and "buffers/x" not in made.tensors
    assert mean([replica(w=weights[0])] * 4, {"model"}).differing_components == set()


def test_replica_mean_of_mismatched_replicas_raises() -> None:
    with pytest.raises(StateError, match="model/v: rank 1 has it and rank 0 has not"):
        mean([replica(w=torch.ones(2)), replica(w=torch.ones(2), v=torch.ones(1))], {"model"})
    with pytest.raises(StateError, match="model/w: rank 1 has"):
        mean([replica(w=torch.ones(2)), replica(w=torch.ones(3))], {"model"})
    with pytest.raises(StateError, match="no replica"):
        mean([], {"model"})
    other = replica(w=torch.ones(2))
    other.state["optimizer"] = {"lr": 0.2}
    made = mean([replica(w=torch.ones(2)), other], {"model", "optimizer"})
    assert made.from_rank_0 == ["optimizer"] and made.state["optimizer"] == {"lr": 0.1}


@pytest.mark.parametrize(
    ("state", "follows"),
    [
        (lambda w: {"0.weight": w(4, 3), "0.bias": w(4)}, True),
        (
            lambda w: {"module.module.0.weight": w(4, 3), "module.module.1.running_var": w(4)},
            True,
        ),  # AveragedModel of a DDP
        (lambda w: {"decay": torch.tensor(0.9), "shadow": {"0.weight": w(4, 3)}}, True),
        (lambda w: {"shadow_params": [w(4, 3), w(4)], "collected": None}, True),
        (lambda w: {"shadow_params": [w(4, 3).half(), w(4)]}, True),
        (lambda w: {"shadow_params": [w(4), w(4, 3)]}, False),
        (lambda w: {"0.weight": w(3, 4)}, False),
        (lambda w: {"10.weight": w(4, 3)}, False),
        (lambda w: {"0.weight": w(4, 3), "loss": w(1)}, False),
        (lambda w: {"0.weight": w(4, 3), "loss": float(w(1))}, False),
        (lambda w: {"weight": w(4, 3)}, False),
    ],
)
def test_state_shaped_like_model_follows_replica_mean(state: Callable[[Any], Any], follows: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
    ranks = []
    for _ in range(2):
        ranks.append(Snapshot())
        ranks[-1].add("user:average", state(torch.randn))
        ranks[-1].private = dict(sorted(ranks[-1].private.items(), key=lambda item: -item[1].itemsize))  # as in a file
    assert follows_model(mean(ranks, {"user:average"}), model) is follows


def test_batches_describes_change_of_global_batch_size() -> None:
    def state(ranks: int, size: int, batch_is: str) -> dict[str, Any]:
        return {"kind": "map", "world_size": ranks, "batch_size": size, "batch_is": batch_is}

    told = describe_batch_change(state(2, 32, "per_rank"), state(1, 32, "per_rank"))
    assert told == "the global batch was 64 and is 32: 32 per rank then, 32 now"
    assert (
        describe_batch_change(state(2, 64, "global"), state(4, 64, "global"))
        == "the global batch stays 64: 16 instead of 32 per rank"
    )
    assert describe_batch_change({"kind": "stream"}, {"kind": "stream"}) is None
