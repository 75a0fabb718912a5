"""The launcher of a spec: is it here, can it do what is asked, and what does it offer in the place of this machine?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ratchet_contract.plural import counted
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_parse import nearest
from ratchet_service.launchers.base import Launcher
from ratchet_service.machine import Machine
from ratchet_service.preflight_report import Report

NODE_PYTHON = "python"
"""Where the nodes' files are not this machine's: found on a node's PATH, which in an image names the image's interpreter."""


_ALL_ONE: Final = frozenset(
    {"name", "task", "script", "hook", "ddp", "nccl", "labels", "priority", "seed", "determinism"}
)
"""Keys of the spec that no launcher looks at."""


def check(
    spec: JobSpec, launchers: Mapping[str, Launcher], report: Report, unsure: frozenset[str] = frozenset()
) -> None:
    """Add what the launcher refuses and warns of, as far as it depends on nothing ``unsure``. A launcher that the service does
    not have is all there is to say."""
    if "launcher" in unsure:
        return
    launcher = launchers.get(spec.launcher.kind)
    if launcher is None:
        here = ", ".join(launchers)
        text = (
            f"this service has no launcher {spec.launcher.kind!r}{nearest(spec.launcher.kind, launchers)}; it has {here}. Its "
            "launchers file (`ratchet serve --launchers FILE`) names those that it has"
        )
        report.refuse("/launcher/kind", "launcher-not-here", text)
        return
    if launcher.max_nodes is not None and "world" not in unsure and spec.world.nodes > launcher.max_nodes:
        text = (
            f"the launcher {spec.launcher.kind} has {counted(launcher.max_nodes, 'node')}: use "
            "world.ranks_per_node, or a launcher of several machines"
        )
        report.refuse("/world/nodes", "too-many-nodes", text)
    if not unsure <= _ALL_ONE:
        return
    warnings, problems = launcher.check(spec)
    report.warnings += warnings
    report.problems += problems
    if not launcher.slots and spec.resources.cpus_per_rank is None and "OMP_NUM_THREADS" not in spec.env:
        text = (
            "one thread per rank, since nothing else is asked for: set resources.cpus_per_rank to what a node can give"
        )
        report.warn("/resources/cpus_per_rank", "single-thread", text)


def machine_of(spec: JobSpec, machine: Machine, launcher: Launcher | None) -> Machine:
    """The machine that a job of ``launcher`` trains on. An engine gives what the spec asks it for."""
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
        trains=False,
    )
    return there if launcher.same_files else replace(there, here=False, python=NODE_PYTHON)
