"""Pre-flight of a spec's hook, for example against its wrapper, back end and number of ranks. A hook of the user's own is
imported in another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_hooks.specs.hook_specs import CustomSpec, PostLocalSGDSpec
from ratchet_hooks.specs.memory_estimate import hook_memory, needs_shapes
from ratchet_hooks.specs.registry import HOOKS, replicas_of
from ratchet_service.isolation.subprocess_query import StartTimeout
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine
from ratchet_service.user_code import hook_probe
from ratchet_service.user_code.hook_probe import Probe

_TUNED: Final = frozenset({"NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS", "NCCL_MIN_NCHANNELS"})
_CLOUD_ADVICE: Final = (
    "NCCL has tuned its sockets, threads and channels for AWS and GCP, and their images set matching values: on these "
    "clouds, measure before you set NCCL_NSOCKS_PERTHREAD, NCCL_SOCKET_NTHREADS or NCCL_MIN_NCHANNELS"
)


@dataclass(frozen=True)
class Rule:
    """A warning, or with ``refused`` a problem, that is reported if ``applies`` returns True. ``detail``: its text, with
    placeholders."""

    code: str
    pointer: str
    applies: Callable[[JobSpec, Resolved], bool]
    detail: str
    refused: bool = False


RULES: Final = (
    Rule(
        "hook-backend",
        "/ddp/backend",
        lambda spec, resolved: resolved.backend not in HOOKS[spec.hook.name].backends,
        "hook {hook} does not run on {backend}: choose another hook, or another ddp.backend",
        refused=True,
    ),
    Rule(
        "hook-caution",
        "/hook/wrapper",
        lambda spec, _: spec.hook.wrapper == "fp16_compress_wrapper",
        "{wrapper}: gradients above 65504 on any rank become inf in float16; the first one is reported with its parameter",
    ),
    Rule(
        "hook-caution",
        "/hook/wrapper",
        lambda spec, _: spec.hook.wrapper == "bf16_compress_wrapper",
        "{wrapper}: gradients keep eight significant bits, about three digits",
    ),
    Rule(
        "hook-caution",
        "/hook/wrapper",
        lambda spec, _: spec.hook.wrapper == "fp16_compress_wrapper" and spec.hook.name.endswith("powerSGD"),
        "{wrapper}: {hook} computes P and Q in float16, where they overflow sooner than the gradients: bf16_compress_wrapper has "
        "the range of float32",
    ),
    Rule(
        "hook-caution",
        "/hook/replicas",
        lambda spec, _: spec.world.size > 1 and isinstance(spec.hook, CustomSpec) and replicas_of(spec.hook) == "rank",
        "replicas: rank: the ranks' parameters may differ, and checkpoints hold every rank's parameters and optimizer",
    ),
    Rule(
        "single-rank",
        "/hook",
        lambda spec, _: spec.world.size == 1 and _loses_precision(spec),
        "with one rank no gradients are sent, but they still lose precision: use allreduce without a wrapper",
    ),
    Rule(
        "single-rank",
        "/hook",
        lambda spec, _: spec.world.size == 1 and spec.hook.name != "allreduce" and not _loses_precision(spec),
        "with one rank no gradients are sent: {hook} has no benefit",
    ),
    Rule(
        "hook-caution",
        "/world/ranks_per_node",
        # A ring all-reduce sends 2 (n - 1) / n times four bytes per element; every rank gathers n - 1 times one.
        lambda spec, _: spec.hook.name.startswith("quantization") and spec.world.size > 8,
        "with {ranks} ranks {hook} moves more bytes than a plain all-reduce: fp16_compress moves half of one's",
    ),
    Rule(
        "no-effect",
        "/hook/subgroup_size",
        lambda spec, _: _all_in_one_subgroup(spec),
        "post_localSGD continues to average "
        "gradients over all {ranks} ranks at every step, as they are one subgroup, and averages "
        "parameters on top: set hook.subgroup_size to fewer ranks, or hook.post_local_gradient_allreduce to false",
    ),
    Rule(
        "hook-caution",
        "/hook/model_averaging_period",
        lambda spec, _: isinstance(spec.hook, PostLocalSGDSpec) and spec.hook.period == 1,
        "averaging all parameters after every step sends as much as averaging the gradients does: use allreduce, or a longer "
        "period",
    ),
    Rule(
        "nccl-tuned",
        "/nccl",
        lambda spec, resolved: resolved.backend == "nccl" and bool(_TUNED & set(spec.nccl)),
        _CLOUD_ADVICE,
    ),
    Rule(
        "nccl-tuned",
        "/env",  # where a user's `export` ends up
        lambda spec, resolved: resolved.backend == "nccl" and bool(_TUNED & set(spec.env)),
        _CLOUD_ADVICE,
    ),
)


def _loses_precision(spec: JobSpec) -> bool:
    """True if the hook changes the gradients' values even with a single rank, as far as is known."""
    return spec.hook.wrapper is not None or spec.hook.name not in ("allreduce", "post_localSGD", "noop", "custom")


def _all_in_one_subgroup(spec: JobSpec) -> bool:
    """True if post_localSGD averages gradients within subgroups, but all of several ranks are in one subgroup."""
    hook, world = spec.hook, spec.world
    if not isinstance(hook, PostLocalSGDSpec) or not hook.post_local_gradient_allreduce:
        return False
    return (hook.subgroup_size or world.ranks_per_node) == world.size > 1


_RULE_WARNINGS: Final = frozenset({("/hook", "hook-caution"), *((rule.pointer, rule.code) for rule in RULES)})


def check(spec: JobSpec, resolved: Resolved, report: Report) -> None:
    """Check the spec's hook. Add to ``report`` the warnings and problems of all ``RULES`` that apply, and a warning for each of
    the hook's own cautions that applies."""
    words = {
        "hook": spec.hook.name,
        "wrapper": spec.hook.wrapper,
        "backend": resolved.backend,
        "device": resolved.device,
        "ranks": spec.world.size,
    }
    for rule in RULES:
        if rule.applies(spec, resolved):
            add = report.refuse if rule.refused else report.warn
            add(rule.pointer, rule.code, rule.detail.format(**words))
    for caution in HOOKS[spec.hook.name].cautions:
        if caution.applies(spec.hook, spec.world.size):
            report.warn("/hook", "hook-caution", caution.text)


def recheck_for_world(spec: JobSpec, resolved: Resolved, report: Report) -> None:
    """Repeat ``check`` for another number of ranks. First, the warnings that an earlier ``check`` may have added are removed from
    ``report``."""
    report.warnings = [w for w in report.warnings if (w.pointer, w.code) not in _RULE_WARNINGS]
    check(spec, resolved, report)


def check_changed_hook(spec: JobSpec, resolved: Resolved, machine: Machine, probe: Probe) -> Report:
    """Return the warnings and problems of the hook of ``spec``, a stored job's spec with another hook. ``resolved``: what was
    decided for the job."""
    report = Report()
    check(spec, resolved, report)
    if (main_file := unmanaged_script.read_main_file(spec)) is not None:
        report.problems += unmanaged_script.hook_problems(spec, main_file)
    if not report.problems:
        check_custom_hook(spec, machine, probe, report)
    return report


def check_custom_hook(spec: JobSpec, machine: Machine, probe: Probe, report: Report) -> None:
    """Import a hook of the user's own with the job's interpreter, and add its faults to ``report``; a warning if it is not
    imported."""
    if not isinstance(spec.hook, CustomSpec):
        return
    if spec.environment is not None:
        why = "the first attempt builds the job's environment"
    elif machine.is_this_machine and machine.runs_jobs:
        try:
            report.problems += probe.check_hook(spec.hook)
            return
        except StartTimeout:
            why = f"{probe.python} took longer than {hook_probe.START_SECONDS:g} s to import torch"
    else:
        why = "the job trains on another machine"
    text = f"{why}, so the hook was not imported: the first attempt checks it and its state"
    report.warn("/hook/hook", "hook-not-checked", text)


def state_bytes(spec: JobSpec, machine: Machine, probe: Probe) -> int | None:
    """Return the bytes that the hook's state will hold on each rank; None if unknown. May query the task in a process."""
    if not needs_shapes(spec.hook):
        return hook_memory(spec.hook, ())
    probed = machine.is_this_machine and machine.runs_jobs and spec.environment is None
    shapes = probe.shapes() if probed else None
    return None if shapes is None else hook_memory(spec.hook, shapes)
