"""The built-in tasks reach what they promise, trained by a real agent and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_worker.tasks.bytelm import ByteLMTask
from ratchet_worker.tasks.stdlib_bytes import load_corpus
from tests.support.byte_baseline import OrderTwo
from tests.support.full_matrix import full
from tests.support.launch import Job

pytestmark = full
POWERSGD = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 10}


def train(home: Path, entrypoint: str, **args: Any) -> dict[str, float]:
    """Trains to the end and returns the last step's metrics."""
    spec = {
        "task": {"entrypoint": f"ratchet_worker.tasks.{entrypoint}", "args": args},
        "hook": POWERSGD,
        "ddp": {"bucket_cap_mb": 0.05},
        "checkpoint": {"every_steps": None},
    }
    job = Job(home, spec)
    try:
        attempt = job.launch()
        result = attempt.wait(280)
        assert result.cause is Cause.COMPLETED, attempt.logs()
        metrics = attempt.metrics()
        return metrics[max(metrics)]
    finally:
        job.close()


@pytest.mark.slow
def test_digits_reaches_97_percent_with_powersgd_of_rank_2(tmp_path: Path) -> None:
    assert train(tmp_path, "digits:DigitsTask")["test_accuracy"] >= 0.97


@pytest.mark.slow
def test_bytelm_with_powersgd_beats_the_order_2_model_on_held_back_files(tmp_path: Path) -> None:
    task = ByteLMTask()
    corpus = load_corpus(task.train_bytes, task.held_back_bytes)
    baseline = OrderTwo(corpus.train).bits_per_byte(corpus.held_back)
    reached = train(tmp_path, "bytelm:ByteLMTask", steps=220)["test_bits_per_byte"]
    assert reached < baseline, f"{reached} bits per byte, order-2 model {baseline}"
