"""``ratchet report`` against a real service: what it writes, and what it leaves alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.cli import SPEC, Cli
from tests.support.reports import recorded_text
from tests.support.server import Server

SECRET = "hunter2-of-the-object-store"
HOSTILE = "</script><script>alert(1)</script><!-- \u2028 \u00e9"


def recorded(file: Path) -> Any:
    return json.loads(recorded_text(file))


def test_report_is_written_whole_and_replaces_a_file_only_by_force(
    cli: Cli, idle_server: Server, tmp_path: Path
) -> None:
    job = cli("submit", "spec.yaml").text.strip()
    made = cli("report", "digits-one")
    file = tmp_path / "report-digits-one.html"
    assert made.text.startswith("report-digits-one.html  ") and " KiB\n" in made.text and made.errors == ""
    assert f"left out: the contents of the job's files: ratchet cp {job}: DIR\n" in made.text
    assert f"left out: the names of unchanged files of the job's code: ratchet files {job} --all\n" in made.text
    found = recorded(file)
    assert found["job"]["id"] == job and found["service"] == idle_server.url and found["left_out"]
    before = file.read_bytes()
    refused = cli("report", job, expect=5).errors
    assert "report-digits-one.html already exists" in refused and "--force" in refused and file.read_bytes() == before
    file.write_text("mine")
    cli("report", job, "--force")
    assert recorded(file)["job"]["id"] == job
    assert cli("report", job, "-o", "other.html").text.startswith("other.html  ")
    for code, wrong in ((3, ("no-such-job", "-o", "never.html")), (5, (job, "-o", "missing/never.html"))):
        assert "never.html was not written" in cli("report", *wrong, expect=code).errors or code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.html", "report-digits-one.html", "spec.yaml"]


def test_report_replaces_nothing_but_a_file(cli: Cli, tmp_path: Path) -> None:
    job = cli("submit", "spec.yaml").text.strip()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    before = {path.name: path.lstat().st_ino for path in tmp_path.iterdir()}
    for name in ("folder", "link", "pipe", "null"):
        assert f"{name} is not a file" in cli("report", job, "-o", name, "--force", expect=5).errors
    assert {path.name: path.lstat().st_ino for path in tmp_path.iterdir()} == before


def test_report_hides_secrets_and_what_a_job_wrote_is_inert(cli: Cli, tmp_path: Path) -> None:
    secret = f"env: {{KEY: {SECRET}, NOTE: {json.dumps(HOSTILE)}}}\nsecret_env: [KEY]\n"
    (tmp_path / "spec.yaml").write_text(SPEC + secret)
    job = cli("submit", "spec.yaml").text.strip()
    cli("report", job, "-o", "report.html")
    text = recorded_text(tmp_path / "report.html")
    assert text.isascii() and "<" not in text
    assert json.loads(text)["job"]["spec"]["env"] == {"KEY": "********", "NOTE": HOSTILE}
    assert SECRET not in (tmp_path / "report.html").read_text()
