"""Where a proof interrupts a run, and what it then says was exercised."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from ratchet_client.cli.prove.exercise import exercises
from ratchet_client.cli.prove.fault_plan import REDONE, Fault, fault_plan
from ratchet_client.cli.prove.trials import Facts, trial_spec

FACTS = Facts(58, 440, {"warm-up": 1, "compressing": 50}, [22, 44], [22, 44], True, 1, {"scheduler": 58}, True)
HOOK = {"name": "powerSGD", "start_powerSGD_iter": 50}


def test_fault_plan_kills_after_a_checkpoint_and_loses_steps() -> None:
    for steps, epoch, evaluate in product(range(1, 40), (3, 7, 22), (None, 2, 5, 7)):
        evaluations = [] if evaluate is None else [*range(evaluate, steps + 1, evaluate)]
        ends = [*range(epoch, steps + 1, epoch)]
        facts = replace(FACTS, step=steps, phases={"steady": 1}, epoch_ends=ends, evaluations=evaluations)
        plan = fault_plan(facts, 2)
        assert plan is not None or steps < 7
        for n, fault in enumerate(plan.faults if plan is not None else ()):
            assert (
                plan is not None
                and fault.attempt == n + 1
                and plan.every <= fault.step < steps
                and fault.rank in (0, 1)
            )
            assert n == 0 or plan.faults[n - 1].step < fault.step
            assert fault.kind == "preempt" or fault.step % plan.every >= REDONE
            assert fault.kind != "kill-in-evaluation" or fault.step in evaluations


def test_fault_plan_last_kill_is_after_epoch_end_and_hook_start() -> None:
    plan = fault_plan(FACTS, 2)
    assert plan is not None
    assert [fault.kind for fault in plan.faults] == ["kill-rank", "kill-in-evaluation", "kill-agent", "preempt"]
    assert plan.faults[0].step < 22 and plan.faults[1].step in (22, 44) and plan.faults[2].step > 50


def statuses(facts: Facts, faults: list[Fault]) -> dict[str, str]:
    return {one.name: one.status for one in exercises(facts, HOOK, faults)}


def test_proof_statuses_mark_features_not_exercised() -> None:
    faults = [Fault(1, 0, 52, "kill-rank")]
    assert set(statuses(FACTS, faults).values()) == {"exercised", "none seen"}
    assert statuses(FACTS, [Fault(1, 0, 7, "kill-rank")])["hook phase"] == "not exercised"  # none behind its start
    early = replace(FACTS, step=10, phases={"warm-up": 1}, epoch_ends=[], evaluations=[], schedulers={"scheduler": 0})
    assert statuses(early, faults) == {
        "hook phase": "not exercised", "end of an epoch": "not exercised", "evaluation": "not exercised",
        "scheduler": "not exercised", "accumulation": "none seen",
    }  # fmt: skip
    whole = statuses(replace(early, total=10), faults)  # there is no more to it, but for the hook that it asks for
    assert {name for name, status in whole.items() if status == "not exercised"} == {"hook phase"}
    script = statuses(replace(early, expects_evaluation=False, epochs=False, schedulers={}), faults)
    assert script["evaluation"] == script["end of an epoch"] == script["scheduler"] == "none seen"


def test_trial_uses_neither_the_experiment_trackers_nor_the_object_store_of_the_spec() -> None:
    spec: dict[str, Any] = {
        "name": "mine",
        "env": {"WANDB_MODE": "online", "COMET_MODE": "online", "MLFLOW_TRACKING_URI": "https://mlflow", "RATE": "1"},
        "checkpoint": {"uri": "s3://bucket/runs", "ignore": {"model.seen": "a log"}},
    }
    trial = trial_spec(spec, "whole", 10, 5, [])
    assert (trial["env"]["WANDB_MODE"], trial["env"]["COMET_MODE"]) == ("disabled", "disabled")
    assert trial["env"]["MLFLOW_TRACKING_URI"].startswith("file:") and trial["env"]["RATE"] == "1"
    assert "uri" not in trial["checkpoint"] and trial["checkpoint"]["ignore"] == {"model.seen": "a log"}
    assert spec["env"]["WANDB_MODE"] == "online" and spec["checkpoint"]["uri"] == "s3://bucket/runs"
