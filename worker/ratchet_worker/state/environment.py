"""Facts that a manifest records, such as library versions. A resume compares those that a bit-for-bit repetition depends on."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ratchet_contract import env_vars as names
from ratchet_contract.api.views import EnvironmentView
from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.checkpoint.resume_report import EnvironmentDifference
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.plural import join_first
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.version import RATCHET_VERSION
from ratchet_hooks import torch_compat
from ratchet_worker.state import package_list

Fact: TypeAlias = str | int | float | bool | None
Record: TypeAlias = dict[str, Fact]

PROVENANCE: Final = "provenance:"
"""Prefix of the entries of a manifest's ``environment`` that are not compared."""
NOT_EXACT: Final = f"{PROVENANCE}not_exact_since"
"""The base (step and attempt) of the first attempt that was not exact, among those that led to a checkpoint."""
_PACKAGE_LIST: Final = f"{PROVENANCE}packages"
PACKAGES: Final = "packages"
"""The fact that is the digest of the rank's list of packages. Checkpoints of earlier versions have none."""

_ISA_FLAGS: Final = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "asimd", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip
_VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_COLLNET_ENABLE",
)  # fmt: skip
_NUMPY_ERRORS: Final = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""numpy's default handling of floating-point errors."""
_SUBNORMAL: Final = 1e-310  # a variable: Python computes an expression of constants at compile time


def record(launch: LaunchFile, device: torch.device, packages: Sequence[str]) -> Record:
    """Return the facts about this process that a repetition depends on. ``packages``: the result of
    ``package_list.installed``."""
    facts: Record = {
        PACKAGES: package_list.digest(packages),
        "torch": str(torch.__version__),
        "torch_build": _short_digest(torch.__config__.show()),
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_isa": cpu_instruction_set(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "interop_threads": torch.get_num_interop_threads(),
        "determinism": launch.spec.determinism,
        "device": device.type,
        "backend": launch.resolved.backend,
        "world_size": launch.world_size,
        "nodes": launch.spec.world.nodes,
        "ranks_per_node": launch.spec.world.ranks_per_node,
    }
    facts |= switches(device)
    if device.type == "cuda":
        facts |= _gpu_facts(device)
    facts |= {f"env:{name}": os.environ[name] for name in _VARIABLES if name in os.environ}
    return facts


def switches(device: torch.device) -> Record:
    """Return the current facts that the user's code may change at any time, such as the thread count."""
    facts: Record = {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch_compat.matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if not _SUBNORMAL * 1.0:  # set_flush_denormal has no getter; it affects all computations of this thread
        facts["flush_denormal"] = True
    if not getattr(torch.backends.mkldnn, "enabled", True):
        facts["mkldnn_enabled"] = False
    if (errors := np.geterr()) != _NUMPY_ERRORS:
        facts["numpy_errors"] = ", ".join(f"{kind}={how}" for kind, how in errors.items())
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        facts |= {
            "cudnn_deterministic": cudnn.deterministic,
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_tf32": cudnn.allow_tf32,
        }
    return facts


def _gpu_facts(device: torch.device) -> Record:
    """Return the facts about the GPU and its libraries."""
    cudnn = torch.backends.cudnn
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpu_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)) or None,
    }


def _driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver; None if ``/proc`` does not name it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()), None)


def cpu_instruction_set() -> str:
    """Return, as one text, the CPU's vendor and extensions among ``_ISA_FLAGS``; on other systems than Linux, the
    processor's name."""
    if not sys.platform.startswith("linux"):
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    flags = set(found.get("flags", found.get("Features", "")).split())
    vendor = found.get("vendor_id", found.get("CPU implementer", "unknown"))
    return " ".join([vendor, *(f for f in _ISA_FLAGS if f in flags)])


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def commit_of(spec: JobSpec) -> GitFacts | None:
    """Return the commit of the job's code; None if the job has no code, or no commit is recorded."""
    return None if spec.code is None else spec.code.git


def provenance(packages: Sequence[str], git: GitFacts | None) -> Record:
    """Return entries of the manifest's ``environment`` that are not compared, such as the package list. ``git``: the code's
    commit."""
    known = {} if git is None else git.model_dump(exclude_none=True)
    found: Record = {f"{PROVENANCE}git_{key}": value for key, value in known.items()}
    if built := os.environ.get(names.ENVIRONMENT_DIGEST):
        found[f"{PROVENANCE}environment"] = built
    return {f"{PROVENANCE}ratchet": RATCHET_VERSION, _PACKAGE_LIST: " ".join(packages)} | found


def compared_facts(environment: Record | dict[str, Any]) -> Record:
    """Return those entries of a manifest's ``environment`` that a resume compares."""
    return {key: value for key, value in environment.items() if not key.startswith(PROVENANCE)}


def expand_package_difference(
    differences: list[EnvironmentDifference], environment: Record | dict[str, Any], current: Sequence[str]
) -> list[EnvironmentDifference]:
    """Return ``differences`` with the difference of the package digests replaced by one entry per changed package. Without that
    difference, or if the manifest's ``environment`` lacks the list of packages, return ``differences`` unchanged. ``current``:
    this process's packages."""
    listed = str(environment.get(_PACKAGE_LIST) or "").split()
    whole = next((d for d in differences if d.key == PACKAGES), None)
    if whole is None or whole.recorded != package_list.digest(listed):
        return differences
    rest = [d for d in differences if d is not whole]
    told = {d.key for d in rest} & {"torch", "numpy"}  # they have separate facts
    return sorted([*rest, *package_list.changes(listed, current, told)], key=lambda d: d.key)


def write(launch: LaunchFile, packages: list[str]) -> None:
    """Write the packages, versions and code commit to the attempt's environment file, for the API. Raises ``OSError``."""
    found = EnvironmentView(
        ratchet=RATCHET_VERSION,
        python=platform.python_version(),
        packages=packages,
        digest=package_list.digest(packages),
        git=commit_of(launch.spec),
    )
    write_atomic(
        AttemptPaths(Path(launch.attempt_dir)).environment_file, found.model_dump_json().encode(), durable=False
    )


def compare(recorded: Record | dict[str, Any], current: Record) -> list[EnvironmentDifference]:
    """Return the facts that differ, sorted by name. A fact that one record lacks is None there."""
    return [
        EnvironmentDifference(key=key, recorded=recorded.get(key), current=current.get(key))
        for key in sorted(set(recorded) | set(current))
        if recorded.get(key) != current.get(key)
    ]


def describe_differences(differences: Sequence[EnvironmentDifference], limit: int | None = None) -> str:
    """Return the differences as text, such as ``threads (2 -> 1)``. ``limit``: the largest number of differences to describe; of
    the others, the text has only the number. None or 0: describe all."""
    return join_first([difference.sentence() for difference in differences], limit or len(differences))
