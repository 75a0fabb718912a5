"""The spec that a run without a service records, for comparison with that of a job that adopts the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal

from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import parse_spec

_SESSION_KEYS = ("ddp", "determinism", "seed", "hook")
"""Keys that are compared: a Session's arguments, which a job's spec has too."""


def spec_data(
    script: Sequence[str], nodes: int, ranks_per_node: int, device: Literal["cpu", "cuda"] | str
) -> dict[str, Any]:
    """Return the part of a run's recorded spec that is independent of the Session's arguments. ``script``: the script's file and
    its arguments; the file's directory is ignored."""
    # A run may be started from any directory.
    file = PurePath(script[0]).with_suffix(".py").name
    world = {"nodes": nodes, "ranks_per_node": ranks_per_node, "device": device}
    return {"name": "standalone", "script": [file, *script[1:]], "code": {"path": "."}, "world": world}


def standalone_spec(spec: JobSpec, device: Literal["cpu", "cuda"]) -> JobSpec:
    """Return the spec that a run of the job's script without a service would have recorded, but with the defaults of
    ``checkpoint`` and ``policy``. The job must have a script."""
    assert spec.script is not None
    data = spec_data(spec.script, spec.world.nodes, spec.world.ranks_per_node, device)
    return parse_spec({**data, **spec.model_dump(mode="json", include={*_SESSION_KEYS})})


def differing_leaves(path: str, left: Any, right: Any) -> list[tuple[str, Any, Any]]:
    """Return the differences between two values of a spec, as tuples ``(path, left value, right value)``. Mappings are compared
    key by key, unless their ``name`` differs. ``path``: the path of the two values in the spec."""
    same_kind = isinstance(left, dict) and isinstance(right, dict) and left.get("name") == right.get("name")
    if not same_kind:
        return [] if left == right else [(path, left, right)]
    keys = sorted({*left, *right})
    return [leaf for key in keys for leaf in differing_leaves(f"{path}.{key}", left.get(key), right.get(key))]


def value_text(value: Any) -> str:
    """Return a value of a spec as text for a sentence; a hook as its name."""
    return str(value["name"]) if isinstance(value, dict) and "name" in value else json.dumps(value)
