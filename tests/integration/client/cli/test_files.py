"""``ratchet files``, ``ratchet cp`` and what ``ratchet delete`` says and leaves, against a real service."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ratchet_client.resources.client import RatchetClient
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths, JobPaths
from tests.support.cli import Cli
from tests.support.server import Server


@pytest.fixture
def job(cli: Cli, idle_server: Server) -> JobPaths:
    """An ended job that wrote files; it never ran, so they are put where its ranks would have been."""
    submitted = cli("submit", "spec.yaml")
    job_id = submitted.text.strip()
    assert f"ratchet files {job_id}" in submitted.errors
    assert cli("files", job_id).errors.startswith("no files yet")
    paths = HomePaths(idle_server.home).job(job_id)
    (paths.work_dir / "runs" / "exp1").mkdir(parents=True)
    (paths.work_dir / "runs" / "exp1" / "best.pt").write_bytes(b"weights" * 1000)
    (paths.work_dir / "runs" / "log.txt").write_text("hello\n")
    (paths.work_dir / "latest").symlink_to("runs/exp1")
    (paths.work_dir / "bad\nname\x1b[31m").write_text("x")
    cli("cancel", job_id)
    return paths


def test_files_and_cp_list_and_fetch_outputs(cli: Cli, job: JobPaths, tmp_path: Path) -> None:
    name = job.root.name
    table = cli("files", name).text
    assert table.splitlines()[0].split() == ["SIZE", "AGE", "KIND", "PATH"] and len(table.splitlines()) == 7
    assert "6.8 KiB" in table and "runs/exp1/best.pt" in table and "symlink" in table
    assert "bad\\nname\\x1b[31m" in table and "\x1b" not in table
    found = cli("files", name, "runs", "--json").data
    assert [file["path"] for file in found] == ["runs/exp1", "runs/exp1/best.pt", "runs/log.txt"]
    assert "more than 2 names" in cli("files", name, "--limit", "2").errors
    assert "`ratchet files" in cli("files", name, "none", expect=3).errors

    copied = cli("cp", f"{name}:runs/exp1", "out")
    assert copied.text == "out/exp1/best.pt\n" and copied.errors == ""
    assert (tmp_path / "out" / "exp1" / "best.pt").read_bytes() == b"weights" * 1000
    again = cli("cp", f"{name}:runs/exp1", "out", expect=5).errors
    assert "out/exp1/best.pt" in again and "--force" in again
    assert cli("cp", f"{name}:runs/exp1", "out", "--force").text == "out/exp1/best.pt\n"
    assert cli("cp", f"{name}:runs/log.txt", ".").text == "log.txt\n"
    whole = cli("cp", f"{name}:", "all")
    assert "1 left out: symbolic links" in whole.errors and len(whole.text.splitlines()) == 3
    assert sorted(os.listdir(tmp_path / "all")) == ["bad\nname\x1b[31m", "runs"]  # noqa: PTH208
    for wrong, code in ((f"{name}:../x", 5), (f"{name}:latest/best.pt", 5), (f"{name}:none", 3), (name, 2), (":x", 2)):
        cli("cp", wrong, "never", expect=code)
    assert not (tmp_path / "never").exists()


def test_wait_names_the_outputs_of_an_ended_job(cli: Cli, job: JobPaths) -> None:
    name = job.root.name
    for command in (("wait", name), ("wait", name, "--follow")):
        said = cli(*command, expect=1).errors
        assert "outputs: bad\\nname\\x1b[31m, runs/exp1/best.pt, runs/log.txt (6.8 KiB); see" in said
        assert f"ratchet cp {name}: DIR" in said
    assert "outputs:" not in cli("wait", name, "--json", expect=1).errors
    (job.work_dir / "another").touch()
    assert "outputs: 4 files (6.8 KiB); see" in cli("wait", name, expect=1).errors


def test_delete_names_the_removed_parts_and_its_advice_works(cli: Cli, job: JobPaths, tmp_path: Path) -> None:
    name = job.root.name
    assert "--outputs" in cli("delete", "--help").text
    deleted = cli("delete", name)
    assert deleted.text == f"{name} is deleted, with its logs and its checkpoints\nits outputs stay in {job.work_dir}\n"
    fetch, remove = (part.partition(": ")[2].strip() for part in deleted.errors.split(";"))
    assert cli("get", name, expect=3)
    cli(*fetch.replace("DIR", "saved").split()[1:])
    assert (tmp_path / "saved" / "runs" / "log.txt").read_text() == "hello\n"
    assert cli(*remove.split()[1:]).text == f"{name} is deleted, with its logs, its checkpoints and its outputs\n"
    assert not job.root.exists()


def test_a_deletion_with_outputs_leaves_nothing(cli: Cli, job: JobPaths) -> None:
    assert json.loads(cli("delete", job.root.name, "--outputs", "--json").text)["outputs"] is None
    assert not job.root.exists()


def test_the_client_reads_parts_of_a_file(cli: Cli, job: JobPaths, idle_server: Server) -> None:
    name = job.root.name
    with RatchetClient(home=idle_server.home) as client:
        assert [file.path for file in client.files(name, "runs", recursive=False)] == ["runs/exp1", "runs/log.txt"]
        assert [file.path for file in client.files(name, page_size=1)] == [file.path for file in client.files(name)]
        assert client.read_file(name, "runs/log.txt") == b"hello\n"
        assert (
            client.read_file(name, "runs/log.txt", 1, 3) == b"el"
            and client.read_file(name, "runs/log.txt", 4) == b"o\n"
        )
        assert client.read_file(name, "runs/log.txt", 0, 0) == b""
        with pytest.raises(Refused) as beyond:
            client.read_file(name, "runs/log.txt", 100)
        assert beyond.value.code == "range-not-satisfiable"
        with pytest.raises(NotFound):
            client.read_file(name, "none")
