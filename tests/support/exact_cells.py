"""The cells that ``tests.e2e.exactness`` sends through the real service: hook x buckets x ranks x job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet_hooks.specs import registry
from tests.support.pairwise import Item, cover_single_levels, pairwise

STEPS = 120
EVERY = 7
START = 20  # iterations before PowerSGD compresses

HERE = Path(__file__).parent
DIGITS = {
    "entrypoint": "ratchet_worker.tasks.digits:DigitsTask",
    "args": {"steps": STEPS, "width": 12, "batch_size": 16},
}
BYTELM = {
    "entrypoint": "ratchet_worker.tasks.bytelm:ByteLMTask",
    "args": {
        "steps": STEPS, "width": 32, "layers": 2, "heads": 2, "context": 32, "batch_size": 8, "grams": 256, "dropout": 0.1,
        "train_bytes": 200_000, "held_back_bytes": 20_000,
    },
}  # fmt: skip


def _configured(**args: Any) -> dict[str, Any]:
    task = {"entrypoint": "exact_task:Configured", "args": {"steps": STEPS, "width": 16, "evaluate": False, **args}}
    return {"task": task, "code": {"path": str(HERE / "exact_job")}}


JOBS: dict[str, dict[str, Any]] = {
    "digits": {"task": DIGITS},
    "bytelm": {"task": BYTELM},
    "accumulate": _configured(accumulate=3),
    "scaler": _configured(scaled=True),
    "channels-last": _configured(channels_last=True),
    "compiled": _configured(compiled=True),
    "static": {**_configured(), "ddp": {"static_graph": True}},
    "views": {**_configured(accumulate=2), "ddp": {"gradient_as_bucket_view": True}},
    "unused": {**_configured(alternate=True), "ddp": {"find_unused_parameters": True}},
    "own-buffers": {"task": DIGITS, "ddp": {"broadcast_buffers": False}},
}
"""Parts of a spec by what is special about the job."""

_LOW_RANK = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START}
HOOKS: dict[str, dict[str, Any]] = {
    "powerSGD": _LOW_RANK,
    "post_localSGD": {"start_localSGD_iter": START, "subgroup_size": 1, "model_averaging_period": 4},
    "batched_powerSGD": _LOW_RANK,
    "custom": {
        "hook": "my_hooks:top_k_hook", "state": "my_hooks:TopKState", "state_args": {"density": 0.1},
        "code": {"path": str(HERE.parents[1] / "examples" / "custom_hook")},
    },
    "fp16_compress": {},
    "bf16_compress": {},
    "quantization_pertensor": {},
    "quantization_perchannel": {},
    "noop": {},
    "allreduce": {},
}  # fmt: skip
"""Parameters by name, those with most to lose first."""
ON_ENGINES = "powerSGD+bf16" if os.environ.get("RATCHET_TEST_STRIKES") == "all" else "powerSGD"
"""The hook of the one cell of ``make test``, and of jobs on several nodes. Where the CPU has no instructions for bfloat16, the
wrapper takes most of their time."""
BUCKETS: dict[str, dict[str, float]] = {"many": {"bucket_cap_mb": 0.02}, "one": {"bucket_cap_mb": 100.0}}


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix; ``hook``: its name, and a wrapper after ``+``."""

    hook: str
    buckets: str
    ranks: int
    job: str

    def spec(self, name: str) -> dict[str, Any]:
        hook, _, wrapper = self.hook.partition("+")
        job, parameters = JOBS[self.job], dict(HOOKS[hook])
        code = {"code": parameters.pop("code")} if "code" in parameters else {}
        return {
            "name": name,
            **code,
            **job,
            "world": {"ranks_per_node": self.ranks, "device": "cpu"},
            "resources": {"cpus_per_rank": 1},
            "ddp": {**BUCKETS[self.buckets], **job.get("ddp", {})},
            "hook": {"name": hook, "wrapper": wrapper or None, **parameters},
            "checkpoint": {"every_steps": EVERY, "keep_last": 3},
            "policy": {"max_failures": 10, "backoff": 0.1},
            "seed": 7,
        }


def hooks() -> list[str]:
    """Every hook that is available, and each that can be wrapped under a wrapper, too."""
    names = [name for name in HOOKS if registry.HOOKS[name].available]
    wrapped = [name for name in names if registry.HOOKS[name].wrappers]
    return names + [f"{name}+{'fp16' if i % 2 else 'bf16'}" for i, name in enumerate(wrapped)]


def matrix() -> list[Cell]:
    """Cells in which every pair of hook, buckets, ranks and job occurs; first some in which each of these occurs."""
    factors = {"hook": hooks(), "buckets": [*BUCKETS], "ranks": ["2", "3"], "job": [*JOBS]}
    rows = pairwise(factors, _clash)
    first = cover_single_levels(rows)
    return [
        Cell(row["hook"], row["buckets"], int(row["ranks"]), row["job"])
        for row in first + [row for row in rows if row not in first]
    ]


def _clash(a: Item, b: Item) -> bool:
    """A job has one directory of code: a hook of the user's own in one, a task in another is no combination."""
    hook, job = (a[1], b[1]) if a[0] == "hook" else (b[1], a[1])
    return {a[0], b[0]} == {"hook", "job"} and hook.startswith("custom") and "code" in JOBS[job]
