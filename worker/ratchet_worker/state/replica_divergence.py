"""Why replicas have diverged: each rank's facts about the first tensor that differs, and a likely cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ratchet_hooks.summary import HookSummary
from ratchet_hooks.torch_compat import version_of
from ratchet_worker.state.live_memory import LiveTensors
from ratchet_worker.state.model import MODEL
from ratchet_worker.state.optimizer import is_captured
from ratchet_worker.state.snapshot import Snapshot

Facts = Mapping[str, Any]
"""The facts of one rank, as JSON."""


class Start(NamedTuple):
    """Facts about a model before the attempt's first step. ``renormed``: by parameter, the module whose ``max_norm`` scales it.
    ``versions``: torch's counts of in-place changes."""

    renormed: Mapping[str, str]
    versions: Mapping[str, int | None]


def record_start(module: nn.Module) -> Start:
    """Return what ``Start`` holds about ``module`` as it is now."""
    named = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    renormed = {
        names[id(part.weight)]: f"{type(part).__name__} {path or '(the model)'}"
        for path, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and id(part.weight) in names
    }
    return Start(renormed, {name: version_of(parameter) for name, parameter in named.items()})


def facts(snapshot: Snapshot, summary: HookSummary, found: Start, name: str | None) -> Facts:
    """Return this rank's facts about the shared tensor ``name``; for None, about the rank's list of tensors. ``found``: from
    before the first step."""
    if name is None:
        return {"tensors": [[one, numel] for one, numel, _ in snapshot.sizes()]}
    parameter = _parameter(name)
    groups = {component: _groups(snapshot, component) for component in snapshot.state}
    return {
        "steps": summary.step,
        "backwards": summary.iteration,
        "changes": _changes(snapshot, parameter, found.versions.get(parameter)),
        "renormed": found.renormed.get(parameter),
        "trained": any(parameter in group["params"] for listed in groups.values() for group in listed),
        "groups": {
            component: [{key: value for key, value in group.items() if key != "params"} for group in listed]
            for component, listed in groups.items()
            if listed
        },
    }


def cause(name: str | None, facts_by_rank: Sequence[Facts]) -> str:
    """Return the likely cause of a difference between the ranks, with advice. ``name``: the tensor; None: the lists of tensors
    differ."""
    return f"Likely cause: {_other_tensors(facts_by_rank) if name is None else _other_values(name, facts_by_rank)}"


def _other_tensors(facts_by_rank: Sequence[Facts]) -> str:
    """Return the likely cause of different lists of tensors."""
    ranks = [dict(map(tuple, one["tensors"])) for one in facts_by_rank]
    for name in {name: None for rank in ranks for name in rank}:
        have = [number for number, rank in enumerate(ranks) if name in rank]
        if len(have) < len(ranks):
            return (
                f"only rank {have} has {name}: the optimizer of the others has not trained that parameter yet. Have all ranks do "
                "the same optimizer steps for the same parameters"
            )
        if len({rank[name] for rank in ranks}) > 1:
            return f"{name} does not have the same size on all ranks: build the same model and optimizers on all ranks"
    return "the ranks list them in another order: build the same model and optimizers, in the same order, on all ranks"


def _other_values(name: str, facts_by_rank: Sequence[Facts]) -> str:
    """Return the likely cause of a tensor ``name`` with different values: the first one that fits the facts."""
    first = facts_by_rank[0]
    if first["renormed"]:
        return (
            f"{first['renormed']} scales rows down in its forward pass (max_norm), each rank those of its own batch. Build it "
            "without max_norm, and scale all rows after optimizer.step(), the same on all ranks"
        )
    if (odd := _other_groups(facts_by_rank)) is not None:
        return (
            f"{odd}, as where each rank steps a scheduler by its own metric. Step it by a value that all ranks share "
            "(Evaluation.averages, Session.all_gather)"
        )
    if first["backwards"] < first["steps"]:
        return (
            f"{first['steps'] - first['backwards']} of {first['steps']} steps had no synchronised backward, so each rank trained "
            "on its own gradients: under no_sync() throughout, or with a forward outside the wrapped model. Call the model that "
            "wrap() returned, and leave no_sync() before the last backward of a step"
        )
    if len({one["changes"] for one in facts_by_rank}) > 1:
        counts = ", ".join(f"rank {rank} {one['changes']} times" for rank, one in enumerate(facts_by_rank))
        return (
            f"{_parameter(name)} was changed in place by {counts}: code that only some ranks run (`if rank == 0`), or a step of "
            "the optimizer that some leave out. Have all ranks do it"
        )
    what = "the optimizer" if first["trained"] else "any registered optimizer"
    return (
        f"code other than {what} changes {_parameter(name)} by values that differ between ranks: a draw from generators, a "
        "function of the rank's batch. Have all ranks use the same value"
    )


def _other_groups(facts_by_rank: Sequence[Facts]) -> str | None:
    """Return a clause about the first option of rank 0's optimizers that differs between ranks; None if there is none."""
    for component, groups in facts_by_rank[0]["groups"].items():
        for number, group in enumerate(groups):
            for key in group:
                values = [_option(one, component, number, key) for one in facts_by_rank]
                if len(set(values)) > 1:
                    text = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                    return f"{key} of {component} is {text}"
    return None


def _option(rank_facts: Facts, component: str, number: int, key: str) -> Any:
    """Return the value of an option in one rank's group ``number`` of an optimizer; None if it is missing."""
    groups = rank_facts["groups"].get(component, [])
    return groups[number].get(key) if number < len(groups) else None


def _groups(snapshot: Snapshot, component: str) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with options as text; empty for a component that is not an optimizer."""
    data = snapshot.state[component]
    pairs = data.get("dict", []) if isinstance(data, dict) else []
    if not any(pair[0] == "param_groups" for pair in pairs) or not is_captured(rest := snapshot.value(component)):
        return []
    return [
        {key: value if key == "params" else _text(value) for key, value in group.items()}
        for group in rest["param_groups"]
    ]


def _text(value: Any) -> str:
    """Return ``value`` as text; a tensor with one element as that number."""
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)


def _changes(snapshot: Snapshot, parameter: str, before: int | None) -> int | None:
    """Return how often a parameter was changed in place since the count ``before``; None if that is not known."""
    shared, name = snapshot.shared, f"{MODEL}/{parameter}"
    if before is None or not isinstance(shared, LiveTensors) or name not in shared:
        return None
    version = shared.version(name)
    return None if version is None else version - before


def _parameter(name: str) -> str:
    """Return the parameter that a tensor belongs to: ``layer.weight`` for ``model/layer.weight`` and
    ``optimizer/layer.weight/exp_avg``."""
    component, _, rest = name.partition("/")
    return rest if component == MODEL else rest.rpartition("/")[0]  # a module's name may have a slash
