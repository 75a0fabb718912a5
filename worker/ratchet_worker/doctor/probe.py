"""Checks what this interpreter can train with: packages, torch, back ends, devices, and a real all-reduce of two processes."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet_contract.doctor.findings import Finding, ProbeReport, failed, not_checked, ok, warning
from ratchet_contract.doctor.installed_packages import required_packages, satisfies
from ratchet_hooks.torch_versions import OLDEST, untested
from ratchet_worker.doctor import gpus, loopback

if TYPE_CHECKING:
    from types import ModuleType

EXTRA = "worker"
INSTALL = "pip install 'ratchet-train[worker]'"
_TORCH = f"torch>={OLDEST}"
_CPU_TORCH = "--index-url https://download.pytorch.org/whl/cpu for a machine without a GPU"


def probe() -> ProbeReport:
    """Check this interpreter and return all findings, in the order in which to show them. May start other processes."""
    found = [_python(), *_packages()]
    torch, finding = import_torch()
    found.append(finding)
    if torch is None:
        return ProbeReport(findings=[*found, *gpus.findings_without_torch()], cpu=cpu_name())
    peer = loopback.Peer()  # it imports torch while this process checks the devices
    try:
        names, devices = gpus.findings_with_torch(torch)
        found += [_backends(torch, bool(names)), *devices, _determinism(bool(names)), peer.reduce()]
    finally:
        peer.close()
    return ProbeReport(findings=found, cpu=cpu_name(), gpus=names)


def cpu_name() -> str:
    """The processor's name from ``/proc/cpuinfo``, else the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith("model name")), platform.machine())


def _python() -> Finding:
    """The finding with this interpreter's version and path."""
    version = platform.python_version()
    return ok("worker python", version, detail=sys.executable)


def _packages() -> list[Finding]:
    """The findings for the packages of the extra ``worker`` except torch, which is checked separately."""
    try:
        wanted = [p for p in required_packages(EXTRA) if p.name != "torch"]
    except metadata.PackageNotFoundError:
        return [
            not_checked(
                "extra worker",
                "unknown",
                cure=INSTALL,
                detail="ratchet-train is not installed in this interpreter, only found on its path",
            )
        ]
    bad = [p for p in wanted if not p.is_satisfied]
    if not bad:
        words = ", ".join(f"{p.name} {p.installed}" for p in wanted)
        return [ok("extra worker", "installed", detail=words)]
    words = "; ".join(f"{p.name} {p.installed or 'is missing'}, wanted {p.required}" for p in bad)
    return [failed("extra worker", "incomplete", detail=words, cure=INSTALL)]


def import_torch() -> tuple[ModuleType | None, Finding]:
    """Import torch; return the module, or None if it is missing, broken or too old, and the finding on it."""
    try:
        torch: Any = importlib.import_module("torch")
        version = str(torch.__version__)
    except ModuleNotFoundError as error:
        missing = "torch is not installed here" if error.name == "torch" else f"torch cannot be imported: {error}"
        return None, failed(
            "torch",
            "missing",
            detail=missing,
            cure=f"{INSTALL} ({_CPU_TORCH}), or --python with the interpreter that has it",
        )
    except Exception as error:  # a broken torch fails in many ways: OSError, ImportError, RuntimeError
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, failed(
            "torch",
            "broken",
            detail=f"import torch: {first}",
            cure=f"install it again: pip install --force-reinstall '{_TORCH}'",
        )
    if not satisfies(version, f">={OLDEST}"):
        return None, failed(
            "torch", version, cure=f"pip install '{_TORCH}'", detail=f"Ratchet needs torch {OLDEST} or newer"
        )
    cuda = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if (told := untested(version)) is not None:
        return torch, warning(
            "torch", version, detail=f"{told}; {cuda}",
            cure="`ratchet doctor --exactness` checks on this machine that a killed job resumes bit for bit",
        )  # fmt: skip
    return torch, ok("torch", version, detail=cuda)


def _backends(torch: Any, cuda: bool) -> Finding:
    """The finding on torch's back ends: gloo must be available, and nccl if there are GPUs (``cuda``)."""
    distributed = torch.distributed
    if not distributed.is_available():
        return failed(
            "back ends",
            "none",
            cure="install torch from pytorch.org's own wheels",
            detail="this torch was built without torch.distributed",
        )
    there = [name for name in ("gloo", "nccl") if getattr(distributed, f"is_{name}_available")()]
    needed = ["gloo", *(["nccl"] if cuda else [])]
    lacking = [name for name in needed if name not in there]
    value = ", ".join(there) or "none"
    if "nccl" in there and cuda:
        value = value.replace("nccl", "nccl " + ".".join(map(str, torch.cuda.nccl.version())))
    if lacking:
        return failed(
            "back ends",
            value,
            detail=f"{' and '.join(lacking)} is missing",
            cure="install torch from pytorch.org's own wheels",
        )
    return ok("back ends", value)


def _determinism(cuda: bool) -> Finding:
    """Return the finding on determinism: a warning if there are GPUs (``cuda``) and ``CUBLAS_WORKSPACE_CONFIG`` has another value
    than the two with which cuBLAS is deterministic."""
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if cuda and workspace not in (None, ":4096:8", ":16:8"):
        return warning(
            "determinism",
            f"CUBLAS_WORKSPACE_CONFIG={workspace}",
            detail="with this value cuBLAS may give other bits at every run; Ratchet sets :4096:8 for its ranks",
            cure="unset CUBLAS_WORKSPACE_CONFIG, and do not set it in a spec's env",
        )
    words = "deterministic algorithms, thread count, cuDNN and CUBLAS_WORKSPACE_CONFIG are set by Ratchet in every rank"
    return ok("determinism", "set", detail=words)
