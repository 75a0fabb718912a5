"""A script with Lightning, of which only the strategy is changed: killed at five steps, it leaves what plain Lightning leaves."""

from __future__ import annotations

import random
from pathlib import Path

from ratchet_contract.phases import Cause
from tests.support.interpreters import LIBRARIES
from tests.support.launch import Job
from tests.support.lightning_jobs import LightningJob, checkpoint_files
from tests.support.packages import needs
from tests.support.plain_ranks import plain

pytestmark = [needs("lightning"), needs("sklearn")]
AGENTS = "libraries"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_image_classifier"
STEPS = 18 * 8
LAUNCHED = {
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "plain",
    "GLOO_SOCKET_IFNAME": "lo",
}  # Lightning looks for torchrun


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
    ended = tmp_path / "plain" / "ended"
    printed = plain(EXAMPLE / "plain.py", "--epochs", "8", seconds=120, ended=ended, interpreters=LIBRARIES, **LAUNCHED)
    (best,) = [line for line in printed.splitlines() if line.startswith("best: ")]
    assert best in attempt.paths.log(0).read_text().splitlines()
    assert files(job.paths.work) == files(ended)
    ours, theirs = checkpoint_files(job.paths.work), checkpoint_files(ended)
    assert len(ours) > 3 * 20 and [k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)] == []
    csv = "logs/lightning_logs/version_0/metrics.csv"
    assert (job.paths.work / csv).read_text() == (ended / csv).read_text()
