"""Resume: the model on the recorded bucket layout, every component's state, and a report of what was restored exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.checkpoint.manifest import SHARED_PREFIX, Manifest
from ratchet_contract.checkpoint.resume_report import (
    NOT_EXACT_SINCE,
    ComponentReport,
    EnvironmentDifference,
    ResumeReport,
    Verdict,
)
from ratchet_contract.errors import UserError
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.counter_layout import mid_step_save
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import DdpSpec
from ratchet_hooks.ddp.bucket_layout import Layout, ManagedDDP
from ratchet_hooks.errors import CustomHookError, HookStateError, LayoutMismatch, UnsupportedModel
from ratchet_hooks.manage.managed_ddp import ManagedHook, managed_ddp
from ratchet_hooks.specs.compatibility import HookChange
from ratchet_hooks.torch_versions import untested
from ratchet_store.format.manifest_file import mark_changed, read_changed_marker
from ratchet_worker.checkpoint.late_changes import unfinished_body_message
from ratchet_worker.resume import read_checkpoint as disk
from ratchet_worker.resume import start_from as imported
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.resume.start_from import Imported
from ratchet_worker.state import environment, package_list
from ratchet_worker.state.hook_transfer import reset_by_policy
from ratchet_worker.state.model import MODEL
from ratchet_worker.state.module_baseline import is_compiled
from ratchet_worker.training import restore_state

if TYPE_CHECKING:
    from ratchet_worker.training.runtime import Runtime

_TOTAL: Final = "total_steps"
_MODEL: Final = f"{SHARED_PREFIX}{MODEL}/"


@dataclass
class Notes:
    """What wrapping and restoring have changed or found, for the report. A field is None if there is nothing to report.
    ``layout``: why DDP has other buckets; ``reset``: why the hook's state is reset after a change of hook or layout; ``total``,
    ``unregistered``: sentences for the report."""

    layout: str | None = None
    reset: str | None = None
    change: HookChange | None = None
    total: str | None = None
    unregistered: str | None = None
    imported: Imported | None = None


def build(
    launch: LaunchFile, chosen: Chosen, module: nn.Module, device: torch.device, notes: Notes, ddp: DdpSpec
) -> tuple[ManagedDDP, ManagedHook]:
    """Wrap ``module`` in DDP under the job's hook, with the recorded bucket layout if possible, and fill ``notes``. Without a
    checkpoint, first loads the start file's model, if any. A collective. Raises ``UserError`` if something does not fit."""
    spec, manifest = launch.spec, chosen.manifest
    if manifest is None and launch.start_file is not None:
        notes.imported = imported.load(launch, module)
    policy = spec.policy.on_hook_mismatch
    recorded = manifest.bucket_layout if manifest is not None else None
    if manifest is not None and (change := disk.recorded_hook_change(manifest, launch)) is not None:
        if (refusal := change.refusal(policy, launch.mismatch_setting)) is not None:
            raise UserError(refusal, code="hook-mismatch")
        notes.change = change
        notes.reset = reset_by_policy(policy, disk.recorded_hook(manifest), change.description)
    try:
        return _wrap_managed(launch, ddp, module, device, recorded)
    except LayoutMismatch as error:
        assert manifest is not None  # only a checkpoint has a layout
        if (odd := _model_difference(manifest, module)) is not None:
            raise UserError(
                f"the checkpoint is of another model: {odd}. Resume with the model that made it, or start a new "
                f"run: {_new_run(launch)}",
                code="state-mismatch",
            ) from error
        if policy == "fail":
            raise UserError(
                f"the recorded bucket layout cannot be rebuilt: {error}. Resume with the recorded model and ddp settings, or "
                f"set {launch.mismatch_setting} to redistribute (state by parameter name) or reset",
                code="layout-mismatch",
            ) from error
        notes.layout = str(error)
        notes.reset = notes.reset or reset_by_policy(policy, disk.recorded_hook(manifest), str(error))
    return _wrap_managed(launch, ddp, module, device, None)


def _model_difference(manifest: Manifest, module: nn.Module) -> str | None:
    """Return a clause on a parameter that only the checkpoint or only the model has; None if none is found."""
    trained, present = {*chain.from_iterable(manifest.bucket_layout or ())}, {n for n, _ in module.named_parameters()}
    if lost := trained - present:
        return f"it has {min(lost)}, and the model does not"
    saved = {tensor.name.removeprefix(_MODEL) for tensor in manifest.tensors}
    # A module whose state_dict uses names of its own does not show which parameters were saved.
    if trained <= saved and (new := present - saved):
        return f"the model has {min(new)}, and it does not"
    return None


def _new_run(launch: LaunchFile) -> str:
    """Return the end of an error text: how to start a new run."""
    return 'Session("another-directory")' if launch.is_standalone else "as a new job (of `ratchet run`: --new)"


def _wrap_managed(
    launch: LaunchFile, ddp: DdpSpec, module: nn.Module, device: torch.device, recorded: Layout | None
) -> tuple[ManagedDDP, ManagedHook]:
    """Wrap ``module`` in DDP under the hook. ``recorded``: the bucket layout, if any. Raises ``LayoutMismatch`` if it cannot be
    rebuilt, and ``UserError``."""
    hook, options = launch.spec.hook, ddp.model_dump(exclude={"backend"})
    try:
        return managed_ddp(module, hook, ddp=options, device=device, recorded_layout=recorded)
    except UnsupportedModel as error:
        raise UserError(f"hook {hook.name} cannot run this model: {error}", code="unsupported-model") from error
    except CustomHookError as error:
        raise UserError(f"hook.{error.key}: {error.detail}", code=error.code) from error
    except LayoutMismatch:
        raise
    except HookStateError as error:
        raise UserError(f"the state of the hook cannot be saved: {error}", code="hook-state-unsupported") from error


def restore(runtime: Runtime) -> ResumeReport:
    """Restore the checkpoint's state, if there is one, and return the resume report. A collective. Rank 0 also writes files of
    the attempt and reports. Raises ``UserError``, ``StateError`` and ``CheckpointError``."""
    launch, chosen = runtime.launch, runtime.chosen
    packages = package_list.installed()
    runtime.environment = environment.record(launch, runtime.device, packages)
    differences: list[EnvironmentDifference] = []
    reports: list[ComponentReport] = []
    if chosen.manifest is not None:
        assert chosen.directory is not None
        saved = chosen.take()
        own = saved.state.get("facts") if chosen.manifest.world_size == runtime.world_size else None
        now = launch if runtime.adopted is None else runtime.adopted.launch
        differences = disk.differences(
            chosen.manifest, chosen.directory, runtime.environment, packages, now, runtime.data_digest, own
        )
        if (odd := total_difference(runtime)) is not None:
            differences.append(odd)
        if differences and launch.spec.determinism == "strict":
            raise UserError(
                "determinism is strict and this is not what was recorded: "
                f"{environment.describe_differences(differences)}. Resume "
                f"it where it is the same, or continue with other bits: {_nonstrict_advice(launch)}",
                code="environment-differs",
            )
        _restore_total(runtime, chosen.manifest)
        reports = [*restore_state.restore_state(runtime, chosen.manifest, saved), *_report_late_changes(runtime)]
        if runtime.notes.unregistered is not None and runtime.rank == 0:
            why = runtime.notes.unregistered
            reports.append(ComponentReport(component="unregistered", rank=0, status="not-exact", reason=why))
        _check_strict(launch, reports)
    elif launch.start_file is not None:
        reports = _report_import(runtime)
    mine = {
        "reports": [r.model_dump() for r in reports],
        "differences": [d.model_dump() for d in differences],
        "total": runtime.total,
    }
    gathered = runtime.exchange.gather("resume", mine)
    _check_same_total([rank["total"] for rank in gathered])
    components = [ComponentReport.model_validate(r) for rank in gathered for r in rank["reports"]]
    differences = _merge_differences(
        [EnvironmentDifference.model_validate(d) for rank in gathered for d in rank["differences"]]
    )
    since = _not_exact_since(chosen)
    earlier = [] if since is None else [f"{NOT_EXACT_SINCE} {since}: the checkpoint itself has other bits"]
    report = ResumeReport(
        verdict=_verdict(chosen.manifest, components, differences),
        base=chosen.base,
        world_size=launch.world_size,
        recorded_world_size=chosen.manifest.world_size if chosen.manifest else None,
        components=components,
        differences=differences,
        quarantined=chosen.quarantined,
        notes=[*chosen.notes, *earlier, *_caveats(runtime, packages, differences)] if runtime.rank == 0 else [],
    )
    if runtime.rank == 0:
        runtime.provenance = environment.provenance(packages, environment.commit_of(launch.spec))
        if since is not None:
            runtime.provenance[environment.NOT_EXACT] = since
        elif report.verdict == "not-exact":
            runtime.mark_not_exact()
        environment.write(launch, packages)
        _persist_mark(runtime, components)
        _write_base(runtime, report)
    return report


def total_difference(runtime: Runtime) -> EnvironmentDifference | None:
    """Return the difference between the number of steps requested now and that of the attempt that saved the base. Return None if
    the numbers are equal or cannot be compared."""
    before, now = runtime.earlier_total, runtime.total
    # A schedule made for the old number does not adapt to the new one.
    if before is None or now is None or before == now:
        return None
    return EnvironmentDifference(key=_TOTAL, recorded=before, current=now)


def _not_exact_since(chosen: Chosen) -> str | None:
    """Return the step and attempt, as text, since which the checkpoint's bits may differ; None without such a mark."""
    found = None if chosen.manifest is None else chosen.manifest.environment.get(environment.NOT_EXACT)
    return None if found is None else str(found)


def _report_late_changes(runtime: Runtime) -> list[ComponentReport]:
    """Return a list with one report if the script called ``checkpoint()`` within the loop body and a resume is therefore not
    exact: the next step had begun, the body made changes after the call, or it did not reach its end. Else return an empty
    list."""
    directory, manifest = runtime.chosen.directory, runtime.chosen.manifest
    assert directory is not None and manifest is not None
    what = read_changed_marker(directory)
    if what is None:
        attempt = JobPaths(directory.parent.parent).attempt(manifest.attempt)
        ranks = range(
            runtime.rank, manifest.world_size, runtime.world_size
        )  # the checkpoint's ranks, divided over this group
        if all(mid_step_save(attempt.counter(rank)) != manifest.step for rank in ranks):
            return []
        what = unfinished_body_message(manifest.step, manifest.attempt)
    return [ComponentReport(component="checkpoint", rank=runtime.rank, status="not-exact", reason=what)]


def _persist_mark(runtime: Runtime, components: list[ComponentReport]) -> None:
    """If ``components`` report late changes, create the marker file ``CHANGED`` in this job's checkpoint. Copies of the
    checkpoint include the marker."""
    what = next((c.reason for c in components if c.component == "checkpoint"), None)
    directory, own = runtime.chosen.directory, JobPaths(Path(runtime.launch.job_root)).checkpoints
    if what is not None and directory is not None and directory.parent == own:
        mark_changed(directory, what)


def _report_import(runtime: Runtime) -> list[ComponentReport]:
    """Load the optimizer's state from the file of ``start_from``, if the spec requests it. Return reports that say which
    components were imported. Raises ``UserError`` if the model was not loaded from the file, or the state does not fit."""
    found, state = runtime.notes.imported, runtime.state
    if found is None:
        raise UserError(
            "start_from loads the file when Session.wrap wraps the model, but this model was wrapped otherwise: load the file "
            "in the script, and leave start_from out",
            code="import-mismatch",
        )
    _, hook = state.require_wrapped()
    return imported.report(found, runtime.rank, state.optimizers, state.stateful, stateful_hook=hook.stateful)


def _restore_total(runtime: Runtime, manifest: Manifest) -> None:
    """Keep the recorded number of steps if a task computes another one only because the number of ranks changed."""
    launch, before, asked = runtime.launch, manifest.total_steps, runtime.total
    same = (
        disk.is_same_spec_ignoring_ranks(manifest, launch, any_hook=True)
        and manifest.code_digest == launch.resolved.code_digest
    )
    if launch.spec.task is None or before is None or before == asked or not same:
        return
    if manifest.data_digest != runtime.data_digest:
        return
    # The restored learning rate schedule has the old number.
    runtime.total = before
    here = pluralize(launch.world_size, "rank")
    runtime.notes.total = f"the job ends after step {before} as before; for {here} the task would request {asked} steps"


def _check_same_total(totals: list[int | None]) -> None:
    """Raise ``UserError`` if the ranks do not agree on the number of steps."""
    # A rank with more steps than the others would wait for them, and look like a hang.
    if len(set(totals)) > 1:
        raise UserError(
            f"the ranks do not agree on the number of steps: {totals}, in rank order. It must not depend on a rank's own share "
            "of the data",
            code="total-steps-differ",
        )


def _merge_differences(found: list[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Return each difference once, sorted by key; those that several ranks report alike are merged."""
    return sorted({(d.key, repr(d)): d for d in found}.values(), key=lambda d: d.key)


def _caveats(runtime: Runtime, packages: list[str], differences: Sequence[EnvironmentDifference]) -> list[str]:
    """Return notes on what the report does not cover, and on how to read it."""
    found = runtime.notes.total, untested(torch.__version__)
    out = [note for note in found if note is not None]
    if any(difference.key in ("spec:script", _TOTAL) for difference in differences):
        out.append(
            "the script's arguments, or its steps, have changed: the checkpoint's values (learning rates, a schedule and its "
            "position, the state of all registered objects) replace those from the script; a schedule of a fixed length "
            "(OneCycleLR) ends with the length that it was made with"
        )
    if edited := package_list.editable(packages):
        out.append(f"installed as editable, so whether their code is the same is not checked: {', '.join(edited)}")
    for path, reason in sorted(runtime.state.hidden.ignored.items()):
        odd = (
            "; nothing was found there when the checkpoint was made" if path in runtime.state.unmatched_ignores else ""
        )
        out.append(f"{path} is ignored: {reason}{odd}")
    if runtime.chosen.manifest is not None and (told := getattr(runtime.state.data, "resume_note", None)) is not None:
        out.append(f"data: {told}")
    if runtime.state.data is None:
        out.append(
            "no data are registered: the same batches return only if they depend on the step, or are drawn from torch's, numpy's "
            "or Python's own generators"
        )
    if runtime.chosen.manifest is not None and is_compiled(runtime.state.require_wrapped()[0].module):
        out.append(
            "parts of the model are compiled: generated code depends on the order in which a process meets shapes, so the bits "
            "are the same only while all steps have the same shapes"
        )
    if runtime.launch.spec.determinism == "off":
        out.append("determinism is off: the state is compared, but the same state need not lead to the same bits")
    return out


def _check_strict(launch: LaunchFile, reports: list[ComponentReport]) -> None:
    """Raise ``UserError`` under ``determinism: strict`` if a component was not restored exactly."""
    lost = [f"{r.component} of rank {r.rank}: {r.status} ({r.reason})" for r in reports if r.status != "exact"]
    if lost and launch.spec.determinism == "strict":
        raise UserError(
            f"determinism is strict and not everything is restored exactly: {'; '.join(lost)}. To continue anyway: "
            f"{_nonstrict_advice(launch)}",
            code="state-differs",
        )


def _nonstrict_advice(launch: LaunchFile) -> str:
    """Return the end of an error text: how to continue without ``determinism: strict``."""
    if launch.is_standalone:
        return 'Session(determinism="warn")'
    return f"as a new job, `ratchet fork {launch.job_id} --set determinism=warn`"


def _write_base(runtime: Runtime, report: ResumeReport) -> None:
    """Write ``base.json``, which names the checkpoint that this attempt starts from, if any, and report the resume and that
    training begins."""
    paths = AttemptPaths(Path(runtime.launch.attempt_dir))
    # Durable before any training: the lineage depends on it.
    write_atomic(paths.base_file, report.base.model_dump_json().encode(), durable=True)
    runtime.reporter.report_resumed(report)
    runtime.reporter.report_training(report.base, runtime.total)


def _verdict(
    manifest: Manifest | None, components: list[ComponentReport], differences: list[EnvironmentDifference]
) -> Verdict:
    """Return ``fresh`` without a checkpoint, ``exact`` if nothing differs and every component is exact, else ``not-exact``."""
    if manifest is None:
        return "fresh"
    return "exact" if not differences and all(c.status == "exact" for c in components) else "not-exact"
