"""The recorded state into this group's objects: every rank's own, or what a group of another size or under another hook left."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ratchet_contract.errors import StateError, UserError
from ratchet_contract.manifest import Manifest
from ratchet_contract.plural import counted
from ratchet_contract.resume import ComponentReport
from ratchet_hooks.registry import is_stateful
from ratchet_worker import restore as disk
from ratchet_worker import rng
from ratchet_worker.cores import own_cores
from ratchet_worker.passage import Passage, reset_by_policy
from ratchet_worker.replicas import Mean, follows_model
from ratchet_worker.replicas import mean as average
from ratchet_worker.snapshot import Snapshot

if TYPE_CHECKING:
    from ratchet_worker.runtime import Runtime


def restore_state(runtime: Runtime, manifest: Manifest, saved: Snapshot) -> list[ComponentReport]:
    """Put back ``saved``, this rank's own state, or where the number of ranks has changed one old rank's with what all of them
    had together. Raises ``UserError`` for what does not fit or ``policy.on_hook_mismatch`` does not allow, ``StateError`` where
    the shared tensors are not those that were saved."""
    state, how = runtime.state, _passage(runtime, manifest)
    if manifest.world_size == runtime.world_size:
        if _needs_mean(manifest, how, resized=False):
            saved, how = _averaged(runtime, manifest, saved, how)
        reports = state.restore(saved, how)
    else:
        _refuse_resize(runtime, manifest)
        reports = _restore_resized(runtime, manifest, saved, how)
    _insist_on_digests(runtime, manifest)
    return [*reports, _layout_report(runtime)]


def _insist_on_digests(runtime: Runtime, manifest: Manifest) -> None:
    """What lies in the live tensors now is what was saved from them, all the way: a digest of the file knows only of the file."""
    state = runtime.state
    if not manifest.replicas == state.hook_or_refuse()[1].replicas == "equal":
        return
    recorded = [*manifest.shared_digests]
    found = [*state.shared_digests(max(len(recorded), 1), own_cores())]
    if found != recorded:
        odd = [f"{n + 1}" for n, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b]
        where = f" in part {', '.join(odd)} of {len(recorded)}" if odd else ""
        raise StateError(f"what was restored is not what was saved: the digest of the shared tensors differs{where}")


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
    scalers and schedulers of rank 0. Ranks with scales of their own would undo other ones than their common gradient carries.
    Of the user's own objects those become their mean that follow the model; others stay each rank's own."""
    components = {"model", *runtime.state.optimizers, *runtime.state.of_the_group()}
    try:
        mean = _mean(runtime, manifest, components)
    except StateError as error:  # comes again with every attempt
        raise UserError(f"the ranks' replicas cannot become one: {error}", code="state-mismatch") from error
    told = {component: _mean_of(manifest) for component in mean.differed}
    for component in components:
        names = [name for name in mean.of_rank_0 if name.partition("/")[0] == component]
        if names and component in told:
            told[component] += f"; of rank 0, since it has no mean: {', '.join(names[:5])}"
        elif names:
            told[component] = "of rank 0: the ranks' differed, and have no mean"
    followers, kept = _of_the_user(runtime, manifest)
    for component, own in followers.items():
        told[component] = _mean_of(manifest)
        mean.tensors |= own.tensors
    private = {n: t for n, t in saved.private.items() if n.partition("/")[0] not in components | set(followers)}
    new = Snapshot(saved.shared, private | mean.tensors, saved.state | mean.state)
    return new, replace(how, averaged=told, kept=kept)


def _of_the_user(runtime: Runtime, manifest: Manifest) -> tuple[dict[str, Mean], dict[str, str]]:
    """Objects that the user registered and whose states differed: the means of those that follow the model, and why the others
    are kept as they are."""
    module = runtime.state.hook_or_refuse()[0].module
    followers: dict[str, Mean] = {}
    kept = {}
    for component in runtime.state.of_the_user():
        try:
            mean = _mean(runtime, manifest, {component})
        except StateError:  # of other shapes on every rank
            mean = None
        if mean is not None and not mean.names and not mean.of_rank_0:
            continue
        if mean is not None and follows_model(mean, module):
            followers[component] = mean
        else:
            kept[component] = (
                "kept per rank, though the ranks' replicas became one: not all that differs has the form of the model's tensors"
            )
    return followers, kept


def _mean(runtime: Runtime, manifest: Manifest, components: set[str]) -> Mean:
    ranks = range(manifest.world_size)
    return average(
        (disk.read(runtime.chosen, [r], components.__contains__, shared=False)[r] for r in ranks), components
    )


def _mean_of(manifest: Manifest) -> str:
    return f"the mean over {counted(manifest.world_size, 'rank')}, whose replicas differed"


def _refuse_resize(runtime: Runtime, manifest: Manifest) -> None:
    launch, data, recorded = runtime.launch, runtime.state.data, disk.recorded_hook(manifest)
    lost = ["the hook's state"] if recorded is None or is_stateful(recorded) else []
    lost += ["replicas that differ"] if manifest.replicas != "equal" else []
    movable = data is None or hasattr(data, "load_resized") or runtime.done  # or nothing is left that needs it
    lost += [] if movable else ["the data position"]
    if lost and launch.spec.policy.on_hook_mismatch == "fail":
        raise UserError(
            f"the checkpoint was made by {counted(manifest.world_size, 'rank')}, this group has {runtime.world_size}: "
            f"{' and '.join(lost)} cannot come back exactly. Set {launch.mismatch_key} to redistribute or reset, or "
            f"resume with {counted(manifest.world_size, 'rank')} again",
            code="world-size-mismatch",
        )


def _restore_resized(runtime: Runtime, manifest: Manifest, mine: Snapshot, how: Passage) -> list[ComponentReport]:
    everyone = disk.read(runtime.chosen, range(manifest.world_size), lambda c: c in ("hook", "data"), shared=False)
    if _needs_mean(manifest, how, resized=True):
        mine, how = _averaged(runtime, manifest, mine, how)
    seed = rng.derive_seed(runtime.launch.spec.seed, "resized", manifest.step)
    return runtime.state.restore_resized(mine, [everyone[r] for r in range(manifest.world_size)], seed, how)


def _layout_report(runtime: Runtime) -> ComponentReport:
    note, rank = runtime.notes.layout, runtime.rank
    if note is not None:
        return ComponentReport(component="layout", rank=rank, status="redistributed", reason=note)
    return ComponentReport(
        component="layout", rank=rank, status="exact"
    )  # none before the first reduction, then as now
