"""``ratchet prove``: compares undisturbed runs with each other and with an interrupted run, or redoes some steps of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from itertools import takewhile
from typing import Any, Final, Literal

from pydantic import BaseModel

from ratchet_client.cli.commands.compare import MAX_LINES
from ratchet_client.cli.prove.exercise import Exercise, exercises
from ratchet_client.cli.prove.fault_plan import REDONE, Fault, fault_plan
from ratchet_client.cli.prove.trials import EVERY, LABEL, TRACKERS_OFF, Run, TrialFailed, Trials, trial_spec
from ratchet_client.cli.shared.options import absence_message
from ratchet_contract.api.requests import ForkRequest
from ratchet_contract.api.views import AttemptView, CheckpointView, ComparisonView, JobView, ResumeReportView
from ratchet_contract.errors import Conflict, Refused
from ratchet_contract.phases import Cause
from ratchet_contract.plural import pluralize

Verdict = Literal["proved", "not-exercised", "not-exact", "differs", "not-repeatable"]
_CAUSES: Final[dict[str, frozenset[Cause]]] = {
    "kill-rank": frozenset({Cause.RANK_KILLED, Cause.OOM}),
    "kill-in-evaluation": frozenset({Cause.RANK_KILLED, Cause.OOM}),
    "preempt": frozenset({Cause.SIGTERM}),
}


class Proof(BaseModel):
    """The result of a proof. ``what``: the examined job or spec. ``redone``: number of steps that were done again.
    ``metrics``: number of compared series of metrics. ``times``: series that are not judged, since they differ even between
    undisturbed runs. ``reports``: remarks on the resumes. ``lost``: a component whose state a resume lost. ``unseen``: state
    that was not compared."""

    verdict: Verdict
    what: str
    steps: int
    total: int | None
    comparison: ComparisonView
    interruptions: list[str] = []
    redone: int = 0
    metrics: int = 0
    metrics_differ: list[str] = []
    times: list[str] = []
    reports: list[str] = []
    lost: str | None = None
    unseen: list[str] = []
    exercised: list[Exercise] = []


def prove_spec(trials: Trials, spec: Mapping[str, Any], steps: int | None, upload: bool | None) -> Proof:
    """Run two undisturbed jobs of ``spec`` and, if they are equal, an interrupted one. Block until the jobs have ended, and
    return the result. ``steps``: the last step of the runs; None: it is chosen automatically. Raise ``TrialFailed`` if a run
    fails, ``SpecError`` for an invalid spec, and ``Refused`` if the runs are too short for a kill."""
    client = trials.client
    client.plan(spec, upload=upload, note=trials.say)  # errors must refer to the user's spec, not to the trial's

    def submit(role: str, end_at: int | None, every: int, faults: list[Fault]) -> str:
        """Submit a trial and return its job's id."""
        data = trial_spec(spec, role, end_at, every, [fault.to_spec() for fault in faults])
        return trials.add(client.submit(data, upload=upload, note=trials.say).view)

    roles = {submit(f"undisturbed-{n}", steps, EVERY, []): f"undisturbed run {n}" for n in (1, 2)}
    a, b = trials.wait(roles)
    if a.job.resolved.python != sys.executable:  # that of a service of another installation, or the spec's own
        trials.say(f"the jobs run with {a.job.resolved.python}: what is proved, is proved of its packages")
    found = client.compare(a.job.id, b.job.id)
    different = _different(a, b)
    if not found.identical or a.facts.step != b.facts.step:
        return _proof("not-repeatable", a, found, metrics_differ=[*different.values()])
    world = a.job.spec["world"]
    plan = fault_plan(a.facts, world["nodes"] * world["ranks_per_node"])
    if plan is None:
        raise Refused(
            f"the runs had {pluralize(a.facts.step, 'step')}, too few for a kill {REDONE} steps after a checkpoint: "
            "give more (--steps), or a job with more steps",
            code="trial-too-short",
        )
    (c,) = trials.wait({submit("interrupted", a.facts.step, plan.every, plan.faults): "interrupted run"})
    found = client.compare(a.job.id, c.job.id)
    times = sorted(different)
    metrics = [text for name, text in _different(a, c).items() if name not in times]
    struck = _carried_out_faults(c, plan.faults)
    exercised = [
        _interruptions(struck, plan.faults),
        *exercises(a.facts, a.job.spec["hook"], [fault for fault, _ in struck]),
    ]
    lacking = any(one.status == "not exercised" for one in exercised)
    verdict = _verdict(c, equal=found.identical and not metrics)
    return _proof(
        "not-exercised" if verdict == "proved" and lacking else verdict,
        a,
        found,
        interruptions=[_fault_text(fault, attempt) for fault, attempt in struck],
        redone=sum(attempt.steps_lost or 0 for _, attempt in struck),
        metrics_differ=metrics,
        times=times,
        reports=_reports(c.attempts),
        lost=_lost_component(c.attempts),
        unseen=c.carried,
        exercised=exercised,
    )


def _too_few(job: JobView, stored: int) -> str:
    """Return the error text for a job that has too few checkpoints for a proof. ``stored``: how many it has."""
    if not stored:
        found = absence_message(job, f"job {job.id} has no checkpoint")
    else:
        found = f"job {job.id} has {pluralize(stored, 'checkpoint')} stored"
    text = f"{found}; two of different steps are needed, to train from one to the other. "
    if job.phase.terminal:
        return text + "`ratchet prove SPEC`, with the spec that it was submitted with, needs none"
    return text + "Let it continue training, or keep more (checkpoint.keep_last)"


def prove_job(trials: Trials, job_id: str) -> Proof:
    """Fork the job from an earlier checkpoint, and train again up to the step of its newest checkpoint. Block until the fork has
    ended, and return the result. If only metrics differ, this is done a second time. Both checkpoints are pinned meanwhile. Raise
    ``Conflict`` if the job has too few checkpoints, ``TrialFailed`` if a fork fails."""
    client = trials.client
    job = client.view(job_id)
    stored = [c for c in client.checkpoints(job_id) if c.state == "committed" and c.lineage == "current"]
    older = [c for c in stored[1:] if c.step < stored[0].step]
    if not older:
        raise Conflict(_too_few(job, len(stored)), code="too-few-checkpoints")
    newest, before = stored[0], older[0]
    since = next(client.jobs(page_size=1), job).created_at
    for checkpoint in (newest, before):
        _pin(trials, checkpoint, since)
    changes = {
        "labels": {LABEL: "again"},
        "env": dict(TRACKERS_OFF),
        "checkpoint": {"uri": None, "first": "off"},
        "policy": {"timeout": None},
        "ttl": 86_400,
        "ttl_outputs": True,
        "trial": {"end_at": newest.step},
    }
    request = ForkRequest(checkpoint_id=before.id, name=f"{job.name[:48].rstrip('-')}-prove-again", spec=changes)

    def run_again(words: str) -> Run:
        """Submit a fork, and return its run when it has ended."""
        fork = trials.add(client.fork(job_id, request).view)
        (run,) = trials.wait({fork: f"steps {before.step + 1} to {newest.step} {words}"})
        return run

    again = run_again("again")
    if again.facts.step != newest.step or again.job.last_checkpoint is None:
        raise TrialFailed(f"the fork ended at step {again.facts.step}, not at {newest.step}: nothing can be compared")
    found = client.compare(job_id, again.job.id, checkpoint=newest.id, with_checkpoint=again.job.last_checkpoint)
    series = {n: dict(zip(s.steps, s.values, strict=True)) for n, s in client.series(job_id).items()}
    recorded, redone = _comparable(series, again.metrics, range(before.step + 1, newest.step + 1))
    different = _metrics_differ(recorded, redone)
    times: list[str] = []
    if found.identical and different:
        times = sorted(different.keys() & _different(again, run_again("once more, since metrics differ")).keys())
    metrics = [text for name, text in different.items() if name not in times]
    return Proof(
        verdict=_verdict(again, equal=found.identical and not metrics),
        what=f"{job_id}, steps {before.step + 1} to {newest.step}",
        steps=newest.step,
        total=again.facts.total,
        comparison=found,
        redone=newest.step - before.step,
        metrics=sum(map(bool, recorded.values())),
        metrics_differ=metrics,
        times=times,
        reports=_reports(again.attempts),
        lost=_lost_component(again.attempts),
        unseen=[*again.carried, *_unseen_spec(again.attempts)],
    )


def _pin(trials: Trials, checkpoint: CheckpointView, since: datetime) -> None:
    """Pin the checkpoint during the proof, so that retention does not delete it. A job forked from it after ``since`` keeps it
    pinned."""
    client, job_id = trials.client, checkpoint.job_id

    def unpin() -> None:
        """Unpin the checkpoint unless a fork made after ``since`` still exists and needs the pin."""
        later = takewhile(lambda job: job.created_at > since, client.jobs())
        if not any(job.forked_from == f"{job_id}/{checkpoint.id}" for job in later):
            client.pin(job_id, checkpoint.id, False)

    if not client.checkpoint(job_id, checkpoint.id).pinned:
        client.pin(job_id, checkpoint.id)
        trials.on_cleanup(unpin)


def _proof(verdict: Verdict, run: Run, comparison: ComparisonView, **more: Any) -> Proof:
    """Return a ``Proof`` of a spec with the figures of the undisturbed ``run``. ``more``: further fields."""
    facts = run.facts
    return Proof(
        verdict=verdict, what=run.job.name.rpartition("-prove-")[0], steps=facts.step, total=facts.total, comparison=comparison,
        metrics=len(run.metrics), **more,
    )  # fmt: skip


def _comparable(
    a: Mapping[str, Mapping[int, float]], b: Mapping[str, Mapping[int, float]], steps: range
) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Return the values of ``a`` and ``b``, by name and step, at those of ``steps`` for which both have a value. If ``b`` has no
    values of a series, all those of ``a`` are kept. Series that ``a`` does not have are left out."""
    # The service thins long series: only steps that both have count, unless ``b`` lacks the series.
    theirs = {name: {step: v for step, v in points.items() if step in steps} for name, points in b.items()}
    first = {
        name: {step: v for step, v in points.items() if step in steps and step in (theirs.get(name) or steps)}
        for name, points in a.items()
    }
    return first, {
        name: {s: theirs[name][s] for s in kept if s in theirs.get(name, {})} for name, kept in first.items()
    }


def _different(a: Run, b: Run) -> dict[str, str]:
    """Return the differences between the metrics of two runs, as ``_metrics_differ`` does."""
    return _metrics_differ(a.metrics, b.metrics)


def _metrics_differ(a: Mapping[str, Mapping[int, float]], b: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Return a text with the first differing step for each series that differs, by name. ``a``, ``b``: values by name and
    step."""
    out = {}
    for name in sorted({*a, *b}):
        x, y = a.get(name, {}), b.get(name, {})
        steps = (step for step in sorted({*x, *y}) if repr(x.get(step)) != repr(y.get(step)))
        if (step := next(steps, None)) is not None:
            out[name] = f"{name} at step {step}: {_format_value(x.get(step))} against {_format_value(y.get(step))}"
    return out


def _format_value(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _carried_out_faults(run: Run, faults: list[Fault]) -> list[tuple[Fault, AttemptView]]:
    """Return the faults that were carried out as planned, each with the attempt that it ended."""
    out = []
    for fault, attempt in zip(faults, run.attempts, strict=False):
        lost = attempt.steps_lost or 0
        expected = (
            attempt.cause in _CAUSES[fault.kind] if fault.kind in _CAUSES else attempt.cause is not Cause.COMPLETED
        )
        if expected and (fault.kind == "preempt" or lost >= REDONE):
            out.append((fault, attempt))
    return out


def _fault_text(fault: Fault, attempt: AttemptView) -> str:
    """Return the fault as text, with the number of steps that were lost and done again, if any."""
    lost = attempt.steps_lost or 0
    return fault.text + (f", {pluralize(lost, 'step')} done again" if lost else "")


def _interruptions(carried_out: list[tuple[Fault, AttemptView]], faults: list[Fault]) -> Exercise:
    """Return whether all planned ``faults`` were carried out, as a part of the proof's table."""
    missed = [fault.text for fault in faults if fault not in [one for one, _ in carried_out]]
    if missed:
        text = f"not carried out as planned: {'; '.join(missed)}"
        return Exercise(name="interruptions", status="not exercised", detail=text)
    text = "; ".join(_fault_text(fault, attempt) for fault, attempt in carried_out)
    return Exercise(name="interruptions", status="exercised", detail=text)


def _verdict(run: Run, *, equal: bool) -> Verdict:
    """Return the verdict on ``run``: ``differs`` if not ``equal`` or if a redone step differed, ``not-exact`` if ``_lost_state``
    finds a loss, else ``proved``. ``equal``: final state and metrics are the expected ones."""
    if not equal or any(attempt.redone.first_difference is not None for attempt in run.attempts):
        return "differs"
    lost = any(_lost_state(attempt.resume_report) for attempt in run.attempts if attempt.resume_report is not None)
    return "not-exact" if lost else "proved"


def _lost_state(report: ResumeReportView) -> list[str]:
    """Return what an inexact resume has lost or found changed, one text each. What the trial itself causes is left out."""
    if report.verdict != "not-exact":
        return []
    parts = [part for part in report.components if part.status != "exact"]
    # ``spec:env``: the job sets no variables; ``spec_digest``: the file with the job's spec is gone.
    own = {"spec:env", "spec_digest", *(f"spec:env.{name}" for name in TRACKERS_OFF)}
    others = [d for d in report.differences if d.key not in own]
    return [
        *(f"{part.component} is {part.status}: {part.reason or 'no reason given'}" for part in parts),
        *(f"{other.key} was {other.recorded}, and is {other.current}" for other in others),
    ]


def _unseen_spec(attempts: list[AttemptView]) -> list[str]:
    """Return a list with one text if a resume report says that the job's spec could not be compared; else an empty list."""
    reports = [attempt.resume_report for attempt in attempts if attempt.resume_report is not None]
    gone = any(difference.key == "spec_digest" for report in reports for difference in report.differences)
    return ["the job's spec, since the file of the attempt that saved the checkpoint is gone"] * gone


def _lost_component(attempts: list[AttemptView]) -> str | None:
    """Return the first component with the status ``not-exact`` in the attempts' resume reports; None if there is none."""
    reports = (attempt.resume_report for attempt in attempts)
    parts = (part for report in reports if report is not None for part in report.components)
    return next((part.component for part in parts if part.status == "not-exact"), None)


def _reports(attempts: list[AttemptView]) -> list[str]:
    """Return distinct remarks on the attempts, at most ``MAX_LINES``: redone steps that differed, state that was lost, notes of
    resume reports."""
    out: dict[str, None] = {}
    for attempt in attempts:
        report, redone = attempt.resume_report, attempt.redone.first_difference
        if redone is not None:
            out[redone.sentence()] = None  # the same text as the report's note, to list it once
        if report is not None and report.verdict != "fresh":
            out |= dict.fromkeys([*_lost_state(report), *report.notes])
    return list(out)[:MAX_LINES]
