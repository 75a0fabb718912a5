"""A script with Lightning, of which only the strategy is changed: killed at five steps, it leaves what plain Lightning leaves."""

from __future__ import annotations

import random
from pathlib import Path

from ratchet_contract.phases import Cause
from tests.support.fork_server import LIBRARIES
from tests.support.full_matrix import full
from tests.support.launch import Job
from tests.support.lightning_jobs import LightningJob, checkpoint_files
from tests.support.optional_packages import skip_if_missing
from tests.support.plain_torch_runs import run_plain

pytestmark = [skip_if_missing("lightning"), skip_if_missing("sklearn")]
AGENTS = "libraries"
EXAMPLE = Path(__file__).parents[4] / "examples" / "lightning_image_classifier"
STEPS = 18 * 8
LAUNCHED = {
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "plain",
    "GLOO_SOCKET_IFNAME": "lo",
}  # Lightning looks for torchrun


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in (root / "logs").rglob("*") if p.is_file())


@full
def test_killed_lightning_job_has_weights_and_files_of_plain_lightning(jobs: list[Job], tmp_path: Path) -> None:
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
    printed = run_plain(
        EXAMPLE / "plain.py", "--epochs", "8", seconds=120, ended=ended, interpreters=LIBRARIES, **LAUNCHED
    )
    (best,) = [line for line in printed.splitlines() if line.startswith("best: ")]
    assert best in attempt.paths.log(0).read_text().splitlines()
    assert files(job.paths.work_dir) == files(ended)
    ours, theirs = checkpoint_files(job.paths.work_dir), checkpoint_files(ended)
    assert len(ours) > 3 * 20 and [k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)] == []
    csv = "logs/lightning_logs/version_0/metrics.csv"
    assert (job.paths.work_dir / csv).read_text() == (ended / csv).read_text()
