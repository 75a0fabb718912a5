"""Jobs of scripts that log by themselves: killed at drawn steps, and undisturbed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, Final

from tests.support.fork_server import RANKS, Interpreter
from tests.support.launch import Job

CODE: Final = Path(__file__).with_name("logging_job")
ROUNDS: Final = int(os.environ.get("RATCHET_TEST_LOGGING", "1"))
"""Jobs of each kind, with other kills; their seeds are their numbers."""


def draw_kills(seed: int, steps: int, *, first: int = 0) -> list[str]:
    """``ATTEMPT:STEP`` of two to four kills: of an attempt before its first save, right behind one, or anywhere."""
    draw = random.Random(seed)
    places, at = [], first
    for attempt in range(1, draw.randrange(3, 6)):
        at = min(steps - 2, at + draw.randrange(1, 7))
        places.append(f"{attempt}:{at}")
    return places


def run(
    jobs: list[Job], home: Path, script: list[str], places: list[str], *,
    ranks: int = 1, interpreters: Interpreter = RANKS, env: dict[str, str] | None = None, **checkpoint: Any,
) -> Job:  # fmt: skip
    """A job of ``script``, killed at ``places``, to its end. The id is the home's name."""
    spec = {
        "script": [*script, *places], "code": {"path": str(CODE)}, "world": {"ranks_per_node": ranks, "device": "cpu"},
        "checkpoint": {"every_steps": 5, "first": "off", **checkpoint}, "env": env or {},
    }  # fmt: skip
    jobs.append(job := Job(home, spec, CODE, interpreters=interpreters, job_id=f"job-{home.name}"))
    job.run_killed(len(places))
    return job


def truth(job: Job) -> dict[int, float]:
    """The loss by step, as the script has computed it; of repeated steps, each time the same."""
    found: dict[int, float] = {}
    for line in (job.paths.work_dir / "truth.jsonl").read_text().splitlines():
        _, step, loss = json.loads(line)
        assert found.setdefault(step, loss) == loss
    return found
