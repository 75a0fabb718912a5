"""Pre-flight of a spec's launcher: whether the service has it, and whether it can do what the spec requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ratchet_contract.plural import pluralize
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import suggestion
from ratchet_service.launchers.base import Launcher
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine

NODE_PYTHON = "python"
"""The interpreter if the nodes' files are not this machine's: it is found on a node's PATH, which in an image leads to the
image's interpreter."""


_UNCHECKED_KEYS: Final = frozenset(
    {"name", "task", "script", "hook", "ddp", "nccl", "labels", "priority", "seed", "determinism"}
)
"""Keys of the spec that no launcher checks: a fault in them does not prevent the launcher's check."""


def check(
    spec: JobSpec, launchers: Mapping[str, Launcher], report: Report, faulty_keys: frozenset[str] = frozenset()
) -> None:
    """Add to ``report`` what the spec's launcher refuses and warns about. ``faulty_keys``: keys with a fault, on which no check
    may depend."""
    if "launcher" in faulty_keys:
        return
    launcher = launchers.get(spec.launcher.kind)
    if launcher is None:
        here = ", ".join(launchers)
        text = (
            f"this service has no launcher {spec.launcher.kind!r}{suggestion(spec.launcher.kind, launchers)}; it has {here}. Its "
            "launchers file (`ratchet serve --launchers FILE`) names those that it has"
        )
        report.refuse("/launcher/kind", "launcher-not-here", text)
        return
    if launcher.max_nodes is not None and "world" not in faulty_keys and spec.world.nodes > launcher.max_nodes:
        text = (
            f"the launcher {spec.launcher.kind} has {pluralize(launcher.max_nodes, 'node')}: use "
            "world.ranks_per_node, or a launcher of several machines"
        )
        report.refuse("/world/nodes", "too-many-nodes", text)
    if not faulty_keys <= _UNCHECKED_KEYS:
        return
    warnings, problems = launcher.check(spec)
    report.warnings += warnings
    report.problems += problems
    if not launcher.slots and spec.resources.cpus_per_rank is None and "OMP_NUM_THREADS" not in spec.env:
        text = "one thread per rank is the default: set resources.cpus_per_rank to use more cores of a node"
        report.warn("/resources/cpus_per_rank", "single-thread", text)


def machine_of(spec: JobSpec, machine: Machine, launcher: Launcher | None) -> Machine:
    """Return the machine that the spec is checked against. For a launcher whose slots Ratchet manages, or none, this is
    ``machine``. For an engine, it is a copy of ``machine`` with the GPUs and cores that the spec requests."""
    if launcher is None or launcher.slots:
        return machine
    ranks = spec.world.ranks_per_node
    wants = spec.world.device == "cuda" or (spec.world.device == "auto" and spec.resources.gpu is not None)
    threads = spec.resources.cpus_per_rank or 1
    there = replace(
        machine,
        gpus=tuple(range(ranks)) if wants else (),
        cpus=ranks * threads,
        cpu_slots=None,
        torch_cuda=wants,
        runs_jobs=False,
    )
    return there if launcher.same_files else replace(there, is_this_machine=False, python=NODE_PYTHON)
