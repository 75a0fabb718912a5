"""Row ``jobs``: jobs of the real service on SQLite, by the local launcher. Of each kind one is undisturbed, and one loses its
last rank to SIGKILL and resumes; every tensor and every rank's state of the two final checkpoints is compared."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import httpx

from tests.gpu import service
from tests.gpu.service import ROOT, Ended
from tests.gpu.work import Work
from tests.support.server import Server

EXAMPLES: Final = ROOT / "examples"
_LOW_RANK: Final = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 10}


@dataclass(frozen=True)
class Kind:
    """``parts``: of the spec. ``needs``: a package. ``shared``: two ranks on one GPU."""

    parts: Callable[[Work], dict[str, Any]]
    needs: str = "torch"
    shared: bool = False


def _script(folder: Path, *words: str, length: str = "--epochs", times: int = 4) -> Callable[[Work], dict[str, Any]]:
    """A script that is given its length: on a GPU ten times as long, since its steps are that much quicker."""
    return lambda work: _code(folder, script=[*words, length, str(times * work.sized(10, 1, 1))])


def _own(*words: str) -> Callable[[Work], dict[str, Any]]:
    return _script(Path(__file__).with_name("job_code"), "train.py", *words, length="--steps", times=80)


def _task(work: Work) -> dict[str, Any]:
    task = {"entrypoint": "train:DigitsTask", "args": {"epochs": 4 * work.sized(10, 1, 1)}}
    return _code(EXAMPLES / "adoption" / "3_task", task=task)


def _compiled(*words: str) -> Callable[[Work], dict[str, Any]]:
    """With code generation; in the tests without, which takes a minute."""
    return lambda work: _own("--compile", "aot_eager" if work.size == "cheap" else "inductor", *words)(work)


def _code(folder: Path, **parts: Any) -> dict[str, Any]:
    return {"code": {"path": str(folder)}, "hook": _LOW_RANK, **parts}


KINDS: Final[dict[str, Kind]] = {
    "Session": Kind(_script(EXAMPLES / "adoption" / "2_session", "train.py")),
    "Task": Kind(_task),
    "float16 with GradScaler": Kind(_own("--half", "float16")),
    "bfloat16 autocast": Kind(_own("--half", "bfloat16")),
    "torch.compile": Kind(_compiled()),
    "torch.compile, dropout recomputed": Kind(_compiled("--recompute")),
    "two ranks on one device": Kind(_script(EXAMPLES / "adoption" / "2_session", "train.py"), shared=True),
    "Lightning": Kind(_script(EXAMPLES / "integrations", "lightning_train.py", times=8), "lightning"),
    "transformers Trainer": Kind(_script(EXAMPLES / "integrations", "trainer_train.py", times=8), "transformers"),
    "Accelerate": Kind(_script(EXAMPLES / "integrations", "accelerate_train.py", times=2), "accelerate"),
}
_CHEAP: Final = ("float16 with GradScaler",)


def run(work: Work) -> str:
    kinds = {name: kind for name, kind in KINDS.items() if work.size != "cheap" or name in _CHEAP}
    for name in [name for name, kind in kinds.items() if find_spec(kind.needs) is None]:
        work.red(name, f"{kinds.pop(name).needs} is not installed in this Python")
    jobs = _Jobs(work, kinds)
    lanes = max(2, min(6, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(lanes) as threads:
        list(threads.map(jobs.work_off, range(lanes)))
    return f"{jobs.identical} of {len(kinds)} kinds of jobs identical to their undisturbed ones"


class _Jobs:
    """Two jobs of each kind, in the order of the kinds. Threads work them off."""

    def __init__(self, work: Work, kinds: dict[str, Kind]) -> None:
        self._work, self._kinds = work, kinds
        self._waiting = SimpleQueue[tuple[str, bool]]()
        for name in kinds:
            self._waiting.put((name, True))
            self._waiting.put((name, False))
        self._ended: dict[str, dict[bool, Ended]] = {name: {} for name in kinds}
        self._lock = threading.Lock()
        self.identical = 0

    def work_off(self, lane: int) -> None:
        """In a service of this thread's own: a service lends its GPU to one job at a time, and the GPU can bear more."""
        with service.serving(self._work, str(lane), twin=self._work.device == "cuda") as server, suppress(Empty):
            while True:
                name, killed = self._waiting.get_nowait()
                try:
                    ended = self._run(server, name, killed)
                except (AssertionError, httpx.HTTPError) as error:
                    self._work.red(name, f"the {'killed' if killed else 'undisturbed'} job: {error}")
                    continue
                with self._lock:
                    self._ended[name][killed] = ended
                    both = len(self._ended[name]) == 2
                if both:
                    self._judge(name)

    def _run(self, server: Server, name: str, killed: bool) -> Ended:
        kind = self._kinds[name]
        spec = {
            "name": f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{'killed' if killed else 'whole'}",
            **kind.parts(self._work), **service.world(self._work, shared=kind.shared),
            "checkpoint": {"every_steps": self._work.sized(50, 20, 20), "keep_last": 3},
        }  # fmt: skip
        seconds = max(5.0, self._work.left - 5.0)
        kill_at = self._work.sized(120, 30, 30) if killed else None
        if kind.shared and self._work.device == "cpu":
            with service.serving(self._work, spec["name"], twin=True) as own:
                return service.finished(own, spec, kill_at, seconds)
        return service.finished(server, spec, kill_at, seconds)

    def _judge(self, name: str) -> None:
        ended = self._ended[name]
        problems, seen = service.breaches(ended[False], ended[True])
        self.identical += not problems
        self._work.judge(name, problems, seen)
