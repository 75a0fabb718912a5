"""What a real attempt keeps of the checkpoints it saves: the newest, multiples, and the best by a metric."""

from __future__ import annotations

from pathlib import Path

from ratchet_contract.phases import Cause
from tests.support.launch import Job


def test_retention_keeps_newest_multiples_and_best_by_loss(jobs: list[Job], tmp_path: Path) -> None:
    spec = {
        "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 1}},
        "world": {"ranks_per_node": 1, "device": "cpu"},
        "checkpoint": {
            "every_steps": 2,
            "keep_last": 2,
            "keep_every": 10,
            "keep_best": {"metric": "loss", "count": 2},
        },
    }
    job = Job(tmp_path, spec)
    jobs.append(job)
    attempt = job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    losses = {step: values["loss"] for step, values in attempt.metrics().items()}
    saved = [message.step for message in attempt.messages(kind="checkpoint")]
    assert len(saved) > 10 and set(saved) <= set(losses)
    best = sorted(saved, key=lambda step: (losses[step], -step))[:2]
    kept = {int(name.split("-")[1].split(".")[0]) for name in job.checkpoints()}
    assert kept == {*saved[-2:], *best, *(step for step in saved if step % 10 == 0)}
    assert {message.step for message in attempt.messages(kind="checkpoint_deleted")} == set(saved) - kept
