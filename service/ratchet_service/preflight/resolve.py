"""Checks a job spec against this machine and resolves every ``auto``, at submission. What cannot work is a problem, what is risky
or without effect a warning. This process imports neither user code nor torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ratchet_contract.api.views import Warning_
from ratchet_contract.code.choice import Allowed, allow_all
from ratchet_contract.code.tree import Limits
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_contract.plural import pluralize
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.parse import suggestion
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox, withheld_names
from ratchet_service.launchers.base import Launcher
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.lifecycle.decide import MAX_BACKOFF
from ratchet_service.preflight import checkpoint_uri, entrypoint, environment, hook, interpreter, launcher, start_from
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine
from ratchet_service.scheduling.slots import is_oversubscribed, need_of
from ratchet_service.user_code import snapshot
from ratchet_service.user_code.hook_probe import HOOK_SECONDS, Probe
from ratchet_service.user_code.interpreter_probe import Findings, Interpreters, pip_install_command

_WORLD_WARNING_CODES: Final = frozenset({"oversubscribed", "single-rank"})


def resolve(
    spec: JobSpec,
    machine: Machine,
    *,
    launchers: Mapping[str, Launcher] | None = None,
    interpreters: Interpreters | None = None,
    environ: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    hook_seconds: float = HOOK_SECONDS,
    sandbox: Sandbox = NO_SANDBOX,
    faulty_keys: frozenset[str] = frozenset(),
    allowed: Allowed = allow_all,
) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
    """Check ``spec`` and return three parts: the decision for every ``auto``, the warnings, and the problems that forbid the job.
    If there are problems, ignore the other two parts. ``code_digest`` is not set in the decisions. May block on processes and on
    the object store. Before this call, the caller checks that the spec names only allowed paths (``paths.Roots.check``).

    ``launchers``: the service's launchers; None: no launcher is checked, and the job trains on ``machine``. ``environ``: the
    launcher's environment; None: this process's. ``hook_seconds``: time limit for importing a user's own hook. ``faulty_keys``:
    keys of the spec with a fault; some checks that rely on them are left out. ``allowed``: returns whether the snapshot may read
    a path.
    """
    report, environ = Report(), os.environ if environ is None else environ
    if launchers is not None:
        launcher.check(spec, launchers, report, faulty_keys)
        if spec.launcher.kind not in launchers:
            faulty_keys |= {"launcher"}
        machine = launcher.machine_of(spec, machine, launchers.get(spec.launcher.kind))

    def are_valid(*keys: str) -> bool:
        """Return True if none of the keys is faulty."""
        return faulty_keys.isdisjoint(keys)

    found_code = check_code(spec, limits, report, allowed)
    code_ok = are_valid("code") and found_code
    if are_valid("environment"):
        copied = spec.code is not None and spec.code.digest is not None
        code = Path(spec.code.path) if spec.code is not None and code_ok else None
        spec = environment.check(spec, code, report, allow_all if copied else allowed)
    if (
        spec.code is not None
        and spec.code.source == "nodes"
        and not snapshot.exists(Path(spec.code.path), directory=True)
    ):
        machine = replace(machine, is_this_machine=False)  # only the ranks can inspect what this machine does not have
    python, findings = spec.python or machine.python, Findings(torch=True, torch_cuda=machine.torch_cuda)
    if machine.is_this_machine and are_valid("launcher"):
        _check_secrets(spec, environ, report)
        if are_valid("python"):
            code_checkable = code_ok and are_valid("task", "env")
            python, findings = interpreter.check(
                spec, machine, interpreters or Interpreters(sandbox), code_checkable, report, sandbox
            )
    if found_code and are_valid("python"):
        _check_script(spec, findings.version, report)
    start_from.check(spec, report)
    placed = report if are_valid("launcher", "world", "resources", "ddp", "python") else Report()
    device, backend = _device_and_backend(spec, machine, python, findings, placed)
    resolved = Resolved(
        device="cuda" if device == "cuda" else "cpu",
        backend="nccl" if backend == "nccl" else "gloo",
        threads_per_rank=_threads(spec, machine, device),
        python=python,
    )
    hook.check(spec, resolved, report if placed is report and are_valid("hook") else Report())
    _warn_about_world(spec, resolved, machine, report)
    _warn_about_settings(spec, resolved, report)
    checkpoint_uri.check(spec, report)
    required_keys = {"launcher", "python", "code", "env", "secrets", "hook"}
    wrong = faulty_keys | {problem.pointer.strip("/").partition("/")[0] for problem in report.problems}
    if required_keys.isdisjoint(wrong):  # last: it runs the user's code
        probe = Probe(python, spec, code_path(spec), environ, hook_seconds, sandbox)
        hook.check_custom_hook(spec, machine, probe, report)
    return resolved, report.warnings, report.problems


def resize(
    spec: JobSpec,
    resolved: Resolved,
    warnings: Sequence[Warning_],
    machine: Machine,
    launchers: Mapping[str, Launcher] | None = None,
) -> tuple[Resolved, list[Warning_], list[FieldProblem]]:
    """Check ``spec``, a job's spec with another number of ranks, and return the new decisions, all warnings, and the problems.
    Only the number of threads is decided again. ``resolved``: the job's present decisions. ``warnings``: the job's present
    warnings."""
    report = Report()
    if launchers is not None:
        launcher.check(spec, launchers, report)
    fresh = {(w.pointer, w.code) for w in report.warnings}
    kept = [w for w in warnings if w.code not in _WORLD_WARNING_CODES and (w.pointer, w.code) not in fresh]
    report.warnings = kept + report.warnings
    ranks, gpus = spec.world.ranks_per_node, len(machine.gpus)
    if resolved.device == "cuda" and ranks > gpus:
        text = _too_few_gpus(ranks, gpus)
        if gpus == 0:
            text = "the job runs on CUDA, and this machine has no GPU: `ratchet fork JOB --set world.device=cpu`"
        report.refuse("/world/ranks_per_node", "too-few-gpus", text)
    # the rest stays, whatever has become of machine or environment: a change would be one more difference
    changed = resolved.model_copy(update={"threads_per_rank": _threads(spec, machine, resolved.device)})
    hook.recheck_for_world(spec, changed, report)
    _warn_about_world(spec, changed, machine, report)
    return changed, report.warnings, report.problems


def code_path(spec: JobSpec) -> list[str]:
    """Return the directories that the ranks search first for modules, such as that of the code."""
    if spec.code is None:
        return [*interpreter.python_path(spec)]
    script = [str((Path(spec.code.path) / spec.script[0]).parent)] if spec.script is not None else []
    return list(dict.fromkeys([*script, spec.code.path, *interpreter.python_path(spec)]))


def _check_secrets(spec: JobSpec, environ: Mapping[str, str], report: Report) -> None:
    """Add to ``report``, as problems, the secrets whose variable (``from_env``) is not set in ``environ`` or reserved."""
    kept = withheld_names(environ)
    for name, secret in spec.secrets.items():
        if secret.from_env is None:
            continue
        if secret.from_env in kept:
            detail = (
                f"{secret.from_env} is reserved for the service and passed to no job: use another name for the value"
            )
            report.refuse(f"/secrets/{name}", "secret-withheld", detail)
        elif secret.from_env not in environ:
            detail = f"{secret.from_env} is not set in the launcher's environment: set it where the service is started"
            report.refuse(f"/secrets/{name}", "secret-missing", detail)


def check_code(spec: JobSpec, limits: Limits | None, report: Report, allowed: Allowed = allow_all) -> bool:
    """Return True if the code can be inspected here, or if the spec has none. Problems and warnings are added to ``report``."""
    if spec.code is None:
        return True
    if spec.code.source == "nodes":
        return _check_code_of_nodes(spec.code.path, report)
    if spec.code.digest is not None and not snapshot.exists(Path(spec.code.path), directory=True):
        report.problems.append(snapshot.not_uploaded_problem(spec.code.digest))
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
    """Add a problem to ``report`` if the path is not absolute. Return False: only the nodes can inspect their directory."""
    if not Path(path).is_absolute():
        report.refuse("/code/path", "relative-path", f"{path!r} must be absolute: it is a directory on the nodes")
    return False


def _check_script(spec: JobSpec, version: tuple[int, ...], report: Report) -> None:
    """Add to ``report`` a problem for a script that is missing, unreadable or not Python. For a script without a Session, add
    also the warnings and problems of ``unmanaged_script.check``. ``version``: the Python version of the ranks' interpreter. If it
    is newer than this process's, a syntax error found here is not a problem."""
    if spec.code is None or spec.script is None:
        return
    script = Path(spec.code.path) / spec.script[0]
    if not snapshot.exists(script, directory=False):
        here = snapshot.names_in(spec.code.path)
        text = f"there is no file {spec.script[0]!r} in {spec.code.path!r}"
        meant = suggestion(spec.script[0], here) or f"; the directory holds: {', '.join(here[:20]) or 'nothing'}"
        report.refuse("/script/0", "script-not-found", f"{text}{meant}")
        return
    try:
        source = unmanaged_script.read_source(script)
    except OSError as error:
        report.refuse("/script/0", "unreadable", f"cannot read {str(script)!r}: {error.strerror or error}")
        return
    fault = _syntax_fault(source, script.name)
    if fault is not None and version[:2] <= sys.version_info[:2]:
        report.refuse("/script/0", "syntax-error", fault)
        return
    warnings, problems = unmanaged_script.check(spec, source)
    report.warnings += warnings
    report.problems += problems


def _syntax_fault(source: bytes, name: str) -> str | None:
    """Return the syntax error of the source as a text with its line; None if none is found."""
    try:
        entrypoint.parse(source, name)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"{name}{line}: {getattr(error, 'msg', error)}"
    except (RecursionError, MemoryError):  # too long, or nested too deeply; the ranks' own compiler may manage
        return None
    return None


def _device_and_backend(
    spec: JobSpec, machine: Machine, python: str, findings: Findings, report: Report
) -> tuple[str, str]:
    """Return device and back end, with every ``auto`` decided. A combination that cannot work is added to ``report`` as a
    problem."""
    ranks, gpus = spec.world.ranks_per_node, len(machine.gpus)
    device = spec.world.device
    if device == "auto":
        device = "cuda" if gpus and (findings.torch_cuda or findings.error is not None) else "cpu"
    if device == "cuda" and not gpus:
        text = (
            "the service sees no GPU on this machine: set world.device to cpu or auto. If there is one, `nvidia-smi` and the "
            "service's CUDA_VISIBLE_DEVICES show why it is not visible"
        )
        report.refuse("/world/device", "no-gpu", text)
    elif device == "cuda" and not findings.torch_cuda and findings.error is None and findings.torch:
        text = (
            f"torch {findings.torch_version or ''} of {python} is built without CUDA: install a CUDA build there "
            "(the Linux wheel on PyPI is "
            f"one): {pip_install_command(python, 'torch', '--force-reinstall')}; or set world.device to cpu"
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
    """Return the number of threads per rank: the spec's OMP_NUM_THREADS or ``cpus_per_rank``, or a share of the cores."""
    # The job keeps the number: another one gives other bits on the CPU. On CUDA the share is per GPU of the machine, so that
    # slots are left for jobs on other GPUs.
    given = spec.env.get("OMP_NUM_THREADS")
    if given is not None:
        return int(given)
    if spec.resources.cpus_per_rank is not None:
        return spec.resources.cpus_per_rank
    shares = max(spec.world.ranks_per_node, len(machine.gpus) if device == "cuda" else 0)
    return max(1, machine.cpus // shares)


def _too_few_gpus(ranks: int, gpus: int) -> str:
    """Return the text of the problem for more ranks than GPUs."""
    return (
        f"{pluralize(ranks, 'rank')} on CUDA, a GPU for each, and this machine has {pluralize(gpus, 'GPU')}: use at most "
        f"{pluralize(gpus, 'rank')}"
    )


def _warn_about_world(spec: JobSpec, resolved: Resolved, machine: Machine, report: Report) -> None:
    """Add warnings about what the number of ranks makes ineffective or expensive, with the codes in ``_WORLD_WARNING_CODES``."""
    need = need_of(spec, resolved)
    if is_oversubscribed(need, machine.capacity):
        text = (
            f"{pluralize(need.cpus, 'CPU slot')} requested ({pluralize(spec.world.ranks_per_node, 'rank')} x "
            f"{pluralize(resolved.threads_per_rank, 'thread')}), the machine has {machine.capacity.cpus}: the job "
            "takes all of them, runs alone, and its ranks share cores"
        )
        report.warn("/world/ranks_per_node", "oversubscribed", text)
    if spec.world.size == 1 and spec.ddp.bucket_cap_mb is not None:
        report.warn(
            "/ddp/bucket_cap_mb",
            "single-rank",
            "with one rank no gradients are sent; buckets only change the hook's input",
        )


def _warn_about_settings(spec: JobSpec, resolved: Resolved, report: Report) -> None:
    """Add warnings about other settings that are legal but risky, or have less effect than they seem to have."""
    if spec.nccl and resolved.backend != "nccl":
        report.warn("/nccl", "no-effect", f"NCCL settings have no effect with backend {resolved.backend}")
    if spec.policy.backoff > MAX_BACKOFF:
        report.warn("/policy/backoff", "capped", f"delays are capped at {MAX_BACKOFF:g} s")
    if spec.trial is not None:
        text = "a trial: the job ends early and may kill its own processes, as for `ratchet prove`. Remove it to train"
        report.warn("/trial", "trial", text)
    timeout = spec.policy.timeout
    if timeout is not None and timeout <= spec.policy.stop_grace:
        text = "timeout is not longer than stop_grace: a job stopped at the timeout may run up to stop_grace longer"
        report.warn("/policy/timeout", "shorter-than-grace", text)
    saves = spec.checkpoint.every_steps is not None or spec.checkpoint.every_seconds is not None
    if not saves and unmanaged_script.WARNING not in {w.code for w in report.warnings}:
        lost = "an attempt whose agent is killed" if spec.checkpoint.memory_every_steps else "a killed attempt"
        text = (
            f"without scheduled checkpoints {lost} loses all its steps, and several such attempts in a row end the job"
        )
        report.warn("/checkpoint/every_steps", "no-schedule", text)
