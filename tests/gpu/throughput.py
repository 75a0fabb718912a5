"""Row ``throughput``: steps per second of ResNet-50, GPT-2 small and a U-Net under ``determinism: warn`` and ``strict``, against
``off`` in the same run.

Each mode has a process of its own, since cuBLAS reads its setting once. An operation that has no deterministic kernel is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

from tests.gpu.runner import ROOT
from tests.gpu.work import Work
from tests.support.fork_server import LIBRARIES

MODES: Final = ("off", "warn", "strict")
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"


def run(work: Work) -> str:
    found = {mode: _measured(work, mode) for mode in MODES}
    ratios = []
    for model in dict.fromkeys(model for models in found.values() for model in models):
        off, warn, strict = (found[mode].get(model, {}) for mode in MODES)
        speeds = [one.get("steps_per_second") for one in (off, warn, strict)]
        if speeds[0] is None or speeds[1] is None:
            work.red(model, f"steps/s under {', '.join(MODES)}: {speeds}")
            continue
        words = [f"off {speeds[0]:.2f} steps/s", f"warn {speeds[1] / speeds[0]:.2f}x"]
        words.append("strict refused" if speeds[2] is None else f"strict {speeds[2] / speeds[0]:.2f}x")
        if refused := strict.get("refused"):
            words.append(
                f"strict refuses: {'; '.join(refused)}" + (" (measured with pixels as rows)" if speeds[2] else "")
            )
        if warned := warn.get("warned"):
            words.append(f"warn says: {'; '.join(warned)}")
        work.green(model, "; ".join(words))
        ratios.append(f"{model} {words[2].removeprefix('strict ')}")
    return f"strict against off: {', '.join(ratios)}"


def _measured(work: Work, mode: str) -> dict[str, dict[str, Any]]:
    """By model. Where the process fails, what it printed before counts, and the row shows why."""
    environ = {name: value for name, value in os.environ.items() if name != _WORKSPACE}
    if mode != "off":
        environ[_WORKSPACE] = ":4096:8"  # as the worker sets it
    seconds = {"full": 4.0, "small": 1.5, "cheap": 0.1}[work.size]
    command = [sys.executable, "-m", "tests.gpu.throughput_modes", mode, work.device, work.size, str(seconds)]
    if work.size == "cheap":  # forked, as in all tests
        done = LIBRARIES.run(command, cwd=ROOT, env=environ)
    else:
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        work.red(f"determinism {mode}", done.stderr[-600:])
    return {one.pop("model"): one for one in map(json.loads, lines)}
