"""The hook of a spec against wrapper, back end, device and number of ranks: a table of rules, and the registry's warnings.

What needs no machine is refused by ``spec_parse`` (wrappers, DDP options that exclude each other, subgroups); what only the model
shows (dtypes, sparse or complex gradients, accumulation under static graph) by the ranks, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ratchet_contract.spec import JobSpec, Resolved
from ratchet_hooks.memory import hook_memory, needs_shapes
from ratchet_hooks.registry import HOOKS, replicas_of
from ratchet_hooks.specs import CustomSpec, PostLocalSGDSpec
from ratchet_service import unmanaged
from ratchet_service.hook_probe import Probe
from ratchet_service.machine import Machine
from ratchet_service.preflight_report import Report

_TUNED: Final = frozenset({"NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS", "NCCL_MIN_NCHANNELS"})
_OF_CLOUDS: Final = (
    "NCCL has tuned its sockets, threads and channels for AWS and GCP, and their images set what goes with it: on these clouds, "
    "measure before you keep NCCL_NSOCKS_PERTHREAD, NCCL_SOCKET_NTHREADS or NCCL_MIN_NCHANNELS"
)


@dataclass(frozen=True)
class Rule:
    """``detail`` may name ``{hook}``, ``{wrapper}``, ``{backend}``, ``{device}``, ``{ranks}``. ``refused``: it would not work."""

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
        lambda spec, _: spec.world.size == 1 and _rounds(spec),
        "with one rank nothing is sent, and the gradients still lose precision: use allreduce without a wrapper",
    ),
    Rule(
        "single-rank",
        "/hook",
        lambda spec, _: spec.world.size == 1 and spec.hook.name != "allreduce" and not _rounds(spec),
        "with one rank nothing is sent: {hook} saves nothing",
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
        "post_localSGD goes on averaging gradients over all {ranks} ranks at every step, as they are one subgroup, and averages "
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
        _OF_CLOUDS,
    ),
    Rule(
        "nccl-tuned",
        "/env",  # where a user's `export` ends up
        lambda spec, resolved: resolved.backend == "nccl" and bool(_TUNED & set(spec.env)),
        _OF_CLOUDS,
    ),
)


def _rounds(spec: JobSpec) -> bool:
    """Whether gradients come out of the hook with fewer bits even where they are one rank's."""
    return spec.hook.wrapper is not None or spec.hook.name not in ("allreduce", "post_localSGD", "noop", "custom")


def _all_in_one_subgroup(spec: JobSpec) -> bool:
    hook, world = spec.hook, spec.world
    if not isinstance(hook, PostLocalSGDSpec) or not hook.post_local_gradient_allreduce:
        return False
    return (hook.subgroup_size or world.ranks_per_node) == world.size > 1


_OWN: Final = frozenset({("/hook", "hook-caution"), *((rule.pointer, rule.code) for rule in RULES)})


def check(spec: JobSpec, resolved: Resolved, report: Report) -> None:
    """Every rule that applies, and what of the registry's cautions does."""
    words = {
        "hook": spec.hook.name,
        "wrapper": spec.hook.wrapper,
        "backend": resolved.backend,
        "device": resolved.device,
        "ranks": spec.world.size,
    }
    for rule in RULES:
        if rule.applies(spec, resolved):
            say = report.refuse if rule.refused else report.warn
            say(rule.pointer, rule.code, rule.detail.format(**words))
    for caution in HOOKS[spec.hook.name].cautions:
        if caution.applies(spec.hook, spec.world.size):
            report.warn("/hook", "hook-caution", caution.text)


def check_world(spec: JobSpec, resolved: Resolved, report: Report) -> None:
    """The same for another number of ranks: warnings of the former one go."""
    report.warnings = [w for w in report.warnings if (w.pointer, w.code) not in _OWN]
    check(spec, resolved, report)


def check_other(spec: JobSpec, resolved: Resolved, machine: Machine, probe: Probe) -> Report:
    """A job's spec with another hook, held against ``resolved``, what was decided for the job, and looked at by its interpreter.
    What else has become of the machine stays out of it."""
    report = Report()
    check(spec, resolved, report)
    if (main_file := unmanaged.main_file(spec)) is not None:
        report.problems += unmanaged.hook_problems(spec, main_file)
    if not report.problems:
        check_own(spec, machine, probe, report)
    return report


def check_own(spec: JobSpec, machine: Machine, probe: Probe, report: Report) -> None:
    """A hook of the user's own, looked at by the job's interpreter where jobs run on this machine; elsewhere users' code has no
    business on it."""
    if not isinstance(spec.hook, CustomSpec):
        return
    if machine.here and machine.trains:
        report.problems += probe.hook(spec.hook)
        return
    text = (
        "the machine that trains is another one, so the hook was not imported: whether it and its state can be used is seen by "
        "the first attempt"
    )
    report.warn("/hook/hook", "hook-not-checked", text)


def memory(spec: JobSpec, machine: Machine, probe: Probe) -> int | None:
    """Bytes that the hook's state will hold on each rank, once the task has told the shapes of its parameters."""
    if not needs_shapes(spec.hook):
        return hook_memory(spec.hook, ())
    shapes = probe.shapes() if machine.here and machine.trains else None
    return None if shapes is None else hook_memory(spec.hook, shapes)
