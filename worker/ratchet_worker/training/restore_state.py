"""Restore recorded state into this group's objects: each rank's own, or that of a group of another size or under another hook."""

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
    """Restore ``saved`` into the runtime's objects and return a report per component. ``saved``: this rank's own state, or, if
    the number of ranks has changed, one old rank's together with what all of them shared. If states of other old ranks are
    needed, they are read from the checkpoint. Raises ``UserError`` for state that does not fit or that
    ``policy.on_hook_mismatch`` does not allow, ``StateError`` if the shared tensors are not those that were saved, and
    ``CheckpointError`` if those other states cannot be read."""
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
    """Raise ``StateError`` unless the restored tensors in memory have the digests that were computed from the live tensors at
    the save. (The digest of a file covers only the file.) Checks nothing if replicas differ now, or differed at the save."""
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
    """Return what happens to the hook's state at this restore: it is kept, converted for another hook, or reset. This follows
    from ``runtime.notes`` and, if the number of ranks has changed, from ``policy.on_hook_mismatch``."""
    notes, recorded = runtime.notes, disk.recorded_hook(manifest)
    reset = notes.reset
    if manifest.world_size != runtime.world_size:
        policy = runtime.launch.spec.policy.on_hook_mismatch
        reset = reset or reset_by_policy(policy, recorded, "the number of ranks changed")
    return StateTransfer(recorded, notes.change, reset, notes.layout)


def _needs_mean(manifest: Manifest, transfer: StateTransfer, *, resized: bool) -> bool:
    """True if replicas that differed at the save must be made equal, by their mean. That is so for another number of ranks
    (``resized``), and for a hook that needs equal replicas. It is also so for a hook that starts without state, since its
    warm-up would not bring them together."""
    other = transfer.change is not None and transfer.change.averages
    return manifest.replicas != "equal" and (resized or other or transfer.reset is not None)


def _average_replicas(
    runtime: Runtime, manifest: Manifest, saved: Snapshot, transfer: StateTransfer
) -> tuple[Snapshot, StateTransfer]:
    """Return ``saved`` with one merged replica in place of this rank's own, and ``transfer`` with a record of that. Raises
    ``UserError`` if the replicas cannot be merged.

    Tensors of models and optimizers become their mean over the old ranks. What has no mean is rank 0's, such as the numbers of
    scalers and schedulers. (Ranks with scales of their own would unscale by other factors than their common gradient has.) The
    user's own objects that follow the model become their mean; others stay each rank's own.
    """
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
    """Return, for the user's registered objects whose states differed between ranks, the means of those that follow the model,
    and the reasons why the others are kept as they are; both by component."""
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
    none, ``CheckpointError`` if they cannot be read."""
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
    """Restore state that another number of ranks saved: redistribute or reset the hook's state and the data position by the
    states of all old ranks, and merge replicas that differ. Returns a report per component."""
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
