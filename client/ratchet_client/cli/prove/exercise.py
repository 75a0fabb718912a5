"""Determines which parts of a spec a proof has exercised. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from ratchet_client.cli.prove.fault_plan import Fault
from ratchet_client.cli.prove.trials import Facts
from ratchet_contract.plural import pluralize

Status = Literal["exercised", "not exercised", "none seen"]


class Exercise(BaseModel):
    """Whether a proof's runs exercised one part of the spec. ``status``: "none seen" means that Ratchet knows of no such part in
    the job. ``detail``: the reason for the status."""

    name: str
    status: Status
    detail: str


def exercises(facts: Facts, hook: Mapping[str, Any], faults: list[Fault]) -> list[Exercise]:
    """Return for each part of the spec, such as the hook, whether it was exercised. ``facts``: the facts of an undisturbed run.
    ``faults``: the interruptions that were carried out."""
    last = max((fault.step for fault in faults), default=0)
    return [
        _hook(facts, hook, last),
        _epoch(facts),
        _evaluation(facts, faults),
        _scheduler(facts),
        _accumulation(facts),
    ]


def _hook(facts: Facts, hook: Mapping[str, Any], last: int) -> Exercise:
    """Return whether the runs passed the hook's warm-up and an interruption came after that; a hook without a warm-up counts
    as exercised. ``last``: the step of the last interruption, 0 if there was none."""
    name = str(hook["name"])
    phases = ", ".join(f"{phase} from step {step}" for phase, step in facts.phases.items() if phase != "steady")
    if set(facts.phases) == {"warm-up"}:
        key, start = _start(hook)
        enough = start + 10
        told = f"{name}: only its warm-up; {_ACTS[name]} starts at step {start} ({key}), the runs had {facts.step}"
        if facts.total is not None and facts.total <= start:
            told += f"; the job itself ends at step {facts.total}, and never reaches it: lower hook.{key}"
        else:
            told += f": `--steps {enough}`, or `--set hook.{key}=10`"
        return Exercise(name="hook phase", status="not exercised", detail=told)
    begun = max((step for phase, step in facts.phases.items() if phase not in ("warm-up", "steady")), default=0)
    if begun > last:
        text = f"{name}: {phases}; no interruption came after that: give more `--steps`"
        return Exercise(name="hook phase", status="not exercised", detail=text)
    return Exercise(
        name="hook phase", status="exercised", detail=f"{name}: {phases}" if phases else f"{name}, from step 1"
    )


_ACTS = {"powerSGD": "compression", "batched_powerSGD": "compression", "post_localSGD": "local training"}


def _start(hook: Mapping[str, Any]) -> tuple[str, int]:
    """Return the hook's parameter that sets its first active step, and that step; ``("its start", 0)`` if there is none."""
    keys = [key for key in ("start_powerSGD_iter", "start_localSGD_iter") if key in hook]
    return (keys[0], int(hook[keys[0]])) if keys else ("its start", 0)


def _epoch(facts: Facts) -> Exercise:
    """Return whether the runs passed the end of an epoch."""
    if facts.epoch_ends:
        ends = ", ".join(map(str, facts.epoch_ends[:5]))
        return Exercise(name="end of an epoch", status="exercised", detail=f"after step {ends}")
    if not facts.epochs:
        text = "no data are registered with the Session: it sees no epochs"
        return Exercise(name="end of an epoch", status="none seen", detail=text)
    if facts.step == facts.total:
        return Exercise(name="end of an epoch", status="none seen", detail="the job ends within its first epoch")
    text = f"none within {pluralize(facts.step, 'step')}: give more `--steps`"
    return Exercise(name="end of an epoch", status="not exercised", detail=text)


def _evaluation(facts: Facts, faults: list[Fault]) -> Exercise:
    """Return whether the runs made an evaluation. The detail names the step of the evaluation in which a rank was killed, if
    there was one."""
    if facts.evaluations:
        killed = [f.step for f in faults if f.kind == "kill-in-evaluation"]
        text = f"after step {', '.join(map(str, facts.evaluations[:5]))}" + (
            f"; killed in that of step {killed[0]}" if killed else ""
        )
        return Exercise(name="evaluation", status="exercised", detail=text)
    if facts.expects_evaluation and facts.step != facts.total:
        text = f"none within {pluralize(facts.step, 'step')}: give more `--steps`"
        return Exercise(name="evaluation", status="not exercised", detail=text)
    text = (
        "none known to Ratchet. The script's own evaluation, if any, ran in all runs and is compared, too. If a script has a "
        "Session, a rank is killed within an evaluation within `with session.evaluation():`"
    )
    return Exercise(name="evaluation", status="none seen", detail=text)


def _scheduler(facts: Facts) -> Exercise:
    """Return whether each scheduler registered with the Session was stepped; not required in runs with all steps of the job."""
    if not facts.schedulers:
        return Exercise(name="scheduler", status="none seen", detail="none registered with the Session counts steps")
    still = [name for name, steps in facts.schedulers.items() if steps < 1]
    if still and facts.step != facts.total:
        text = f"{', '.join(still)} was not stepped within {pluralize(facts.step, 'step')}: give more `--steps`"
        return Exercise(name="scheduler", status="not exercised", detail=text)
    text = ", ".join(f"{name}: {pluralize(steps, 'step')}" for name, steps in facts.schedulers.items())
    return Exercise(name="scheduler", status="exercised", detail=text)


def _accumulation(facts: Facts) -> Exercise:
    """Return whether a step had several batches."""
    if facts.batches > 1:
        text = f"up to {facts.batches} batches in a step"
        return Exercise(name="accumulation", status="exercised", detail=text)
    text = (
        "each step is one batch, so none is cut within a step; gradients summed over steps are compared like all state"
        if facts.batches
        else "the script makes its own batches: their number per step is unknown. An interrupted step is redone as a whole"
    )
    return Exercise(name="accumulation", status="none seen", detail=text)
