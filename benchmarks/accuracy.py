"""What compression costs in accuracy: the digits task under each hook with five seeds, beside allreduce with the same seeds.

Two ranks over gloo, without a service and an agent, with a job's own generators, order of the data, DDP and evaluation; one group
trains them all. Nothing is timed. ``RATCHET_BENCH_HOOKS`` (names as in the table, separated by commas) and
``RATCHET_BENCH_SEEDS`` (how many) set what is trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchmarks.processes import group_result

RANKS: Final = 2
SEEDS: Final = 5
AGAINST: Final = "allreduce"
ALLOWED: Final = 0.5
"""Points of accuracy that a hook may lose in the mean over the seeds."""
START: Final = 10
"""Step of the task's 264 after which gradients are compressed, or averaged no more: an early one, so that hardly any is exact."""
_DEADLINE: Final = 3600.0  # seconds, for all of them together


def _low_rank(name: str, rank: int, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "matrix_approximation_rank": rank, "start_powerSGD_iter": START, **parameters}


HOOKS: Final[dict[str, dict[str, Any]]] = {
    AGAINST: {"name": "allreduce"},
    "fp16_compress": {"name": "fp16_compress"},
    "bf16_compress": {"name": "bf16_compress"},
    "quantization_pertensor": {"name": "quantization_pertensor"},
    "quantization_perchannel": {"name": "quantization_perchannel"},
    "powerSGD rank 1": _low_rank("powerSGD", 1),
    "powerSGD rank 2": _low_rank("powerSGD", 2),
    "powerSGD rank 4": _low_rank("powerSGD", 4),
    "powerSGD rank 4 without error feedback": _low_rank("powerSGD", 4, use_error_feedback=False),
    "batched_powerSGD rank 1": _low_rank("batched_powerSGD", 1),
    "batched_powerSGD rank 4": _low_rank("batched_powerSGD", 4),
    "post_localSGD": {"name": "post_localSGD", "start_localSGD_iter": START, "subgroup_size": 1},
}


def main() -> None:
    wanted = os.environ.get("RATCHET_BENCH_HOOKS", ",".join(HOOKS)).split(",")
    if unknown := sorted(set(wanted) - set(HOOKS)):
        raise SystemExit(f"RATCHET_BENCH_HOOKS: no {', '.join(unknown)} here; there are {', '.join(HOOKS)}")
    seeds = int(os.environ.get("RATCHET_BENCH_SEEDS", SEEDS))
    table({name: spec for name, spec in HOOKS.items() if name in wanted or name == AGAINST}, seeds)


def table(hooks: Mapping[str, Mapping[str, Any]], seeds: int, ranks: int = RANKS, **arguments: Any) -> None:
    """Train ``DigitsTask(**arguments)`` under each of ``hooks`` with the seeds 0 .. ``seeds`` - 1; print a line for each hook."""
    told = {"hooks": json.dumps(hooks), "seeds": seeds, "task": json.dumps(arguments)}
    runs = group_result("benchmarks.scripts.accuracy", ranks, told, _DEADLINE)
    accuracy = {name: [run["accuracy"] for run in of_hook] for name, of_hook in runs.items()}
    print(_line("", "accuracy, %", "min .. max", f"points to {AGAINST}", "within", "bytes per step"))
    for name, values in accuracy.items():
        lost = -difference(values, accuracy[AGAINST])
        figures = (f"{fmean(values):.2f}", f"{min(values):.2f} .. {max(values):.2f}", f"{-lost:+.2f}")
        print(_line(name, *figures, "yes" if lost <= ALLOWED else "no", str(runs[name][-1]["sent"])))
    print(
        "accuracy: of the 360 held-back images (one is 0.28 points) after the last step, mean over the seeds. within: loses no\n"
        f"more than {ALLOWED} points. bytes: what a rank sends in the last step, as the hook's summary counts them: gradients,\n"
        "not the parameters that post_localSGD averages every fourth step."
    )


def difference(accuracy: Sequence[float], against: Sequence[float]) -> float:
    """Points by which the mean of ``accuracy`` is above that of ``against``; both in percent, a value per seed."""
    return fmean(accuracy) - fmean(against)


def _line(title: str, accuracy: str, span: str, points: str, within: str, sent: str) -> str:
    return f"{title:<39} {accuracy:>11} {span:>16} {points:>19} {within:>7} {sent:>15}"


if __name__ == "__main__":
    main()
