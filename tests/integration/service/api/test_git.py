"""``code.git`` of a spec over HTTP: found by the service, or told by who sent the code, and by nobody else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.resources.client import RatchetClient
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired, JobPhase
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.launchers.attempt_files import write_launch
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.registry import load
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from tests.support.api import Api, Server, spec
from tests.support.suspended_jobs import resume, suspend_after_checkpoint
from tests.support.user_projects import make_project

FOUND = GitFacts(commit="a" * 40, changed=0)
TOLD = GitFacts(commit="b" * 40, changed=2, diff="c" * 64)
CODE: dict[str, Any] = {"path": "/home/me/project"}
SENT: dict[str, Any] = {"path": "/home/me/project", "digest": "ab" * 32, "git": TOLD.model_dump()}


@pytest.fixture
def found(api: Api, monkeypatch: pytest.MonkeyPatch) -> dict[str, GitFacts | None]:
    """What the service finds of a directory, by path."""
    facts: dict[str, GitFacts | None] = {"/home/me/project": FOUND, "/home/me/other": TOLD}
    monkeypatch.setattr(api.submission, "git_facts", lambda path, digest: facts.get(str(path)))
    return facts


def commit(job: dict[str, Any]) -> str | None:
    git = job["spec"]["code"]["git"]
    return None if git is None else git["commit"]


def test_git_facts_of_a_spec_count_only_for_uploaded_code(api: Api, found: dict[str, GitFacts | None]) -> None:
    claimed = CODE | {"git": TOLD.model_dump()}
    assert commit(api.job(api.submit(code=claimed))) == FOUND.commit
    assert commit(api.job(api.submit(code=claimed | {"path": "/in/no/repository"}))) is None
    sent = api.job(api.submit(code=SENT))
    assert sent["spec"]["code"]["git"] == TOLD.model_dump()
    assert (
        JobSpec.model_validate(sent["spec"]).digest()
        == JobSpec.model_validate(sent["spec"] | {"code": {**SENT, "git": None}}).digest()
    )
    for code, pointer in (
        ({"path": "/opt/mine", "source": "nodes", "git": TOLD.model_dump()}, "/code/git"),
        (SENT | {"git": TOLD.model_dump() | {"commit": "main"}}, "/code/git/commit"),
        (SENT | {"git": {"commit": TOLD.commit}}, "/code/git"),
        (SENT | {"git": {"commit": TOLD.commit, "changed": 2}}, "/code/git"),
        (SENT | {"git": {"changed": 0, "reason": "no idea"}}, "/code/git"),
        (SENT | {"git": {}}, "/code/git"),
    ):
        refused = api.client.post("/v1/jobs", json=sent["spec"] | {"code": code})
        assert refused.status_code == 422 and [e["pointer"] for e in refused.json()["errors"]] == [pointer]


def test_fork_records_the_git_commit_of_its_code(api: Api, found: dict[str, GitFacts | None]) -> None:
    job_id = api.submit(code=SENT)
    suspend_after_checkpoint(api, job_id, 5)

    def fork(**spec: Any) -> str | None:
        answer = api.client.post(f"/v1/jobs/{job_id}/fork", json={"spec": spec})
        assert answer.status_code == 201, answer.text
        return commit(answer.json())

    assert fork(seed=1) == TOLD.commit
    assert fork(code=CODE) == FOUND.commit
    assert fork(code={"path": "/in/no/repository"}) is None
    assert fork(code={"path": "/home/me/other", "digest": "cd" * 32}) is None  # whose sender does not know it


def test_resume_with_code_records_its_git_commit(api: Api, found: dict[str, GitFacts | None]) -> None:
    job_id = api.submit(code=CODE)
    suspend_after_checkpoint(api, job_id, 5)
    before = api.job(job_id)
    found["/home/me/project"] = later = GitFacts(commit="d" * 40, changed=0)  # the same files, committed since
    job = resume(api, job_id, {"code": CODE})
    assert commit(job) == later.commit and job["resolved"] == before["resolved"]
    assert job["spec"]["code"] | {"git": None} == before["spec"]["code"] | {"git": None}
    api.set_phase(job_id, JobPhase.SUSPENDED)
    assert commit(resume(api, job_id, {"code": {"path": "/home/me/other"}})) == TOLD.commit
    api.set_phase(job_id, JobPhase.SUSPENDED)
    assert commit(resume(api, job_id, {"code": {"path": "/in/no/repository"}})) is None
    api.set_phase(job_id, JobPhase.SUSPENDED)
    assert commit(resume(api, job_id, {"code": SENT})) == TOLD.commit


def test_launch_file_has_the_git_commit_of_the_code(tmp_path: Path) -> None:
    home = HomePaths(tmp_path)
    given = parse_spec(spec(code=CODE))
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")
    launch = build_launch_file(home, "job", 1, given, resolved, (), token="", desired=Desired.RUN)
    assert launch.spec.code is not None
    code = launch.spec.code.model_copy(update={"git": TOLD})
    paths = home.job("job").attempt(1)
    write_launch(paths, launch.model_copy(update={"spec": given.model_copy(update={"code": code})}))
    written = LaunchFile.model_validate_json(paths.launch_file.read_text())
    assert written.spec.code is not None and written.spec.code.git == TOLD
    assert written.spec.digest() == given.digest()


def test_client_upload_sends_the_git_commit_with_the_code(tmp_path: Path) -> None:
    project = tmp_path / "project"
    make_project(project)
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(project), *command], check=True)
    settings = Settings(home=tmp_path / "home")
    ports = LocalSubmission(settings.paths, Machine((), 4), load(settings.paths, None))
    mine = {
        "name": "mine",
        "task": {"entrypoint": "mine:Mine"},
        "world": {"device": "cpu"},
        "code": {"path": str(project)},
    }
    with Server(create_app(settings, ports)) as url, RatchetClient(url) as client:
        sent, here = (client.submit(mine, upload=upload_).view.spec["code"]["git"] for upload_ in (True, False))
        assert sent == here and sent["changed"] == 0 and len(sent["commit"]) == 40
