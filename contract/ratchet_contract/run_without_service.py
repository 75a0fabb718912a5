"""What a run without a service (a Session under plain python or torchrun) records as its spec, and which of a job's spec it would
have recorded. A job that adopts such a run compares with that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal

from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_parse import parse_spec

_GIVEN = ("ddp", "determinism", "seed", "hook")
"""Keys that both kinds of run give: the Session's arguments, and a job's spec."""


def spec_data(
    script: Sequence[str], nodes: int, ranks_per_node: int, device: Literal["cpu", "cuda"] | str
) -> dict[str, Any]:
    """The spec without what the script gives to its Session. ``script``: its file and arguments; only the file's name counts,
    since a run may be started from any directory."""
    file = PurePath(script[0]).with_suffix(".py").name
    world = {"nodes": nodes, "ranks_per_node": ranks_per_node, "device": device}
    return {"name": "standalone", "script": [file, *script[1:]], "code": {"path": "."}, "world": world}


def as_without_service(spec: JobSpec, device: Literal["cpu", "cuda"]) -> JobSpec:
    """The spec that a run of the job's script without a service would have recorded. ``device``: as resolved for the job. What
    a run has from its environment (variables, interpreter, cores) is not in it: of that the recorded facts tell."""
    assert spec.script is not None
    data = spec_data(spec.script, spec.world.nodes, spec.world.ranks_per_node, device)
    return parse_spec({**data, **spec.model_dump(mode="json", include={*_GIVEN})})


def unequal(path: str, there: Any, here: Any) -> list[tuple[str, Any, Any]]:
    """The leaves in which two values of a spec differ: path, value there, value here. A hook of another name is one of them."""
    same_kind = isinstance(there, dict) and isinstance(here, dict) and there.get("name") == here.get("name")
    if not same_kind:
        return [] if there == here else [(path, there, here)]
    keys = sorted({*there, *here})
    return [leaf for key in keys for leaf in unequal(f"{path}.{key}", there.get(key), here.get(key))]


def shown(value: Any) -> str:
    """A value of a spec in a sentence; a hook by its name."""
    return str(value["name"]) if isinstance(value, dict) and "name" in value else json.dumps(value)
