"""From a laptop: ``ratchet submit`` to a service that does not see the directory of the code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet_client.resources import code_upload
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.code import tree
from ratchet_contract.errors import SpecError
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.launchers.registry import load
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from tests.support.api import Server
from tests.support.cli import EXECUTABLE, Cli
from tests.support.server import Server as RealServer
from tests.support.small_disk import on_small_disk
from tests.support.user_projects import make_project

SPEC = """
name: mine
task: {entrypoint: "mine:Mine", args: {steps: 6}}
world: {ranks_per_node: 1, device: cpu}
resources: {cpus_per_rank: 1}
code: {path: project}
"""


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """A directory with a spec and the project that it names."""
    root = tmp_path / "laptop"
    make_project(root / "project")
    (root / "spec.yaml").write_text(SPEC)
    return root


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service that checks specs as in earnest, and runs nothing."""
    settings = Settings(home=tmp_path_factory.mktemp("upload") / "home")
    ports = LocalSubmission(settings.paths, Machine((), 4), load(settings.paths, None))
    with Server(create_app(settings, ports)) as url:
        yield url


def puts(url: str) -> int:
    """How often code was sent and taken."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    counted = [line for line in lines if line.startswith("ratchet_http_requests_total") and 'method="PUT"' in line]
    return int(sum(float(line.split()[-1]) for line in counted if 'status="20' in line))


def test_submit_with_upload_runs_code_visible_only_to_the_client(
    server: RealServer, laptop: Path, tmp_path: Path
) -> None:
    """The directory lies in a mount namespace of the client's own."""
    digest = tree.tree_digest(tree.list_entries(laptop / "project"))
    disk = tmp_path / "disk"
    disk.mkdir()
    env = {**os.environ, "RATCHET_HOME": str(server.home), "RATCHET_CONFIG": str(tmp_path / "none.json")}
    submit = f"cp -r {laptop}/. {disk} && {EXECUTABLE} submit {disk}/spec.yaml"
    refused = on_small_disk(disk, "4m", submit, timeout=120, env=env)
    assert refused.returncode == 5 and "is not a directory on the service's machine" in refused.stderr
    assert (
        "next: if it is a directory of this machine and the service is on another one: `--upload` sends it"
        in refused.stderr
    )
    done = on_small_disk(disk, "4m", f"{submit} --upload", timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert not any(disk.iterdir())
    job = server.wait_phase(done.stdout.strip(), "SUCCEEDED")
    assert job["resolved"]["code_digest"] == job["spec"]["code"]["digest"] == digest
    assert job["spec"]["code"]["path"] == str(disk / "project")


def test_submit_uploads_an_unchanged_code_directory_only_once(
    service: str, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, before = laptop / "spec.yaml", puts(service)
    monkeypatch.setattr(code_upload, "is_loopback", lambda _url: False)  # as if it were another machine's
    with RatchetClient(service) as client:
        first = client.submit(spec).view
        digest = first.resolved.code_digest
        assert first.spec["code"] == {
            "path": str(laptop / "project"),
            "source": "snapshot",
            "digest": digest,
            "include": [],
            "git": None,
        }
        plan = client.plan(spec)
        assert plan.resolved.code_digest == digest and str(digest) in str(plan.launch)
        assert puts(service) == before + 1
        (laptop / "project" / "more.py").write_text("more = 1\n")
        other = client.submit(spec).view
        assert other.resolved.code_digest not in (None, digest)
        assert puts(service) == before + 2
        unsent = [client.submit(spec, upload=False).view]
    monkeypatch.undo()
    with RatchetClient(service) as client:  # of this machine
        unsent.append(client.submit(spec).view)
        assert [job.spec["code"]["digest"] for job in unsent] == [None, None]
        assert {job.resolved.code_digest for job in unsent} == {other.resolved.code_digest}
    assert puts(service) == before + 2


def test_snapshot_by_client_and_by_service_applies_ignore_files_and_include(service: str, laptop: Path) -> None:
    """And a resume with other code takes what the job's spec includes."""
    project = laptop / "project"
    (project / ".gitignore").write_text("runs/\n*.pt\n")
    for name in ("runs/log.txt", "start.pt", "other.pt"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(name)
    text = (laptop / "spec.yaml").read_text()
    (laptop / "spec.yaml").write_text(text.replace("{path: project}", "{path: project, include: [start.pt]}"))
    told: list[str] = []
    with RatchetClient(service) as client:
        here = client.submit(laptop / "spec.yaml").view
        sent = client.submit(laptop / "spec.yaml", upload=True, note=told.append).view
        assert here.resolved.code_digest == sent.resolved.code_digest is not None
        (said,) = [w.detail for w in here.warnings if w.code == "code-left-out"]
        assert told == [said] and "other.pt, runs/" in said and "start.pt" not in said
        with pytest.warns(UserWarning, match="other.pt, runs/") as warned:  # where nobody asks for notes
            client.plan(laptop / "spec.yaml", upload=True)
        assert [w.filename for w in warned] == [__file__]
        client.cancel(here.id)
        (project / "more.py").write_text("more = 1\n")
        for upload_ in (False, True):
            changed = client.resume(here.id, code=project, upload=upload_, note=told.append)
            assert changed.spec["code"]["include"] == ["start.pt"]
            client.cancel(here.id)
        assert changed.resolved.code_digest not in (None, here.resolved.code_digest)
        (project / "start.pt").unlink()
        for upload_ in (False, True):
            with pytest.raises(SpecError) as caught:
                client.submit(laptop / "spec.yaml", upload=upload_, note=told.append)
            assert [(e.pointer, e.code) for e in caught.value.errors] == [("/code/include", "include-not-found")]
            changed = client.resume(here.id, code=project, include=["other.pt"], upload=upload_, note=told.append)
            assert changed.spec["code"]["include"] == ["other.pt"] and changed.phase == "QUEUED"
            client.cancel(here.id)
            assert (
                client.resume(here.id, code=project, include=[], upload=upload_, note=told.append).spec["code"][
                    "include"
                ]
                == []
            )
            client.cancel(here.id)


def test_resume_with_other_code_repeats_the_warnings_of_the_submission(service: str, laptop: Path) -> None:
    """Of what is left out and of large files; and nothing of keys that the spec has only since it was stored."""
    project = laptop / "project"
    (project / ".gitignore").write_text("runs/\n")
    (project / "runs").mkdir()
    (project / "runs" / "log.txt").write_text("x")
    (project / "plain.py").write_text("print(1)\n")
    with (project / "big.bin").open("wb") as file:
        file.truncate(40 << 20)
    spec = {"name": "plain", "script": ["plain.py"], "code": {"path": str(project)}, "world": {"device": "cpu"}}
    cli = Cli(laptop / "home", laptop)
    with RatchetClient(service) as client:
        first = client.submit(spec).view
        codes = {w.code for w in first.warnings} - {"file-system"}  # the tests' files may lie in memory
        assert codes == {"unmanaged-script", "code-left-out", "code-large-files"}
        for upload_ in ((), ("--upload",)):
            client.cancel(first.id)
            (project / "plain.py").write_text(f"print(2, {upload_!r})\n")
            said = cli("--server", service, "resume", first.id, "--code", "project", *upload_).errors
            assert said.count("excludes") == said.count("big.bin (40 MiB)") == 1 and "has no Session" in said
            resumed = client.view(first.id)
            assert resumed.resolved.code_digest != first.resolved.code_digest
            assert [w for w in first.warnings if not upload_ or w.pointer != "/code/path"] == resumed.warnings


def test_submit_with_code_digest_unknown_to_the_service_is_refused(service: str, laptop: Path) -> None:
    spec: dict[str, Any] = {
        "name": "mine", "task": {"entrypoint": "mine:Mine"}, "world": {"device": "cpu"},
        "code": {"path": "/on/the/laptop", "digest": "0" * 64},
    }  # fmt: skip
    with RatchetClient(service) as client:
        for call in (client.submit, client.plan):
            with pytest.raises(SpecError) as caught:
                call(spec)
            assert [(e.pointer, e.code) for e in caught.value.errors] == [("/code/digest", "code-not-uploaded")]
        with pytest.raises(SpecError) as caught:  # the client's own words
            client.submit({**spec, "code": {"path": str(laptop / "nowhere")}}, upload=True)
        assert [(e.pointer, e.code) for e in caught.value.errors] == [("/code/path", "unreadable")]


def test_upload_of_large_code_notes_its_size_and_directory(service: str, laptop: Path) -> None:
    (laptop / "project" / "big.py").write_bytes(b"#" * (17 * 2**20))
    told: list[str] = []
    with RatchetClient(service) as client:
        client.plan(laptop / "spec.yaml", upload=True, note=told.append)
    assert "17.0 MiB" in told[0] and str(laptop / "project") in told[0]
