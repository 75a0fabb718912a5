"""``resources.memory`` and ``resources.open_files`` on the local launcher: what cannot be kept is refused."""

from __future__ import annotations

import resource

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.plural import counted
from ratchet_contract.spec import JobSpec

_LEAST = 2**29
"""Bytes of private memory below which a rank does not get as far as its first step: torch, its threads' stacks, gloo."""


def problems(spec: JobSpec) -> list[FieldProblem]:
    """Why this machine cannot keep to the limits that the spec gives."""
    found = []
    share, files = spec.memory_of_a_rank, spec.resources.open_files
    if share is not None and spec.world.device != "cpu":
        text = (
            "the local launcher bounds the memory of jobs with world.device cpu alone, since CUDA maps far more than it uses: "
            "remove it, say device cpu, or use an engine"
        )
        found.append(FieldProblem(pointer="/resources/memory", code="launcher-cannot", detail=text))
    elif share is not None and share < _LEAST:
        ranks = counted(spec.world.ranks_per_node, "rank")
        text = f"{share // 2**20} MiB for each of {ranks}, and torch alone needs 512: ask for more"
        found.append(FieldProblem(pointer="/resources/memory", code="limit-too-low", detail=text))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files is not None and most != resource.RLIM_INFINITY and files > most:
        text = f"this machine allows a process at most {most} open files: ask for less, or raise LimitNOFILE of the service"
        found.append(FieldProblem(pointer="/resources/open_files", code="limit-too-high", detail=text))
    return found


def warnings(spec: JobSpec) -> list[Warning_]:
    share = spec.memory_of_a_rank
    if share is None:
        return []
    text = (
        f"without a container each process of a rank is held to {share // 2**20} MiB of its own, and so is each DataLoader "
        "worker beside it: their sum is not bounded"
    )
    return [Warning_(pointer="/resources/memory", code="memory-per-process", detail=text)]
