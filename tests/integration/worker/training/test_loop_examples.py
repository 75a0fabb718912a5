"""Scripts of common shapes (``examples/image_loop``, ``examples/token_loop``), killed: their weights, and the best weights that
they write to files, are those of the plain script under torch alone.

Two kills each; RATCHET_TEST_OPTIONS=all: five.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.full_matrix import FULL, full
from tests.support.launch import Job
from tests.support.plain_torch_runs import run_plain

EXAMPLES = Path(__file__).parents[4] / "examples"
KILLS = [13, 8, 5, 6, 5] if FULL else [13, 8]
"""Behind so many steps of the optimizer, by attempt."""
DIES = f"""
import os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook

def die(*_):
    done = os.environ["DONE"] = str(int(os.environ.get("DONE", "0")) + 1)
    if done == dict(enumerate({[*map(str, KILLS)]}, 1)).get(int(os.environ["RATCHET_ATTEMPT"])) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(die)
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("image_loop", ["--epochs", "4"], marks=full),
        ("token_loop", ["--steps", "40"]),
    ],
)
def test_killed_example_writes_the_same_weights_as_the_plain_script(
    jobs: list[Job], tmp_path: Path, name: str, arguments: list[str]
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(DIES + (EXAMPLES / name / "train.py").read_text())
    checkpoint = {"every_steps": 3, "first": "off"}
    spec = {
        "script": ["train.py", *arguments],
        "code": {"path": str(code)},
        "checkpoint": checkpoint,
        "determinism": "strict",
    }
    jobs.append(Job(tmp_path / "home", spec, code))
    jobs[0].run_killed(len(KILLS))
    for attempt in jobs[0].attempts[1:]:
        report = attempt.report()
        assert (report.verdict, report.base.step > 0) == ("exact", True), report

    (tmp_path / "plain").mkdir()
    run_plain(EXAMPLES / name / "plain.py", *arguments, directory=tmp_path / "plain")
    theirs = sorted(path.name for path in (tmp_path / "plain").glob("*.safetensors"))
    work = jobs[0].paths.work_dir
    assert len(theirs) > 2 and theirs == sorted(path.name for path in work.glob("*.safetensors"))
    for file in theirs:
        mine, his = load_file(work / file), load_file(tmp_path / "plain" / file)
        assert mine.keys() == his.keys() and all(torch.equal(mine[key], his[key]) for key in his), file
