"""The commit of a job's code, from the user's repository to the manifest, with what was not committed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.cli import Cli
from tests.support.fork_server import LIBRARIES
from tests.support.server import Server

AGENTS = LIBRARIES
SCRIPT = """import torch
from ratchet_worker.session import Session

session = Session()
model = session.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(optimizer=optimizer)
for step in session.steps(8):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {fault}
"""


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def recorded(server: Server, job: str) -> list[dict[str, Any]]:
    """What the manifests of the committed checkpoints say of git, oldest first."""
    out = []
    for row in reversed(server.call("GET", f"/v1/jobs/{job}/checkpoints").json()["items"]):
        environment = server.call("GET", f"/v1/jobs/{job}/checkpoints/{row['id']}").json()["manifest"]["environment"]
        git_keys = {key for key in environment if key.startswith("provenance:git_")}
        out.append({key.removeprefix("provenance:git_"): environment[key] for key in git_keys})
    return out


def test_git_commit_is_recorded_at_submit_and_at_resume_with_code(server: Server, tmp_path: Path) -> None:
    cli, project = Cli(server.home, tmp_path), tmp_path / "repository" / "code"
    project.mkdir(parents=True)
    git(project, "init", "-q")
    (project / "train.py").write_text("# to come\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "one")
    first = git(project, "rev-parse", "HEAD")
    (project / "train.py").write_text(SCRIPT.format(fault="assert step < 5"))
    spec = {"name": "versioned", "script": ["train.py"], "code": {"path": str(project)}, "world": {"device": "cpu"},
            "resources": {"cpus_per_rank": 1}, "checkpoint": {"every_steps": 4}, "policy": {"max_failures": 0}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    job = cli("submit", "job.yaml", "--wait", expect=1).text.strip()
    blob = git(project, "hash-object", "train.py")
    diff = hashlib.sha256(f"train.py\x00100644\x00{blob}\n".encode()).hexdigest()
    assert f"{first} + uncommitted changes in 1 file (sha256:{diff[:16]})" in cli("get", job).text
    dirty = {"commit": first, "changed": 1, "diff": diff}
    shown = cli("get", job, "--json").data
    assert shown["spec"]["code"]["git"] == shown["environment"]["git"] == {**dirty, "reason": None}
    before = recorded(server, job)
    assert before and all(one == dirty for one in before)

    (project / "train.py").write_text(SCRIPT.format(fault="pass"))
    git(project, "commit", "-qam", "two")
    second = git(project, "rev-parse", "HEAD")
    cli("resume", job, "--code", str(project), "--upload")
    cli("wait", job)
    (line,) = [line for line in cli("get", job).text.splitlines() if line.startswith("git ")]
    assert line.split() == ["git", second]
    attempts = [server.call("GET", f"/v1/jobs/{job}/attempts/{number}").json() for number in (1, 2)]
    assert [a["environment"]["git"]["commit"] for a in attempts] == [first, second]
    assert recorded(server, job)[-1] == {"commit": second, "changed": 0}
    differences = [fact["key"] for fact in attempts[1]["resume_report"]["differences"]]
    assert differences == ["code_digest", "spec:code.digest"]  # of the files, and that they were sent
