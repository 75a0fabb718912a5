"""``examples/hooks``: the examples of torch's and Lightning's pages on communication hooks, as jobs that really run.

The one of saving and reloading is killed and compared with one that nobody touched; the others run past the start of their
compression or averaging.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet_store.read.compare import compare, render
from tests.support.cli import Cli
from tests.support.docs import ROOT
from tests.support.server import Server

EXAMPLES = ROOT / "examples" / "hooks"
DIGITS = {"task.args": '{"steps": 14, "width": 8, "evaluate": false}'}
ONE_RANK = {"world.ranks_per_node": "1"}
TWO_RANKS = {"world.ranks_per_node": "2", "world.device": "cpu", "resources.cpus_per_rank": "1"}
POWERSGD = {"name": "powerSGD", "phase": "compressing", "iteration": 14}
RUNS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "powersgd-fp16-wrapper": (
        {**DIGITS, "hook.start_powerSGD_iter": "5"},
        {**POWERSGD, "wrapper": "fp16_compress_wrapper"},
    ),
    "post-localsgd": (
        {**DIGITS, "hook.subgroup_size": "1"},
        {"name": "post_localSGD", "phase": "local", "iteration": 14, "averager_step": 14, "next_averaging": 17},
    ),
    "find-unused-parameters": ({"task.args.steps": "14"}, POWERSGD),
    "static-graph": (
        {**DIGITS, **ONE_RANK, "ddp.gradient_as_bucket_view": "true"},  # and the example of that one
        {"name": "allreduce", "phase": "steady", "iteration": 14},
    ),
}
"""What is made smaller, and what the hook says at the end."""


@pytest.fixture(scope="module")
def submit(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    cli = Cli(server.home, tmp_path_factory.mktemp("cli"))

    def submitted(name: str, changes: dict[str, str]) -> str:
        sets = [part for key, value in (TWO_RANKS | changes).items() for part in ("--set", f"{key}={value}")]
        return cli("submit", str(EXAMPLES / f"{name}.yaml"), *sets).text.strip()

    return submitted


def newest(server: Server, job_id: str) -> Path:
    return max(server.paths.job(job_id).checkpoints.iterdir())


@pytest.mark.slow
def test_killed_save_reload_example_resumes_exactly(server: Server, submit: Callable[..., str]) -> None:
    changes = {"script": '["train.py", "--steps", "160"]', "checkpoint.every_steps": "40"}
    kill = {"trial.end_at": "160", "trial.faults": '[{"attempt": 1, "rank": 1, "step": 85, "kind": "kill-rank"}]'}
    whole, cut = submit("save-reload", changes), submit("save-reload", changes | kill)
    for job_id in (whole, cut):
        assert server.wait_phase(job_id, "SUCCEEDED")["progress"]["step"] == 160
    first, second = server.attempts(cut)
    assert first["cause"] == "rank-killed" and second["base"]["step"] >= 40
    assert second["resume_report"]["verdict"] == "exact"
    comparison = compare(newest(server, whole), newest(server, cut))
    assert comparison.identical and any("residual" in t.name for t in comparison.tensors), render(comparison)
    digests = [re.findall(r"^weights (\w{16})$", server.rank_logs(job_id), re.MULTILINE) for job_id in (whole, cut)]
    assert digests[0] == digests[1] and len(digests[0]) == 1


@pytest.mark.slow
def test_each_hook_example_runs_past_the_start_of_compression(server: Server, submit: Callable[..., str]) -> None:
    jobs = {name: submit(name, changes) for name, (changes, _) in RUNS.items()}
    for name, job_id in jobs.items():
        server.wait_phase(job_id, "SUCCEEDED")
        view = server.call("GET", f"/v1/jobs/{job_id}/hook").json()
        expected = RUNS[name][1]
        assert {key: view[key] for key in expected} == expected, name
