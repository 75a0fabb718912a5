"""Checks of a job spec against this machine, and the resolution of every ``auto``: once per job, at submission. Another
number of ranks decides the threads again (``resize``), and nothing else.

What cannot work is a problem with a JSON pointer, and the job is refused; what is legal but without effect or risky is a
warning. Nothing of the user's is imported and nothing imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ratchet_contract.api import Warning_
from ratchet_contract.code_choice import Allowed, anything
from ratchet_contract.code_tree import Limits
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_contract.plural import counted
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_contract.spec_parse import nearest
from ratchet_service import (
    preflight_hook,
    preflight_launcher,
    preflight_python,
    preflight_start,
    preflight_uri,
    snapshot,
    syntax,
    unmanaged,
)
from ratchet_service.confined import OWN, Confined
from ratchet_service.credentials import withheld
from ratchet_service.decide import MAX_BACKOFF
from ratchet_service.hook_probe import HOOK_SECONDS, Probe
from ratchet_service.interpreters import Findings, Interpreters, pip_install
from ratchet_service.launchers.base import Launcher
from ratchet_service.machine import Machine
from ratchet_service.preflight_report import Report
from ratchet_service.slots import need_of, oversubscribed

_OF_WORLD: Final = frozenset({"oversubscribed", "single-rank"})


def resolve(
    spec: JobSpec,
    machine: Machine,
    *,
    launchers: Mapping[str, Launcher] | None = None,
    interpreters: Interpreters | None = None,
    environ: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    hook_seconds: float = HOOK_SECONDS,
    confined: Confined = OWN,
    unsure: frozenset[str] = frozenset(),
    allowed: Allowed = anything,
) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
    """Every ``auto`` decided for ``machine``, warnings, and the problems that forbid the job (then ignore the rest): all that can
    be told, whatever else is wrong.

    ``launchers``: those of the service; None: ``machine`` is asked, whatever the spec's launcher is.
    ``environ`` is what the launcher's environment will be (for secrets); ``code_digest`` is left to the snapshot.
    ``hook_seconds``: how long the import of a user's own hook may take; ``confined``: as whom it is made.
    ``unsure``: keys of the spec that stand at their defaults because of a fault; what depends on one is not looked at.
    ``allowed``: may a real path be read for the snapshot?
    """
    report, environ = Report(), os.environ if environ is None else environ
    if launchers is not None:
        preflight_launcher.check(spec, launchers, report, unsure)
        if spec.launcher.kind not in launchers:
            unsure |= {"launcher"}
        machine = preflight_launcher.machine_of(spec, machine, launchers.get(spec.launcher.kind))

    def sure(*keys: str) -> bool:
        return unsure.isdisjoint(keys)

    found_code = check_code(spec, limits, report, allowed)
    code_ok = sure("code") and found_code
    if (
        spec.code is not None
        and spec.code.source == "nodes"
        and not snapshot.exists(Path(spec.code.path), directory=True)
    ):
        machine = replace(machine, here=False)  # what this machine does not have, only the ranks can look into
    python, findings = spec.python or machine.python, Findings(torch=True, torch_cuda=machine.torch_cuda)
    if machine.here and sure("launcher"):
        _check_secrets(spec, environ, report)
        if sure("python"):
            whole = code_ok and sure("task", "env")
            python, findings = preflight_python.check(
                spec, machine, interpreters or Interpreters(confined), whole, report, confined
            )
    if found_code and sure("python"):
        _check_script(spec, findings.version, report)
    preflight_start.check(spec, report)
    placed = report if sure("launcher", "world", "resources", "ddp", "python") else Report()
    device, backend = _device_and_backend(spec, machine, python, findings, placed)
    resolved = Resolved(
        device="cuda" if device == "cuda" else "cpu",
        backend="nccl" if backend == "nccl" else "gloo",
        threads_per_rank=_threads(spec, machine, device),
        python=python,
    )
    preflight_hook.check(spec, resolved, report if placed is report and sure("hook") else Report())
    _warn_of_world(spec, resolved, machine, report)
    _warn(spec, resolved, report)
    preflight_uri.check(spec, report)
    looked_at = {"launcher", "python", "code", "env", "secrets", "hook"}
    wrong = unsure | {problem.pointer.strip("/").partition("/")[0] for problem in report.problems}
    if looked_at.isdisjoint(wrong):  # last: it runs the user's code
        probe = Probe(python, spec, code_path(spec), environ, hook_seconds, confined)
        preflight_hook.check_own(spec, machine, probe, report)
    return resolved, report.warnings, report.problems


def resize(
    spec: JobSpec,
    resolved: Resolved,
    warnings: Sequence[Warning_],
    machine: Machine,
    launchers: Mapping[str, Launcher] | None = None,
) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
    """``spec`` is a job's with another number of ranks; ``resolved`` and ``warnings`` are what the job has so far.

    Device, back end, interpreter and code stay as they are, whatever has become of the machine, the user's directory or the
    environment: a change of them would be one more difference. Threads per rank are decided again, since they are a share of
    the cores; a number that the spec itself gives stands.
    """
    report = Report([w for w in warnings if w.code not in _OF_WORLD])
    if launchers is not None:
        fresh = Report()
        preflight_launcher.check(spec, launchers, fresh)
        report.problems += fresh.problems
    ranks, gpus = spec.world.ranks_per_node, len(machine.gpus)
    if resolved.device == "cuda" and ranks > gpus:
        text = _too_few_gpus(ranks, gpus)
        if gpus == 0:
            text = "the job runs on CUDA, and this machine has no GPU: `ratchet fork JOB --set world.device=cpu`"
        report.refuse("/world/ranks_per_node", "too-few-gpus", text)
    changed = resolved.model_copy(update={"threads_per_rank": _threads(spec, machine, resolved.device)})
    preflight_hook.check_world(spec, changed, report)
    _warn_of_world(spec, changed, machine, report)
    return changed, report.warnings, report.problems


def code_path(spec: JobSpec) -> list[str]:
    """Directories in which the ranks look first: that of the code, then the spec's own PYTHONPATH."""
    return [*([spec.code.path] if spec.code is not None else []), *preflight_python.python_path(spec)]


def _check_secrets(spec: JobSpec, environ: Mapping[str, str], report: Report) -> None:
    kept = withheld(environ)
    for name, secret in spec.secrets.items():
        if secret.from_env is None:
            continue
        if secret.from_env in kept:
            detail = f"{secret.from_env} is the service's own and given to no job: put the value under another name"
            report.refuse(f"/secrets/{name}", "secret-withheld", detail)
        elif secret.from_env not in environ:
            detail = f"{secret.from_env} is not set in the launcher's environment: set it where the service is started"
            report.refuse(f"/secrets/{name}", "secret-missing", detail)


def check_code(spec: JobSpec, limits: Limits | None, report: Report, allowed: Allowed = anything) -> bool:
    """Check the directory, and tell what a snapshot of it leaves out; False when the code cannot be looked into."""
    if spec.code is None:
        return True
    if spec.code.source == "nodes":
        return _check_code_of_nodes(spec.code.path, report)
    if spec.code.digest is not None and not snapshot.exists(Path(spec.code.path), directory=True):
        report.problems.append(snapshot.not_uploaded(spec.code.digest))
        return False
    if spec.code.digest is not None:
        return True
    try:
        choice = snapshot.inspect(spec.code.path, spec.code.include, limits, allowed)
    except SpecError as error:
        report.problems.extend(error.errors)
        return False
    for code, text in choice.notes():
        report.warn("/code/path", code, text)
    return True


def _check_code_of_nodes(path: str, report: Report) -> bool:
    """False: what the nodes have there is theirs; only they see it."""
    if not Path(path).is_absolute():
        report.refuse(
            "/code/path", "relative-path", f"{path!r} must be absolute: the nodes' own directory of that name is used"
        )
    return False


def _check_script(spec: JobSpec, version: tuple[int, ...], report: Report) -> None:
    """``version``: of the interpreter of the ranks, whose syntax may be newer than what this process can read."""
    if spec.code is None or spec.script is None:
        return
    script = Path(spec.code.path) / spec.script[0]
    if not snapshot.exists(script, directory=False):
        here = snapshot.names_in(spec.code.path)
        text = f"there is no file {spec.script[0]!r} in {spec.code.path!r}"
        meant = nearest(spec.script[0], here) or f"; the directory holds: {', '.join(here[:20]) or 'nothing'}"
        report.refuse("/script/0", "script-not-found", f"{text}{meant}")
        return
    try:
        source = script.read_bytes()
    except OSError as error:
        report.refuse("/script/0", "unreadable", f"cannot read {str(script)!r}: {error.strerror}")
        return
    fault = _syntax_fault(source, script.name)
    if fault is not None and version[:2] <= sys.version_info[:2]:
        report.refuse("/script/0", "syntax-error", fault)
        return
    warnings, problems = unmanaged.check(spec, source)
    report.warnings += warnings
    report.problems += problems


def _syntax_fault(source: bytes, name: str) -> str | None:
    try:
        syntax.parse(source, name)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{name}{line}: {getattr(error, 'msg', error)}"
    except (RecursionError, MemoryError):  # nested too deeply to be looked into; the ranks' own compiler may manage
        return None
    return None


def _device_and_backend(
    spec: JobSpec, machine: Machine, python: str, found: Findings, report: Report
) -> tuple[str, str]:
    ranks, gpus = spec.world.ranks_per_node, len(machine.gpus)
    device = spec.world.device
    if device == "auto":
        device = "cuda" if gpus and (found.torch_cuda or found.error is not None) else "cpu"
    if device == "cuda" and not gpus:
        text = (
            "the service sees no GPU on this machine: set world.device to cpu or auto. If there is one, `nvidia-smi` and the "
            "service's CUDA_VISIBLE_DEVICES tell why it is not seen"
        )
        report.refuse("/world/device", "no-gpu", text)
    elif device == "cuda" and not found.torch_cuda and found.error is None and found.torch:
        text = (
            f"torch {found.torch_version or ''} of {python} is built without CUDA: install a CUDA build there (on Linux the one "
            f"of the package index is): {pip_install(python, 'torch', '--force-reinstall')}; or set world.device to cpu"
        )
        report.refuse("/world/device", "torch-without-cuda", text.replace("torch  of", "torch of"))
    elif device == "cuda" and ranks > gpus:
        text = f"{_too_few_gpus(ranks, gpus)}, or device cpu"
        report.refuse("/world/ranks_per_node", "too-few-gpus", text)
    backend = spec.ddp.backend
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and device == "cpu":
        text = "NCCL moves CUDA tensors only and the job runs on the CPU of this machine: use backend gloo or auto"
        report.refuse("/ddp/backend", "backend-device", text)
    return device, backend


def _threads(spec: JobSpec, machine: Machine, device: str) -> int:
    """OMP_NUM_THREADS as given, else ``cpus_per_rank``, else an even share of the cores.

    Fixed once per job: another number of threads gives other bits on the CPU. On CUDA the share is per GPU of the machine, so
    that jobs on other GPUs find CPU slots left.
    """
    given = spec.env.get("OMP_NUM_THREADS")
    if given is not None:
        return int(given)
    if spec.resources.cpus_per_rank is not None:
        return spec.resources.cpus_per_rank
    shares = max(spec.world.ranks_per_node, len(machine.gpus) if device == "cuda" else 0)
    return max(1, machine.cpus // shares)


def _too_few_gpus(ranks: int, gpus: int) -> str:
    return (
        f"{counted(ranks, 'rank')} on CUDA, a GPU for each, and this machine has {counted(gpus, 'GPU')}: use at most "
        f"{counted(gpus, 'rank')}"
    )


def _warn_of_world(spec: JobSpec, resolved: Resolved, machine: Machine, report: Report) -> None:
    """What the number of ranks makes without effect or dear; the codes of ``_OF_WORLD``."""
    need = need_of(spec, resolved)
    if oversubscribed(need, machine.capacity):
        text = (
            f"{counted(need.cpus, 'CPU slot')} wanted ({counted(spec.world.ranks_per_node, 'rank')} x "
            f"{counted(resolved.threads_per_rank, 'thread')}), the machine lends {machine.capacity.cpus}: the job "
            "takes all of them, runs alone, and its ranks share cores"
        )
        report.warn("/world/ranks_per_node", "oversubscribed", text)
    if spec.world.size == 1 and spec.ddp.bucket_cap_mb is not None:
        report.warn(
            "/ddp/bucket_cap_mb", "single-rank", "with one rank nothing is sent; buckets only shape the hook's input"
        )


def _warn(spec: JobSpec, resolved: Resolved, report: Report) -> None:
    """What else is legal but does nothing, or less than it seems to."""
    if spec.nccl and resolved.backend != "nccl":
        report.warn("/nccl", "no-effect", f"NCCL settings have no effect with backend {resolved.backend}")
    if spec.policy.backoff > MAX_BACKOFF:
        report.warn("/policy/backoff", "capped", f"delays are capped at {MAX_BACKOFF:g} s")
    if spec.trial is not None:
        text = "a trial: the job ends early and may kill its own processes, as `ratchet prove` asks. Drop it to train"
        report.warn("/trial", "trial", text)
    timeout = spec.policy.timeout
    if timeout is not None and timeout <= spec.policy.stop_grace:
        text = "timeout is not longer than stop_grace: a job that is stopped at the timeout may run for longer than it"
        report.warn("/policy/timeout", "shorter-than-grace", text)
    saves = spec.checkpoint.every_steps is not None or spec.checkpoint.every_seconds is not None
    if not saves and unmanaged.WARNING not in {w.code for w in report.warnings}:
        text = (
            "without scheduled checkpoints a killed attempt loses what it did, and several of them in a row end the job"
        )
        report.warn("/checkpoint/every_steps", "no-schedule", text)
