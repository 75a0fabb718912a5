"""Restores a checkpoint's state into this group's objects, also if the number of ranks or the hook has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import ComponentReport
from ratchet_contract.errors import StateError, UserError
from ratchet_contract.plural import pluralize
from ratchet_hooks.specs.registry import is_stateful
from ratchet_worker.host.cpu import rank_cores
from ratchet_worker.resume import read_checkpoint as disk
from ratchet_worker.state import rng
from ratchet_worker.state.average_replicas import Mean, follows_model
from ratchet_worker.state.average_replicas import mean as average
from ratchet_worker.state.hook_transfer import StateTransfer, reset_by_policy
from ratchet_worker.state.snapshot import Snapshot

if TYPE_CHECKING:
    from ratchet_worker.training.runtime import Runtime


def restore_state(runtime: Runtime, manifest: Manifest, saved: Snapshot) -> list[ComponentReport]:
    """Restore ``saved``, and other ranks' states where needed; return the reports on the components. Raises ``UserError`` for
    state that does not fit or is not allowed, ``StateError`` and ``CheckpointError`` for damage."""
    state, how = runtime.state, _state_transfer(runtime, manifest)
    if manifest.world_size == runtime.world_size:
        if _needs_mean(manifest, how, resized=False):
            saved, how = _average_replicas(runtime, manifest, saved, how)
        reports = state.restore(saved, how)
    else:
        _check_resize(runtime, manifest)
        reports = _restore_resized(runtime, manifest, saved, how)
    _check_digests(runtime, manifest)
    return [*reports, _layout_report(runtime)]


def _check_digests(runtime: Runtime, manifest: Manifest) -> None:
    """Raise ``StateError`` unless the restored shared tensors have the digests of the live tensors at the save. Skipped where
    replicas may differ."""
    state = runtime.state
    if not manifest.replicas == state.require_wrapped()[1].replicas == "equal":
        return
    recorded = [*manifest.shared_digests]
    found = [*state.shared_digests(max(len(recorded), 1), rank_cores())]
    if found != recorded:
        odd = [f"{n + 1}" for n, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b]
        where = f" in part {', '.join(odd)} of {len(recorded)}" if odd else ""
        raise StateError(f"what was restored is not what was saved: the digest of the shared tensors differs{where}")


def _state_transfer(runtime: Runtime, manifest: Manifest) -> StateTransfer:
    """Return what happens to the hook's state at this restore: kept, redistributed, converted for another hook, or reset."""
    notes, recorded = runtime.notes, disk.recorded_hook(manifest)
    reset = notes.reset
    if manifest.world_size != runtime.world_size:
        policy = runtime.launch.spec.policy.on_hook_mismatch
        reset = reset or reset_by_policy(policy, recorded, "the number of ranks changed")
    return StateTransfer(recorded, notes.change, reset, notes.layout)


def _needs_mean(manifest: Manifest, transfer: StateTransfer, *, resized: bool) -> bool:
    """True if replicas that may have differed at the save must be made equal, as for another number of ranks (``resized``)."""
    # A hook that starts without state would not bring them together in its warm-up.
    other = transfer.change is not None and transfer.change.averages
    return manifest.replicas != "equal" and (resized or other or transfer.reset is not None)


def _average_replicas(
    runtime: Runtime, manifest: Manifest, saved: Snapshot, transfer: StateTransfer
) -> tuple[Snapshot, StateTransfer]:
    """Return ``saved`` with the replicas of all ranks merged into one, in place of this rank's own. Also return ``transfer`` with
    the reasons for the report. Raises ``UserError`` if the replicas cannot be merged."""
    components = {"model", *runtime.state.optimizers, *runtime.state.group_components()}
    try:
        mean = _mean(runtime, manifest, components)
    except StateError as error:  # every attempt would raise it again
        raise UserError(f"the ranks' replicas cannot be merged into one: {error}", code="state-mismatch") from error
    told = {component: _mean_reason(manifest) for component in mean.differing_components}
    for component in components:
        names = [name for name in mean.from_rank_0 if name.partition("/")[0] == component]
        if names and component in told:
            told[component] += f"; from rank 0, since it has no mean: {', '.join(names[:5])}"
        elif names:
            told[component] = "from rank 0: the values of the ranks differed, and have no mean"
    followers, kept = _user_means(runtime, manifest)
    for component, own in followers.items():
        told[component] = _mean_reason(manifest)
        mean.tensors |= own.tensors
    private = {n: t for n, t in saved.private.items() if n.partition("/")[0] not in components | set(followers)}
    new = Snapshot(saved.shared, private | mean.tensors, saved.state | mean.state)
    return new, replace(transfer, averaged=told, kept_per_rank=kept)


def _user_means(runtime: Runtime, manifest: Manifest) -> tuple[dict[str, Mean], dict[str, str]]:
    """Return, by component, means of the user's objects that follow the model, and reasons why others are kept."""
    module = runtime.state.require_wrapped()[0].module
    followers: dict[str, Mean] = {}
    kept = {}
    for component in runtime.state.user_components():
        try:
            mean = _mean(runtime, manifest, {component})
        except StateError:  # every rank has other shapes
            mean = None
        if mean is not None and not mean.differing_names and not mean.from_rank_0:
            continue
        if mean is not None and follows_model(mean, module):
            followers[component] = mean
        else:
            kept[component] = (
                "kept per rank, although the replicas were merged: not all differences have the form of the model's tensors"
            )
    return followers, kept


def _mean(runtime: Runtime, manifest: Manifest, components: set[str]) -> Mean:
    """Read all old ranks' states of ``components`` from the checkpoint and return their mean. Raises ``StateError`` if they have
    none."""
    ranks = range(manifest.world_size)
    return average(
        (disk.read(runtime.chosen, [r], components.__contains__, shared=False)[r] for r in ranks), components
    )


def _mean_reason(manifest: Manifest) -> str:
    """Return the reason, for the resume report, of a component that is the mean over the old ranks."""
    return f"the mean over {pluralize(manifest.world_size, 'rank')}, whose replicas differed"


def _check_resize(runtime: Runtime, manifest: Manifest) -> None:
    """Raise ``UserError`` (``world-size-mismatch``) if the new number of ranks loses state and ``policy.on_hook_mismatch`` is
    ``fail``."""
    launch, data, recorded = runtime.launch, runtime.state.data, disk.recorded_hook(manifest)
    lost = ["the hook's state"] if recorded is None or is_stateful(recorded) else []
    lost += ["replicas that differ"] if manifest.replicas != "equal" else []
    movable = data is None or hasattr(data, "load_resized") or runtime.done  # or nothing that needs it is left to do
    lost += [] if movable else ["the data position"]
    if lost and launch.spec.policy.on_hook_mismatch == "fail":
        raise UserError(
            f"the checkpoint was made by {pluralize(manifest.world_size, 'rank')}, this group has {runtime.world_size}: "
            f"{' and '.join(lost)} cannot be restored exactly. Set {launch.mismatch_setting} to redistribute or reset, or "
            f"resume with {pluralize(manifest.world_size, 'rank')} again",
            code="world-size-mismatch",
        )


def _restore_resized(
    runtime: Runtime, manifest: Manifest, own: Snapshot, transfer: StateTransfer
) -> list[ComponentReport]:
    """Restore state that another number of ranks saved, redistributing, resetting or merging it. Returns the reports on
    the components."""
    everyone = disk.read(runtime.chosen, range(manifest.world_size), lambda c: c in ("hook", "data"), shared=False)
    if _needs_mean(manifest, transfer, resized=True):
        own, transfer = _average_replicas(runtime, manifest, own, transfer)
    seed = rng.derive_seed(runtime.launch.spec.seed, "resized", manifest.step)
    return runtime.state.restore_resized(own, [everyone[r] for r in range(manifest.world_size)], seed, transfer)


def _layout_report(runtime: Runtime) -> ComponentReport:
    """Return the report on DDP's bucket layout: exact, or redistributed if the recorded layout could not be rebuilt."""
    note, rank = runtime.notes.layout, runtime.rank
    if note is not None:
        return ComponentReport(component="layout", rank=rank, status="redistributed", reason=note)
    return ComponentReport(
        component="layout", rank=rank, status="exact"
    )  # no layout exists before the first reduction, then as now
