"""What ``ratchet init`` says of scripts that log to trackers by themselves. The scripts are read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet_client.init import advice, project
from ratchet_client.init.command_line import parse_command
from ratchet_client.init.read_script import read_script

TENSORBOARD = """
import time
from datetime import datetime
from torch.utils.tensorboard import SummaryWriter
from ratchet import Session

RUN = f"runs/{datetime.now():%H%M}"
STAMP = time.strftime("%Y")
with Session() as session:
    by_time = SummaryWriter(RUN)
    default = SummaryWriter()
    fixed = SummaryWriter("runs/digits")
    right = SummaryWriter("runs/digits", purge_step=session.step)
    right.add_scalars("both", {"a": 1.0}, 0)
    best = session.summary_writer()
"""
WANDB = """
import os
import time
import wandb
from ratchet import Session

os.environ["WANDB_MODE"] = "offline"
run = wandb.init(project="digits", id=f"digits-{time.time()}")
wandb.init(mode="offline")
with Session() as session:
    for step in session.steps(5):
        wandb.log({"loss": 1.0})
        run.log({"loss": 1.0})
        wandb.log({"loss": 1.0}, step=step)
        run.log({"loss": 1.0}, step)
        session.log({"loss": 1.0})
"""
MLFLOW = """
import mlflow
from lightning.pytorch.loggers import TensorBoardLogger
from datetime import datetime

mlflow.set_experiment("digits")
mlflow.start_run()
mlflow.log_metric("loss", 1.0, step=0)
mlflow.log_metrics({"loss": 1.0}, step=0)
mlflow.log_params({"lr": 0.1})
logger = TensorBoardLogger("logs", version=str(datetime.now()))
fixed = TensorBoardLogger("logs")
"""


def said(script: str) -> list[tuple[int, str]]:
    """(line, beginning of the cure) of the notes on trackers."""
    Path("train.py").write_text(script)
    command = parse_command(["train.py"], {})
    place = project.locate(command.script, None)
    facts = read_script(place.script, place.code)
    notes = [note for note in advice.notes(command, facts, place, None) if note.code == "tracker"]
    assert len(notes) == len(facts.trackers) and all(
        note.serious and "docs/own-logging.md" in note.text for note in notes
    )
    assert all(f"train.py, line {at.line}: " in note.text for at, note in zip(facts.trackers, notes, strict=True))
    return sorted((at.line, str(at.value)) for at in facts.trackers)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            TENSORBOARD,
            [
                (10, "the directory has the time"), (11, "the default directory has the time"),
                (12, "TensorBoard would show repeated steps twice"), (14, "add_scalars"),
            ],
        ),
        (
            WANDB,
            [(7, "W&B offline"), (8, "the id has the time"), (9, "W&B offline"), (12, "without step="), (13, "without step=")],
        ),
        (
            MLFLOW,
            [
                (6, "in a job the run exists before"), (8, "repeated steps would be second points"),
                (9, "repeated steps would be second points"), (11, "the directory has the time"),
            ],
        ),
    ],
)  # fmt: skip
def test_init_names_calls_that_would_log_repeated_steps_twice(
    script: str, expected: list[tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = said(script)
    assert [(line, text[: len(begin)]) for (line, text), (_, begin) in zip(found, expected, strict=True)] == expected
