"""``examples/custom_hook`` as a user runs it: checked, submitted, killed, and the same bits as a job that nobody killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_store.read.compare import compare, render
from tests.support.cli import Cli
from tests.support.docs import ROOT
from tests.support.full_matrix import full
from tests.support.server import Server

EXAMPLE = ROOT / "examples" / "custom_hook"
SHORT = (
    "--set",
    "checkpoint.every_steps=5",
    "--set",
    "task.args.steps=150",
    "--set",
    "task.args.width=8",
    "--set",
    "task.args.evaluate=false",
)
KILLED = (
    "--set",
    "trial.end_at=150",
    "--set",
    'trial.faults=[{"attempt": 1, "rank": 1, "step": 12, "kind": "kill-rank"}]',
)
SMALL = (*SHORT, "--set", "resources.cpus_per_rank=1", "--set", "ddp.bucket_cap_mb=0.02")


@full
@pytest.mark.slow
def test_custom_hook_example_resumes_exactly_with_residuals(server: Server, tmp_path: Path) -> None:
    cli, spec = Cli(server.home, tmp_path), str(EXAMPLE / "job.yaml")
    wrong = cli("submit", spec, "--set", "hook.state=my_hooks:TopK", "--dry-run", expect=5).errors
    assert "/hook/state: my_hooks has no 'TopK'; did you mean 'TopKState'?" in wrong
    whole, cut = (cli("submit", spec, *SMALL, *more).text.strip() for more in ((), KILLED))
    ended = [server.wait_phase(job, "SUCCEEDED") for job in (whole, cut)]
    assert [job["progress"]["step"] for job in ended] == [150, 150]
    first, second = server.attempts(cut)
    assert first["cause"] == "rank-killed" and second["base"]["step"] in range(5, 150, 5)
    assert second["resume_report"]["verdict"] == "exact"
    newest = [max((server.paths.job(job).checkpoints).iterdir()) for job in (whole, cut)]
    comparison = compare(*newest)
    assert comparison.identical and any("custom/residuals" in t.name for t in comparison.tensors), render(comparison)
    view: Any = cli("hook", cut, "--json").data
    assert (view["name"], view["iteration"], view["bytes_after"]) == ("custom", 150, None)
    assert view["compression_rate"] > 4 and view["parameters"]["hook"] == "my_hooks:top_k_hook"
