"""Coming back: the model on the recorded bucket layout, every component's state, and an honest report of how it went."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ratchet_contract.errors import StateError, UserError
from ratchet_contract.manifest import Manifest
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.resume import ComponentReport, EnvironmentDifference, ResumeReport, Verdict
from ratchet_hooks.build import ManagedHook, managed_ddp
from ratchet_hooks.changes import HookChange
from ratchet_hooks.errors import CustomHookError, HookStateError, LayoutMismatch, UnsupportedModel
from ratchet_hooks.layout import Layout, ManagedDDP
from ratchet_hooks.registry import is_stateful
from ratchet_worker import environment_record, imported, rng
from ratchet_worker import restore as disk
from ratchet_worker.files import write_atomic
from ratchet_worker.imported import Imported
from ratchet_worker.job_state import counted
from ratchet_worker.module_origin import compiled
from ratchet_worker.passage import Passage, reset_by_policy
from ratchet_worker.replicas import mean as average
from ratchet_worker.restore import Chosen
from ratchet_worker.snapshot import Snapshot

if TYPE_CHECKING:
    from ratchet_worker.runtime import Runtime


@dataclass
class Notes:
    """What the construction of the model had to give up; None: nothing."""

    layout: str | None = None
    reset: str | None = None
    change: HookChange | None = None
    total: str | None = None
    imported: Imported | None = None


def build(
    launch: LaunchFile, chosen: Chosen, module: nn.Module, device: torch.device, notes: Notes
) -> tuple[ManagedDDP, ManagedHook]:
    """DDP under the job's hook on the recorded layout. A collective. Raises ``UserError`` where ``policy.on_hook_mismatch`` does
    not allow what it would take."""
    spec, manifest = launch.spec, chosen.manifest
    if manifest is None and launch.start_file is not None:
        notes.imported = imported.load(launch, module)
    policy = spec.policy.on_hook_mismatch
    recorded = manifest.bucket_layout if manifest is not None else None
    if manifest is not None and (change := disk.hook_change(manifest, launch)) is not None:
        if (refusal := change.refusal(policy)) is not None:
            raise UserError(refusal, code="hook-mismatch")
        notes.change = change
        notes.reset = reset_by_policy(policy, disk.recorded_hook(manifest), change.what)
    try:
        return _managed(launch, module, device, recorded)
    except LayoutMismatch as error:
        if policy == "fail":
            raise UserError(
                f"the recorded bucket layout cannot stand again: {error}. Resume with the recorded model and ddp settings, or "
                "set policy.on_hook_mismatch to redistribute (state by parameter name) or reset",
                code="layout-mismatch",
            ) from error
        assert manifest is not None  # nothing else has a layout
        notes.layout = str(error)
        notes.reset = notes.reset or reset_by_policy(policy, disk.recorded_hook(manifest), str(error))
    return _managed(launch, module, device, None)


def _managed(
    launch: LaunchFile, module: nn.Module, device: torch.device, recorded: Layout | None
) -> tuple[ManagedDDP, ManagedHook]:
    hook, options = launch.spec.hook, launch.spec.ddp.model_dump(exclude={"backend"})
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


def restore(runtime: Runtime) -> None:
    """Load, compare, report; afterwards ``base.json`` is on the disk and rank 0 has said that training begins."""
    launch, chosen = runtime.launch, runtime.chosen
    runtime.environment = environment_record.record(launch, runtime.device)
    differences: list[EnvironmentDifference] = []
    reports: list[ComponentReport] = []
    if chosen.manifest is not None:
        saved = _read_own(runtime, chosen.manifest)
        own = saved.state.get("facts") if saved is not None else None
        differences = disk.differences(chosen.manifest, runtime.environment, launch, runtime.data_digest, own)
        if differences and launch.spec.determinism == "strict":
            raise UserError(
                f"determinism is strict and this is not what was recorded: {environment_record.sentence(differences)}. Resume "
                "where it is the same, or submit with determinism: warn",
                code="environment-differs",
            )
        _keep_total(runtime, chosen.manifest)
        reports = _restore_state(runtime, chosen.manifest, saved)
        _insist_if_strict(launch, reports)
    elif launch.start_file is not None:
        reports = _report_import(runtime)
    mine = {
        "reports": [r.model_dump() for r in reports],
        "differences": [d.model_dump() for d in differences],
        "total": runtime.total,
    }
    gathered = runtime.exchange.gather("resume", mine)
    _insist_on_one_total([rank["total"] for rank in gathered])
    if runtime.rank != 0:
        return
    components = [ComponentReport.model_validate(r) for rank in gathered for r in rank["reports"]]
    differences = _union([EnvironmentDifference.model_validate(d) for rank in gathered for d in rank["differences"]])
    report = ResumeReport(
        verdict=_verdict(chosen.manifest, components, differences),
        base=chosen.base,
        world_size=launch.world_size,
        recorded_world_size=chosen.manifest.world_size if chosen.manifest else None,
        components=components,
        differences=differences,
        quarantined=chosen.quarantined,
        notes=[*chosen.notes, *_caveats(runtime)],
    )
    _announce(runtime, report)


def _report_import(runtime: Runtime) -> list[ComponentReport]:
    found, state = runtime.notes.imported, runtime.state
    if found is None:
        raise UserError(
            "start_from puts the file's model in when Session.wrap wraps it, and this model was wrapped by others: load the file "
            "in the script, and leave start_from out",
            code="import-mismatch",
        )
    _, hook = state.hook_or_refuse()
    return imported.report(found, runtime.rank, state.optimizers, state.stateful, stateful_hook=hook.stateful)


def _keep_total(runtime: Runtime, manifest: Manifest) -> None:
    """A task that counts in epochs asks for another number of steps where the number of ranks is another one. The learning
    rate's schedule came back with the old number, and so does the job's end. A script counts for itself."""
    launch, before, asked = runtime.launch, manifest.total_steps, runtime.total
    same = (
        disk.same_but_for_the_ranks(manifest, launch, any_hook=True)
        and manifest.code_digest == launch.resolved.code_digest
    )
    if launch.spec.task is None or before is None or before == asked or not same:
        return
    if manifest.data_digest != runtime.data_digest:
        return
    runtime.total = before
    here = counted(launch.world_size)
    runtime.notes.total = f"the job ends after step {before} as before; for {here} the task would ask for {asked} steps"


def _insist_on_one_total(totals: list[int | None]) -> None:
    """A rank with more steps to do than the others would wait for them until a deadline, and look like a hang."""
    if len(set(totals)) > 1:
        raise UserError(
            f"the ranks do not agree on the number of steps: {totals}, in rank order. It must not depend on a rank's own share "
            "of the data",
            code="total-steps-differ",
        )


def _union(found: list[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Each once, by key; what several ranks tell alike is one."""
    return sorted({(d.key, repr(d)): d for d in found}.values(), key=lambda d: d.key)


def _caveats(runtime: Runtime) -> list[str]:
    """What a report cannot know of."""
    out = [runtime.notes.total] if runtime.notes.total is not None else []
    if runtime.state.data is None:
        out.append("no data are registered: their position is right only if batches are a function of the step")
    if runtime.chosen.manifest is not None and compiled(runtime.state.hook_or_refuse()[0].module):
        out.append(
            "parts of the model are compiled: generated code depends on the order in which a process meets shapes, so the bits "
            "are the same only while all steps have the same shapes"
        )
    if runtime.launch.spec.determinism == "off":
        out.append("determinism is off: the state is compared, but the same state need not lead to the same bits")
    return out


def _insist_if_strict(launch: LaunchFile, reports: list[ComponentReport]) -> None:
    lost = [f"{r.component} of rank {r.rank}: {r.status} ({r.reason})" for r in reports if r.status != "exact"]
    if lost and launch.spec.determinism == "strict":
        raise UserError(
            f"determinism is strict and not everything comes back exactly: {'; '.join(lost)}. Submit with determinism: warn to "
            "go on all the same",
            code="state-differs",
        )


def _announce(runtime: Runtime, report: ResumeReport) -> None:
    """The base is on the disk before anything is trained: the lineage rests on it."""
    paths = AttemptPaths(runtime.attempt_dir)
    write_atomic(paths.base_file, report.base.model_dump_json().encode(), durable=True)
    runtime.reporter.resumed(report)
    runtime.reporter.training(report.base, runtime.total)


def _verdict(
    manifest: Manifest | None, components: list[ComponentReport], differences: list[EnvironmentDifference]
) -> Verdict:
    if manifest is None:
        return "fresh"
    return "exact" if not differences and all(c.status == "exact" for c in components) else "not-exact"


def _read_own(runtime: Runtime, manifest: Manifest) -> Snapshot | None:
    """What this rank had saved; None when the number of ranks has changed."""
    if manifest.world_size != runtime.world_size:
        return None
    return disk.read(runtime.chosen, [runtime.rank])[runtime.rank]


def _restore_state(runtime: Runtime, manifest: Manifest, saved: Snapshot | None) -> list[ComponentReport]:
    state, how = runtime.state, _passage(runtime, manifest)
    if saved is not None:
        if _needs_mean(manifest, how, resized=False):
            saved, how = _averaged(runtime, manifest, saved, how)
        reports = state.restore(saved, how)
    else:
        _refuse_resize(runtime, manifest)
        reports = _restore_resized(runtime, manifest, how)
    _, hook = state.hook_or_refuse()
    if manifest.replicas == hook.replicas == "equal" and state.shared_digest() != manifest.shared_digest:
        raise StateError("what was restored is not what was saved: the digest of the shared tensors differs")
    return [*reports, _layout_report(runtime, manifest)]


def _passage(runtime: Runtime, manifest: Manifest) -> Passage:
    notes, recorded = runtime.notes, disk.recorded_hook(manifest)
    reset = notes.reset
    if manifest.world_size != runtime.world_size:
        policy = runtime.launch.spec.policy.on_hook_mismatch
        reset = reset or reset_by_policy(policy, recorded, "the number of ranks changed")
    return Passage(recorded, notes.change, reset, notes.layout)


def _needs_mean(manifest: Manifest, how: Passage, *, resized: bool) -> bool:
    """Replicas that differ are made equal: for other ranks, for a hook that needs equal ones, and for one that starts anew, since
    it starts with a warm-up in which nothing would bring them together."""
    other = how.change is not None and how.change.averages
    return manifest.replicas != "equal" and (resized or other or how.reset is not None)


def _averaged(runtime: Runtime, manifest: Manifest, saved: Snapshot, how: Passage) -> tuple[Snapshot, Passage]:
    """``saved`` with one replica out of all old ranks' in it, and a passage that says so: the mean of models and optimizers, and
    scalers and schedulers of rank 0. Ranks with scales of their own would undo other ones than their common gradient carries."""
    components = {"model", *runtime.state.optimizers, *runtime.state.of_the_group()}
    replicas = (
        disk.read(runtime.chosen, [r], components.__contains__, shared=False)[r] for r in range(manifest.world_size)
    )
    try:
        mean = average(replicas, components)
    except StateError as error:  # comes again with every attempt
        raise UserError(f"the ranks' replicas cannot become one: {error}", code="state-mismatch") from error
    private = {n: t for n, t in saved.private.items() if n.partition("/")[0] not in components} | mean.tensors
    told = {
        component: f"the mean over {counted(manifest.world_size)}, whose replicas differed"
        for component in mean.differed
    }
    for component in components:
        names = [name for name in mean.of_rank_0 if name.partition("/")[0] == component]
        if names and component in told:
            told[component] += f"; of rank 0, since it has no mean: {', '.join(names[:5])}"
        elif names:
            told[component] = "of rank 0: the ranks' differed, and have no mean"
    return Snapshot(saved.shared, private, saved.state | mean.state), replace(how, averaged=told)


def _refuse_resize(runtime: Runtime, manifest: Manifest) -> None:
    launch, data, recorded = runtime.launch, runtime.state.data, disk.recorded_hook(manifest)
    lost = ["the hook's state"] if recorded is None or is_stateful(recorded) else []
    lost += ["replicas that differ"] if manifest.replicas != "equal" else []
    lost += ["the data position"] if data is not None and not hasattr(data, "load_resized") else []
    if lost and launch.spec.policy.on_hook_mismatch == "fail":
        raise UserError(
            f"the checkpoint was made by {counted(manifest.world_size)}, this group has {runtime.world_size}: "
            f"{' and '.join(lost)} cannot come back exactly. Resume with on_hook_mismatch redistribute or reset (in a "
            f"spec: policy.on_hook_mismatch), or with {counted(manifest.world_size)} again",
            code="world-size-mismatch",
        )


def _restore_resized(runtime: Runtime, manifest: Manifest, how: Passage) -> list[ComponentReport]:
    everyone = disk.read(runtime.chosen, range(manifest.world_size), lambda c: c in ("hook", "data"), shared=False)
    source = runtime.rank % manifest.world_size
    mine: Snapshot = disk.read(runtime.chosen, [source])[source]
    if _needs_mean(manifest, how, resized=True):
        mine, how = _averaged(runtime, manifest, mine, how)
    seed = rng.derive_seed(runtime.launch.spec.seed, "resized", manifest.step)
    return runtime.state.restore_resized(mine, [everyone[r] for r in range(manifest.world_size)], seed, how)


def _layout_report(runtime: Runtime, manifest: Manifest) -> ComponentReport:
    note, rank = runtime.notes.layout, runtime.rank
    if note is not None:
        return ComponentReport(component="layout", rank=rank, status="redistributed", reason=note)
    if manifest.bucket_layout is None:
        return ComponentReport(component="layout", rank=rank, status="absent", reason="none was recorded")
    return ComponentReport(component="layout", rank=rank, status="exact")
