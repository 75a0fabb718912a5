"""A job whose code is at fault: the hints that the program and the pages give are followed word for word, and lead to its end."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from ratchet_contract.code import tree
from tests.support.cli import Cli
from tests.support.fork_server import LIBRARIES
from tests.support.server import Server

AGENTS = LIBRARIES
PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
PLAIN = """import os
open("seen.txt", "a").write("seen by a rank\\n")
rate = {rate}
open(f"rank-{{os.environ['RANK']}}", "a").write(open("rate.txt").read())
"""
SCRIPT = """import torch
from ratchet_worker.session import Session

session = Session()
model = session.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(optimizer=optimizer)
for step in session.steps(12):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {fault}
"""


def failed(cli: Cli, script: str, text: str) -> tuple[str, str]:
    """The id of a job of the project ``code`` that has ended as FAILED, and what the terminal said."""
    project = cli.cwd / "code"
    project.mkdir(exist_ok=True)
    (project / script).write_text(text)
    spec = {"name": "mend", "script": [script], "code": {"path": "code"}, "world": {"device": "cpu", "ranks_per_node": 2},
            "resources": {"cpus_per_rank": 1}, "checkpoint": {"every_steps": 4}, "policy": {"max_failures": 0}}  # fmt: skip
    (cli.cwd / "job.yaml").write_text(yaml.safe_dump(spec))
    ended = cli("submit", "job.yaml", "--wait", expect=1)
    return ended.text.strip(), ended.errors


def followed(cli: Cli, said: str, pattern: str, **values: str) -> None:
    """The one command that ``said`` shows where the pattern has its group, typed as it stands."""
    (command,) = set(re.findall(pattern, said))
    for name, value in values.items():
        command = command.replace(name, value)
    cli(*shlex.split(command)[1:])


def digest(project: Path) -> str:
    return tree.tree_digest(tree.list_entries(project))


def test_resume_hints_after_script_failure_lead_to_success(server: Server, tmp_path: Path) -> None:
    """What is read from the working directory is the fixed code's, too; what the job wrote there stays, which an event notes."""
    cli, project = Cli(server.home, tmp_path), tmp_path / "code"
    project.mkdir()
    (project / "rate.txt").write_text("a")
    (project / "seen.txt").write_text("old\n")
    job, said = failed(cli, "plain.py", PLAIN.format(rate="None + 1"))
    (project / "plain.py").write_text(PLAIN.format(rate="1"))
    (project / "rate.txt").write_text("b")
    (project / "seen.txt").write_text("new\n")
    for command in ("attempts", "logs"):
        followed(cli, said, rf"(ratchet {command} [-\w]+)")
    followed(cli, said, r"`(ratchet resume \S+)`, which runs the same code again, or with changed code `--code DIR`")
    assert "TypeError" in cli("wait", job, expect=1).errors
    cli("resume", job, "--code", str(project))
    assert "SUCCEEDED" in cli("wait", job).errors
    work = server.paths.job(job).work_dir
    assert (work / "rank-0").read_text() == "b" and (work / "rank-1").read_text() == "b"
    assert (work / "seen.txt").read_text().startswith("old\n")
    (kept,) = [event for event in server.events(job) if event["type"] == "note.work-kept"]
    assert "files in its working directory that the job has changed are not replaced: seen.txt. " in kept["message"]


def test_resume_report_names_old_and_new_code_digest(server: Server, tmp_path: Path) -> None:
    cli, project = Cli(server.home, tmp_path), tmp_path / "code"
    job, _ = failed(cli, "train.py", SCRIPT.format(fault="assert step < 7"))
    old = digest(project)
    (project / "train.py").write_text(SCRIPT.format(fault="pass"))
    followed(cli, PAGE, r"`(ratchet resume JOB --code [^` ]*)`", JOB=job, **{"/home/me/project": str(project)})
    cli("wait", job)
    last = cli("attempts", job, "--json").data[-1]
    assert last["proof"] == "not-exact: code changed" and last["resume_report"]["verdict"] == "not-exact"
    assert {"key": "code_digest", "recorded": old, "current": digest(project)} in last["resume_report"]["differences"]
    assert 0 < last["base"]["step"] <= 7 and {c["status"] for c in last["resume_report"]["components"]} == {"exact"}
    told = cli("events", job).text
    assert f"not-exact: code changed ({old[:12]}… -> {digest(project)[:12]}…)" in told
    shown = cli("attempts", job)
    assert "not-exact: code changed" in shown.text
    assert f"code_digest was '{old[:12]}…', is '{digest(project)[:12]}…'" in shown.errors


def test_fork_of_job_without_checkpoint_is_refused_with_working_advice(server: Server, tmp_path: Path) -> None:
    cli, project = Cli(server.home, tmp_path), tmp_path / "code"
    job, _ = failed(cli, "train.py", SCRIPT.format(fault="assert False"))
    (project / "train.py").write_text(SCRIPT.format(fault="pass"))
    refused = cli("fork", job, "--set", f"code.path={project}", expect=3).errors
    assert "checkpoints ls" not in refused
    followed(cli, refused, r"`(ratchet resume .*?)`", DIR=str(project))
    cli("wait", job)
    assert cli("attempts", job, "--json").data[-1]["resume_report"]["verdict"] == "fresh"
    (project / ".gitignore").write_text("runs/\n")
    (project / "runs").mkdir()
    forked = cli("fork", job, "--set", f"code.path={project}")
    assert forked.text.startswith("job-") and "excludes files named in .gitignore" in forked.errors
