"""Jobs of ``lightning_job``, without the service: undisturbed and killed, and what is the same of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare
from tests.support.fork_server import LIBRARIES, Program
from tests.support.launch import Attempt, Job

CODE = Path(__file__).with_name("lightning_job")
Kill: TypeAlias = tuple[str, int, int | None] | tuple[str, int, int | None, str]
"""As ``lightning_job/train.py`` takes them."""


class LightningJob(Job):
    def __init__(self, home: Path, case: dict[str, Any], job_id: str, **spec: Any) -> None:
        spec = {"script": ["train.py", json.dumps(case)], "code": {"path": str(CODE)}, **spec}
        super().__init__(home, {"checkpoint": {"every_steps": 3, "keep_last": 100}, **spec}, CODE, job_id=job_id)

    def start_agent(self, paths: AttemptPaths) -> Program:
        command = [sys.executable, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file)]
        with paths.agent_log.open("ab") as log:
            return LIBRARIES.start(command, log.fileno())

    def run(self) -> Attempt:
        """The next attempt, to its end."""
        attempt = self.launch()
        attempt.wait(120)
        return attempt

    def checkpoints_by_step(self) -> dict[int, Path]:
        """Committed checkpoints, by step."""
        files = self.paths.checkpoints.glob("*/MANIFEST.json")
        return {json.loads(manifest.read_bytes())["step"]: manifest.parent for manifest in files}

    def logged_values(self) -> dict[str, str]:
        """The last value of each name and step."""
        log = self.paths.work_dir / "log.jsonl"  # of a short run there is none
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return {f"{name} {step}": value for step, values in lines for name, value in values.items()}

    def final_facts(self) -> Any:
        return json.loads((self.paths.work_dir / "end.json").read_text())


def checkpoint_files(root: Path, *, unlike: tuple[str, ...] = ("Timer",)) -> dict[str, str]:
    """What Lightning's own checkpoint files below ``root`` hold, by file and path within it: weights, optimizers, loops,
    callbacks. ``unlike``: callbacks whose state is a measured time."""
    out = {}
    for file in sorted(p for p in root.rglob("*") if p.suffix == ".ckpt" or ".ckpt." in p.name):
        for path, value in _leaves(torch.load(file, weights_only=True)):
            if not any(f"/callbacks/{name}" in path for name in unlike):
                text = repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
                out[f"{file.relative_to(root)}{path}".replace(str(root), "")] = text.replace(str(root), "")
    return out


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield path, sorted(map(str, value))
        for key, one in value.items():
            yield from _leaves(one, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{path}/{number}")
    else:
        yield path, value


def _unequal(kind: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    return [f"{kind} {k}: {str(ours.get(k))[:200]} {str(theirs.get(k))[:200]}" for k in names]


def _of_step(step: int, whole: Path, cut: Path, unlike: tuple[str, ...]) -> list[str]:
    """What is other in the checkpoints of a step: tensors and, but for times, every value, and which tensors share memory."""
    found = compare(whole, cut)
    out = [f"tensor {one.name}" for one in found.different]
    out += [f"state {'.'.join(one.path)} (rank {one.rank}): {one.a} {one.b}" for one in found.states]
    return [f"step {step}, {text}" for text in out if not any(name in text for name in ("Timer", *unlike))]


def resume_differences(
    home: Path, case: dict[str, Any], kills: list[Kill], *, unlike: tuple[str, ...] = (), **spec: Any
) -> list[str]:
    """What is other where the job is killed at ``kills``: [] where nothing is. ``unlike``: beginnings of the names of logged
    values that are measured times."""
    whole, cut = (LightningJob(home, case | {"kills": k}, name, **spec) for name, k in (("whole", []), ("cut", kills)))
    try:
        attempt = whole.run()
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        for kill in kills:
            attempt = cut.run()
            cause = Cause.SIGTERM if "SIGTERM" in kill else Cause.RANK_KILLED
            assert attempt.wait().cause is cause, f"{kill}\n{attempt.logs()}"
        attempt = cut.run()
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        early = sum(kill[2] is None and "SIGTERM" not in kill for kill in kills)  # before anything was saved
        said = [attempt.report().sentence() for attempt in cut.attempts[1 + early :]]
        out = [sentence for sentence in said if sentence != "exact"]
        saved = whole.checkpoints_by_step(), cut.checkpoints_by_step()
        for step in sorted(saved[0].keys() & saved[1].keys()):
            out += _of_step(step, saved[0][step], saved[1][step], unlike)
        out += [
            f"{k}: {v} {cut.final_facts().get(k)}"
            for k, v in whole.final_facts().items()
            if cut.final_facts().get(k) != v
        ]
        ours, theirs = whole.logged_values(), cut.logged_values()
        names = [k for k in ours.keys() | theirs.keys() if not k.startswith(unlike) or not unlike]
        out += _unequal("logged", *({k: one[k] for k in names if k in one} for one in (ours, theirs)))
        out += _unequal("file", *(checkpoint_files(job.paths.work_dir) for job in (whole, cut)))
        return out + _unequal(
            "rows",
            *(
                {str(f.relative_to(job.paths.work_dir)): f.read_text() for f in job.paths.work_dir.rglob("*.csv")}
                for job in (whole, cut)
            ),
        )
    finally:
        whole.close()
        cut.close()
