"""A script with Lightning, of which only the strategy is changed: killed at five steps, it leaves what plain Lightning leaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ratchet_contract.phases import Cause
from tests.support.launch import Job
from tests.support.lightning_jobs import LightningJob, checkpoint_files
from tests.support.object_stores import free_port

pytestmark = [
    pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
    for package in ("lightning", "sklearn")
]
AGENTS = "libraries"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_image_classifier"
STEPS = 18 * 8


def plain(directory: Path, *script: object) -> str:
    """What rank 0 prints under Lightning alone, as torchrun starts it. Up to five times: at the end of a script on gloo a race in
    torch between the threads of DDP's reducer hangs or aborts a process now and then."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET")}
    for number in range(5):
        cwd = directory / str(number)
        cwd.mkdir(parents=True)
        env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "plain", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen(
                [sys.executable, *map(str, script)],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
                cwd=cwd,
            )
            for rank in range(2)
        ]
        try:
            printed = [rank.communicate(timeout=120)[0] for rank in ranks]
            if [rank.returncode for rank in ranks] == [0, 0]:
                cwd.rename(directory / "ended")
                return printed[0]
        except subprocess.TimeoutExpired:
            pass
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    raise AssertionError("the plain script did not end well in five runs")


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in (root / "logs").rglob("*") if p.is_file())


def test_a_killed_job_leaves_the_weights_and_files_of_plain_lightning(jobs: list[Job], tmp_path: Path) -> None:
    kills = sorted(random.Random(7).sample(range(2, STEPS - 8), 5))
    spec = {"script": ["train.py", "--epochs", "8"], "code": {"path": str(EXAMPLE)}, "checkpoint": {"every_steps": 7}}
    jobs.append(job := LightningJob(tmp_path, {}, "job", **spec))
    job.code = EXAMPLE
    for step in kills:
        attempt = job.launch()
        attempt.wait_step(step)
        attempt.kill(step % 2)
        assert attempt.wait().cause is Cause.RANK_KILLED, attempt.logs()
    attempt = job.run()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert {a.report().verdict for a in job.attempts[1:]} == {"exact"}
    printed = plain(tmp_path / "plain", EXAMPLE / "plain.py", "--epochs", "8")
    (best,) = [line for line in printed.splitlines() if line.startswith("best: ")]
    assert best in attempt.paths.log(0).read_text().splitlines()
    ended = tmp_path / "plain" / "ended"
    assert files(job.paths.work) == files(ended)
    ours, theirs = checkpoint_files(job.paths.work), checkpoint_files(ended)
    assert len(ours) > 3 * 20 and [k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)] == []
    csv = "logs/lightning_logs/version_0/metrics.csv"
    assert (job.paths.work / csv).read_text() == (ended / csv).read_text()
