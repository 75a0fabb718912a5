"""The exactness matrix at the level of hooks: factors, what excludes what, and the rows that cover every pair.

Hooks enter by themselves: every available row of the registry must have a line in ``VARIANTS`` (a test asks for it), and every
wrapper that a hook can carry makes one more level.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any, Final

from ratchet_contract.errors import SpecError
from ratchet_contract.spec.parse import parse_spec
from ratchet_hooks.specs import hook_specs as specs
from ratchet_hooks.specs.hook_specs import HookSpec
from ratchet_hooks.specs.registry import HOOKS
from tests.support.pairwise import Item, cover_single_levels, pairwise

Row = dict[str, str]
TOTAL: Final = 7
START: Final = 3
"""The iteration with which a hook begins what it is for."""

_LOW_RANK: Final = {"start_powerSGD_iter": START, "orthogonalization_epsilon": 1e-6}
_OWN: Final = "tests.support.custom_hooks"
VARIANTS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "fp16_compress": {},
    "bf16_compress": {},
    "powerSGD": {"matrix_approximation_rank": 2, **_LOW_RANK},
    "powerSGD:cold": {"warm_start": False, **_LOW_RANK},
    "powerSGD:no-feedback": {"use_error_feedback": False, **_LOW_RANK},
    "powerSGD:stateless": {"use_error_feedback": False, "warm_start": False, **_LOW_RANK, "start_powerSGD_iter": 0},
    "powerSGD:stacked": {"batch_tensors_with_same_shape": True, **_LOW_RANK},
    "powerSGD:all": {"min_compression_rate": 0.1, **_LOW_RANK},
    "batched_powerSGD": {"matrix_approximation_rank": 2, **_LOW_RANK},
    "post_localSGD": {"start_localSGD_iter": START, "model_averaging_period": 2},
    "post_localSGD:alone": {
        "start_localSGD_iter": START, "model_averaging_period": 2, "post_local_gradient_allreduce": False,
    },
    "post_localSGD:levels": {"start_localSGD_iter": START, "period_group_size_dict": {}},
    "quantization_pertensor": {},
    "quantization_perchannel": {"bucket_size": 64},
    "noop": {},
    "custom": {"hook": f"{_OWN}:smoothed", "state": f"{_OWN}:Counting", "state_args": {"decay": 0.25}},
    "custom:per-rank": {"hook": f"{_OWN}:changes_per_rank", "replicas": "rank"},
}  # fmt: skip
"""Parameters by label: the hook's name, and after a colon what is special."""


def hook_spec(label: str, world: int) -> HookSpec:
    """``powerSGD:cold+fp16``: the hook's name, what is special, its wrapper; some parameters depend on the number of ranks."""
    variant, _, wrapper = label.partition("+")
    parameters = dict(VARIANTS[variant])
    if "period_group_size_dict" in parameters:
        parameters["period_group_size_dict"] = {2: 2, 4: 4} if world == 4 else {2: world}
    data = {"name": variant.partition(":")[0], "wrapper": wrapper or None, **parameters}
    return specs.hook_spec(data)


def family(label: str) -> str:
    """The hook and its wrapper, for a table: ``powerSGD:cold`` counts as ``powerSGD``."""
    variant, plus, wrapper = label.partition("+")
    return variant.partition(":")[0] + plus + wrapper


def hook_labels() -> list[str]:
    """All variants of all available hooks, alone and under each wrapper."""
    labels = [label for label in VARIANTS if HOOKS[label.partition(":")[0]].available]
    wrapped = [f"{label}+{w}" for label in labels if ":" not in label for w in ("fp16", "bf16") if _wraps(label, w)]
    return labels + wrapped


@cache
def _wraps(name: str, wrapper: str) -> bool:
    hook = {"name": name, **VARIANTS[name], "wrapper": wrapper}
    spec = {"name": "x", "script": ["x.py"], "code": {"path": "."}, "hook": hook}
    try:
        parse_spec(spec)
    except SpecError:
        return False
    return True


def factors() -> dict[str, list[str]]:
    """Levels by factor; the first of each goes with everything."""
    return {
        "hook": hook_labels(),
        "world": ["2", "1", "3", "4"],
        "buckets": ["several", "one", "each"],
        "graph": [
            "dynamic", "dynamic-turn", "static", "static-unused",
            "find", "find-unused", "find-steps", "find-ranks", "find-freeze", "find-turn",
        ],
        "views": ["copies", "views"],
        "grads": ["none", "zeros"],
        "accumulate": ["one", "no_sync", "synced"],
        "precision": ["float32", "bf16", "fp16-scaler"],
        "model": ["plain", "channels-last", "shared", "dtypes", "recompute", "buffers"],
        "compile": ["no", "inside", "outside"],
        "optimizer": ["sgd", "adam-foreach", "adamw-fused", "tensor-lr", "two", "lbfgs"],
        "buffers": ["broadcast", "own"],
    }  # fmt: skip


def clash(a: Item, b: Item) -> bool:
    """Do these two levels exclude each other? Each with its reason; what Ratchet refuses has a test of its own."""
    return _clash(*a, *b) or _clash(*b, *a)


def _clash(one: str, a: str, other: str, b: str) -> bool:
    hook = a.partition("+")[0] if one == "hook" else ""
    return any(
        (
            # no_sync before static graph's first synchronised backward: refused.
            one == "graph" and a.startswith("static") and (other, b) == ("accumulate", "no_sync"),
            # torch's scaler takes no closure.
            (one, a, other, b) == ("optimizer", "lbfgs", "precision", "fp16-scaler"),
            # torch's LBFGS lays gradients out as rows, and all in one dtype.
            (other, b) == ("optimizer", "lbfgs") and (one, a) in (("model", "channels-last"), ("model", "dtypes")),
            # A closure is evaluated as often as a rank's own replica asks for: replicas that differ would lose each other.
            (other, b) == ("optimizer", "lbfgs") and hook.startswith(("noop", "post_localSGD", "custom:per-rank")),
            # Groups of at least two ranks.
            hook == "post_localSGD:levels" and (other, b) == ("world", "1"),
            # Parameters are quantized as float32.
            hook.startswith("quantization") and (other, b) == ("model", "dtypes"),
        )
    )


def matrix() -> list[Row]:
    return pairwise(factors(), clash)


def reduced_matrix() -> list[Row]:
    """The rows of the test suite: every level occurs. A compiled model costs seconds, so each way to compile comes once, where
    it is cheapest."""
    rows, usual = matrix(), {factor: levels[0] for factor, levels in factors().items()}
    cost = {describe(row): (row["world"], sum(row[f] != level for f, level in usual.items())) for row in rows}
    compiled = [
        min((row for row in rows if row["compile"] == level), key=lambda row: cost[describe(row)])
        for level in factors()["compile"][1:]
    ]
    return cover_single_levels([row for row in rows if row["compile"] == "no" or row in compiled])


def kills_of(row: Row, seed: int) -> tuple[list[int], list[int]]:
    """Steps after which the run is saved only, and those after which it is interrupted: one around the rebuild of the buckets,
    one from the start of compression on; of the two only one where each interruption costs another compilation."""
    rng = random.Random(f"{seed} {sorted(row.items())}")
    early, late = rng.randint(0, START - 1), rng.randint(START, TOTAL - 1)
    kills = [early, late] if row["compile"] == "no" else [rng.choice((early, late))]
    return [rng.randint(1, TOTAL - 1)], kills


def describe(row: Row) -> str:
    """The levels that are not the first of their factor."""
    usual = {factor: levels[0] for factor, levels in factors().items()}
    return " ".join(f"{level}" for factor, level in row.items() if level != usual[factor] or factor == "hook")
