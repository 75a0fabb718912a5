"""The rows of ``make gpu``, in the order in which they run: what matters most comes first. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_NO_NCCL: Final = "NCCL moves CUDA tensors only"


@dataclass(frozen=True)
class Row:
    """``function``: ``module:name`` of what runs, ``name(Work) -> str``. ``shares``: by device the seconds that it should need;
    the time of the whole run is divided by these. ``not_on_cpu``: why the CPU excludes the row; empty: it does not."""

    name: str
    function: str
    shares: dict[str, float]
    about: str
    not_on_cpu: str = ""

    def excluded(self, device: str) -> str:
        return self.not_on_cpu if device == "cpu" else ""

    def share(self, device: str) -> float:
        return 0.0 if self.excluded(device) else self.shares[device]


def _row(name: str, function: str, cuda: float, cpu: float, about: str, not_on_cpu: str = "") -> Row:
    """``cuda``, ``cpu``: seconds, expected on 16 cores and a GPU, seen on 2 cores."""
    return Row(name, f"tests.gpu.{function}", {"cuda": cuda, "cpu": cpu}, about, not_on_cpu)


ROWS: Final[dict[str, Row]] = {
    row.name: row
    for row in (
        _row(
            "hooks-gloo", "hooks_killed:gloo", 95, 45, "every hook, two ranks on one device over gloo: killed, resumed"
        ),
        _row("hooks-nccl", "hooks_killed:nccl", 55, 30, "every hook, one rank over NCCL: killed, resumed", _NO_NCCL),
        _row(
            "jobs",
            "jobs_killed:run",
            140,
            200,
            "jobs of the service, each with a killed rank, against undisturbed ones",
        ),
        _row(
            "dead-rank",
            "dead_rank:run",
            45,
            30,
            "the survivor of a dead rank aborts its communicators; nothing is left",
        ),
        _row("parked", "parked_start:run", 60, 60, "an attempt that starts in a parked agent, against a cold start"),
        _row(
            "hooks-mixed",
            "hooks_killed:mixed",
            75,
            45,
            "precisions, models, optimizers, torch.compile: killed, resumed",
        ),
        _row(
            "save-stall",
            "save_stall:run",
            120,
            50,
            "what a save and a load cost the loop, beside torch.save and a copy",
        ),
        _row(
            "replay-proof",
            "replay_proof:run",
            45,
            40,
            "steps done again are proved, a hidden generator is seen; what a fingerprint costs",
        ),
        _row("hook-memory", "hook_memory:run", 40, 15, "memory of hooks against what pre-flight promises"),
        _row("doctor", "doctor:run", 120, 60, "ratchet doctor --exactness"),
        _row("hook-steps", "hook_steps:run", 40, 50, "a step under each hook beside torch's own"),
        _row("throughput", "throughput:run", 65, 35, "three models under determinism warn and strict against off"),
    )
}
