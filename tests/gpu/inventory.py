"""What the run is made on: ``python -m tests.gpu.inventory DEVICE`` prints it as JSON. What every row needs and is not there is
told under ``OBSTACLE``; what some rows lack makes those red."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ratchet_hooks.torch_versions import OLDEST
from tests.gpu.packages import CARRIED, OBSTACLE, PRESENT


def inventory(device: str) -> dict[str, str]:
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _output("git", "rev-parse", "--short", "HEAD") or "unknown",
        "device": device,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "processor": f"{len(os.sched_getaffinity(0))} cores, {_cpu()}, {_memory_gb():.0f} GB; Linux {platform.release()}",
    }
    facts |= _torch_facts(device)
    packages = {name: _version(name) for name in sorted(PRESENT | CARRIED)}
    facts["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    facts["packages missing"] = ", ".join(name for name, version in packages.items() if not version) or "none"
    if OBSTACLE not in facts and not packages["pydantic"]:
        here = "{}.{}".format(*sys.version_info)
        facts[OBSTACLE] = (
            f"{sys.executable} has no pydantic: `python3 -m tests.gpu.wheels --to DIR --python {here}` downloads it and "
            f"{len(CARRIED) - 1} others where there is a network; then give WHEELS=DIR"
        )
    return facts


def _torch_facts(device: str) -> dict[str, str]:
    try:
        import torch
    except Exception as error:
        what = f"cannot be imported: {type(error).__name__}: {error}"
        return {"torch": what, OBSTACLE: f"torch {what}: give PYTHON= an interpreter that has torch"}
    facts = {"torch": str(torch.__version__)}
    if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, OLDEST.split("."))):
        facts[OBSTACLE] = f"torch {torch.__version__} is too old: Ratchet needs torch {OLDEST} or newer"
    if device == "cpu":
        return facts
    facts["CUDA"] = str(torch.version.cuda)
    smi = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    facts["nvidia-smi"] = " / ".join(smi.splitlines()) if smi else "not there"
    try:
        properties: Any = torch.cuda.get_device_properties(0)
        facts["GPU"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}."
            f"{properties.minor}, {properties.multi_processor_count} multiprocessors; {torch.cuda.device_count()} seen"
        )
        facts["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except Exception as error:
        facts["GPU"] = f"cannot be used: {type(error).__name__}: {error}"
        facts.setdefault(OBSTACLE, f"the GPU {facts['GPU']}; DEVICE=cpu tries the rows without one")
    return facts


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


if __name__ == "__main__":
    print(json.dumps(inventory(sys.argv[1])))
