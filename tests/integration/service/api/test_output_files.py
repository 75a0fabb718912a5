"""What a job left in its working directory: listed, read in parts, fetched as a tar, and kept when the job is deleted."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet_contract.api.roles import Role, Scope
from ratchet_contract.errors import Refused
from ratchet_contract.phases import JobPhase
from ratchet_service.app import create_app
from ratchet_service.db.models import Job
from ratchet_service.isolation import file_access
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.job_files import delete_job, work_directory
from ratchet_service.reconciler.ttl import Expiry
from ratchet_service.usecases import output_files
from ratchet_service.user_code.snapshot import snapshot
from ratchet_worker.agent.working_directory import prepare
from tests.support.api import Api, FakeSubmission, Server
from tests.support.run_as import AS_ROOT, UID, open_home
from tests.support.server import wait_for
from tests.support.team import Team, problem_status_and_code, team, token_required_service

__all__ = ["team", "token_required_service"]


class Outputs:
    """A job whose working directory began as a copy of a snapshot, as an agent makes it; its code wrote ``runs/`` there."""

    def __init__(self, api: Api, tmp_path: Path) -> None:
        self.api, self.id = api, api.submit()
        self.paths = api.settings.paths.job(self.id)
        self.work = self.paths.work_dir
        project = tmp_path / "project"
        (project / "configs").mkdir(parents=True)
        (project / "train.py").write_text("print(1)\n")
        (project / "configs" / "a.yaml").write_text("lr: 1\n")
        (project / "configs" / "link").symlink_to("a.yaml")
        digest = snapshot(project, api.settings.paths.code)
        with api.database.write() as session:
            job = session.get_one(Job, self.id)
            job.resolved = {**job.resolved, "code_digest": digest}
        self.paths.root.mkdir(parents=True)
        prepare(api.settings.paths.code / digest, self.work)
        (self.work / "runs" / "exp1").mkdir(parents=True)
        (self.work / "runs" / "exp1" / "best.pt").write_bytes(bytes(range(256)) * 8)
        (self.work / "runs" / "log.txt").write_text("hello\n")

    def get(self, tail: str = "", **params: Any) -> httpx.Response:
        return self.api.client.get(f"/v1/jobs/{self.id}/files{tail}", params=params)

    def names(self, **params: Any) -> list[str]:
        answer = self.get(**params)
        assert answer.status_code == 200, answer.text
        return [item["path"] for item in answer.json()["items"]]

    def members(self, **params: Any) -> dict[str, tarfile.TarInfo]:
        return {m.name: m for m in self.tar(**params)}

    def tar(self, **params: Any) -> tarfile.TarFile:
        answer = self.get("/archive", **params)
        assert answer.status_code == 200, answer.text
        return tarfile.open(fileobj=io.BytesIO(answer.content), errors="surrogateescape", encoding="utf-8")

    def refusal(self, tail: str = "", **params: Any) -> tuple[int, str]:
        return problem_status_and_code(self.get(tail, **params))


@pytest.fixture
def outputs(api: Api, tmp_path: Path) -> Outputs:
    return Outputs(api, tmp_path)


def test_output_files_exclude_unchanged_files_of_the_code(outputs: Outputs) -> None:
    own = ["runs", "runs/exp1", "runs/exp1/best.pt", "runs/log.txt"]
    assert outputs.names() == own
    assert outputs.get().headers["x-content-type-options"] == "nosniff"
    everything = {item["path"]: item for item in outputs.get(all=True).json()["items"]}
    assert set(everything) - set(own) == {"train.py", "configs", "configs/a.yaml", "configs/link"}
    assert [path for path, item in everything.items() if not item["from_code"]] == own
    assert everything["runs/exp1/best.pt"] | {"modified_at": None} == {
        "path": "runs/exp1/best.pt", "kind": "file", "size": 2048, "modified_at": None, "from_code": False, "refused": None,
    }  # fmt: skip
    (outputs.work / "train.py").write_text("print(2)\n")  # as many bytes
    (outputs.work / "configs" / "a.yaml").chmod(0o755)
    (outputs.work / "configs" / "link").unlink()
    (outputs.work / "configs" / "link").symlink_to("../train.py")
    assert outputs.names() == ["configs/a.yaml", "configs/link", *own, "train.py"]
    assert outputs.names(path="runs", recursive=False) == ["runs/exp1", "runs/log.txt"]
    assert outputs.names(path="runs/log.txt") == ["runs/log.txt"]
    assert outputs.names(path="configs/") == ["configs/a.yaml", "configs/link"]


def test_output_files_beyond_the_comparison_limit_count_as_outputs(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files.Limits, "compared_bytes", 8)
    found = output_files.Files(
        outputs.api.database, outputs.api.settings.paths, ConcurrencyLimit(1, ""), output_files.Limits(compared_bytes=8)
    )
    page = found.page(outputs.id, "", recursive=True, include_unchanged=False, limit=100, cursor=None)
    assert [item.path for item in page.items][:2] == ["runs", "runs/exp1"] and page.items[-1].path == "train.py"


def test_output_files_of_a_job_that_never_ran_are_empty(api: Api) -> None:
    job_id = api.submit()
    assert api.client.get(f"/v1/jobs/{job_id}/files").json() == {"items": [], "next_cursor": None}
    for tail in ("/content", "/archive"):
        answer = api.client.get(f"/v1/jobs/{job_id}/files{tail}", params={"path": "a"})
        assert problem_status_and_code(answer) == (404, "file-not-found")
    assert problem_status_and_code(api.client.get("/v1/jobs/job-000000000000/files")) == (404, "job-not-found")


def test_output_file_paging_continues_after_the_last_name_despite_changes(outputs: Outputs) -> None:
    for name in ("b", "b.txt", "c", "d"):
        (outputs.work / name).mkdir() if len(name) == 1 else (outputs.work / name).touch()
        if len(name) == 1:
            (outputs.work / name / "x").touch()
    whole = outputs.names()
    assert whole == [
        "b",
        "b/x",
        "b.txt",
        "c",
        "c/x",
        "d",
        "d/x",
        "runs",
        "runs/exp1",
        "runs/exp1/best.pt",
        "runs/log.txt",
    ]
    got: list[str] = []
    cursor = None
    while True:
        page = outputs.get(limit=2, **({} if cursor is None else {"cursor": cursor})).json()
        got += [item["path"] for item in page["items"]]
        if got == ["b", "b/x", "b.txt", "c"]:
            (outputs.work / "a").touch()  # before what was read
            (outputs.work / "c" / "x").unlink()
            (outputs.work / "c").rmdir()  # where the next page begins
        if (cursor := page["next_cursor"]) is None:
            break
    assert got == [name for name in whole if name != "c/x"]
    first = outputs.get(limit=2).json()["next_cursor"]
    assert outputs.refusal(limit=2, cursor=first, path="runs") == (400, "bad-cursor")
    assert outputs.refusal(limit=2, cursor=first[:-3]) == (400, "bad-cursor")


def test_output_file_content_supports_range_requests_as_attachment(outputs: Outputs) -> None:
    def read(**headers: str) -> httpx.Response:
        return outputs.api.client.get(
            f"/v1/jobs/{outputs.id}/files/content", params={"path": "runs/exp1/best.pt"}, headers=headers
        )

    data = (outputs.work / "runs" / "exp1" / "best.pt").read_bytes()
    whole = read()
    assert (whole.status_code, whole.content, whole.headers["content-length"]) == (200, data, "2048")
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["x-content-type-options"] == "nosniff" and whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["content-disposition"] == "attachment; filename=\"best.pt\"; filename*=UTF-8''best.pt"
    for given, begin, end in (("0-9", 0, 10), ("2000-", 2000, 2048), ("-48", 2000, 2048), ("2040-9999", 2040, 2048)):
        part = read(Range=f"bytes={given}")
        assert (part.status_code, part.content) == (206, data[begin:end])
        assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/2048"
        assert part.headers["content-length"] == str(end - begin)
    for given in ("0-1,5-6", "9-3", "x"):  # several, backwards, none: as without
        assert read(Range=f"bytes={given}").content == data
    assert problem_status_and_code(read(Range="bytes=2048-")) == (416, "range-not-satisfiable")
    etag = whole.headers["etag"]
    assert read(Range="bytes=5-", **{"If-Range": etag}).status_code == 206
    (outputs.work / "runs" / "exp1" / "best.pt").write_bytes(data[::-1])
    changed = read(Range="bytes=5-", **{"If-Range": etag})
    assert (changed.status_code, changed.content) == (200, data[::-1])


def test_output_directory_is_fetched_as_a_tar_with_relative_names(outputs: Outputs) -> None:
    answer = outputs.get("/archive", path="runs/exp1")
    assert answer.headers["content-disposition"].startswith('attachment; filename="exp1.tar"')
    assert (answer.headers["ratchet-entries"], answer.headers["ratchet-size"]) == ("1", "2048")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert set(outputs.members(path="runs/exp1")) == {"exp1/best.pt"}
    assert set(outputs.members(path="runs/log.txt")) == {"log.txt"}
    assert set(outputs.members()) == {"runs", "runs/exp1", "runs/exp1/best.pt", "runs/log.txt"}
    (outputs.work / "train.py").chmod(0o755)
    whole = outputs.members(all=True)
    assert whole["train.py"].mode == 0o755 and whole["configs/a.yaml"].mode == 0o644 and whole["configs"].isdir()
    tar = outputs.tar(path="runs")
    file = tar.extractfile("runs/exp1/best.pt")
    assert file is not None and file.read() == (outputs.work / "runs" / "exp1" / "best.pt").read_bytes()
    assert tar.getmember("runs/log.txt").mtime == int((outputs.work / "runs" / "log.txt").stat().st_mtime)


def test_output_links_and_special_files_are_listed_but_never_followed(outputs: Outputs, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (outputs.work / "away").symlink_to(tmp_path / "secret")
    (outputs.work / "near").symlink_to("runs/log.txt")
    os.mkfifo(outputs.work / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(outputs.work / "socket"))
    (outputs.work / "runs" / "up").symlink_to("..")
    shown = {item["path"]: (item["kind"], item["refused"]) for item in outputs.get().json()["items"]}
    assert shown["away"] == shown["near"] == shown["runs/up"] == ("symlink", "symbolic-link")
    assert shown["pipe"] == shown["socket"] == ("special", "special-file")
    assert "away/key" not in shown and "runs/up/runs" not in shown
    for path in ("near", "away", "away/key", "runs/up/runs/log.txt"):
        for tail in ("/content", "/archive", ""):
            if (path, tail) not in (("near", ""), ("away", "")):  # that is a listing of the link itself
                assert outputs.refusal(tail, path=path) == (422, "symbolic-link"), (path, tail)
    assert outputs.refusal("/content", path="pipe") == (422, "special-file")
    assert outputs.refusal("/archive", path="socket") == (422, "special-file")
    assert outputs.refusal("/content", path="runs") == (422, "is-directory")
    assert outputs.refusal("/content", path="runs/log.txt/x") == (404, "file-not-found")
    answer = outputs.get("/archive")
    assert set(outputs.members()) == {"runs", "runs/exp1", "runs/exp1/best.pt", "runs/log.txt"}
    notes = json.loads(answer.headers["ratchet-notes"])
    assert notes == ["2 left out: FIFOs, sockets and devices", "3 left out: symbolic links"]
    (outputs.paths.root / "elsewhere").mkdir()
    outputs.work.rename(outputs.paths.root / "moved")
    outputs.work.symlink_to(tmp_path / "secret")  # the working directory itself
    assert outputs.refusal() == outputs.refusal("/archive") == (422, "symbolic-link")
    assert outputs.refusal("/content", path="key") == (422, "symbolic-link")


@pytest.mark.parametrize(
    ("tail", "path"),
    [("/content", "runs/exp1/best.pt"), ("/archive", "runs/exp1"), ("/archive", ""), ("", "runs/exp1"), ("", "")],
)
def test_output_directory_swapped_for_a_link_during_a_request_is_not_followed(
    outputs: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str, path: str
) -> None:
    """Before each single open of a request in turn."""
    secret, runs, aside = tmp_path / "secret", outputs.work / "runs", outputs.paths.root / "aside"
    (secret / "exp1").mkdir(parents=True)
    (secret / "exp1" / "best.pt").write_text("TOP SECRET")
    (secret / "exp1" / "top-secret").write_text("TOP SECRET")
    really, opens = os.open, 0

    def swapping(name: Any, flags: int, *rest: Any, **where: Any) -> int:
        nonlocal opens
        opens += 1
        if opens == turn:
            runs.rename(aside)
            runs.symlink_to(secret)
        return really(name, flags, *rest, **where)

    monkeypatch.setattr(work_directory.os, "open", swapping)
    statuses = set()
    for turn in range(1, 100):
        opens = 0
        answer = outputs.get(tail, path=path)
        statuses.add(answer.status_code)
        assert b"TOP SECRET" not in answer.content and b"top-secret" not in answer.content, turn
        if not aside.exists():
            break
        runs.unlink()
        aside.rename(runs)
    assert turn > 3 and 200 in statuses


@pytest.mark.parametrize("path", ["../attempts", "/etc/passwd", "runs/../../x", "./runs", "runs//log.txt", ".."])
def test_output_paths_outside_the_working_directory_are_refused(outputs: Outputs, path: str) -> None:
    for tail in ("", "/content", "/archive"):
        assert outputs.refusal(tail, path=path) == (422, "unsafe-path"), tail


def test_output_files_with_unusual_names_are_served_or_listed_as_refused(outputs: Outputs) -> None:
    strange = ['a "quoted"\n; name.txt', "umläut ☃.bin", "back\\slash", "per%cent", " ", "-rf"]
    for name in strange:
        (outputs.work / name).write_text(name)
    raw = os.fsencode(outputs.work) + b"/latin-\xe9"
    Path(os.fsdecode(raw)).write_text("bytes")
    shown = {item["path"]: item["refused"] for item in outputs.get().json()["items"]}
    assert {name: shown[name] for name in strange} == dict.fromkeys(strange)
    assert shown["latin-\\udce9"] == "name-not-utf8"
    for name in strange:
        answer = outputs.get("/content", path=name)
        assert answer.text == name
        header = answer.headers["content-disposition"]
        assert header.isascii() and header.isprintable() and header.startswith("attachment; filename=")
        assert httpx.URL(f"http://x/{header.partition(chr(39) * 2)[2]}").path == f"/{name}"
    tar = outputs.tar()
    assert set(strange) < set(tar.getnames())
    file = tar.extractfile("latin-\udce9")
    assert file is not None and file.read() == b"bytes"


def test_output_listing_bounds_depth_and_number_of_files(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    deepest = Path("deep", *["d"] * 70)
    (outputs.work / deepest).mkdir(parents=True)
    levels = outputs.get(path="deep").json()["items"]
    assert levels[-1]["refused"] == "too-deep" and levels[-1]["path"].count("/") == 63
    assert outputs.refusal(path=str(deepest)) == (422, "too-deep")
    assert "1 left out: directories nested too deeply" in outputs.get("/archive").headers["ratchet-notes"]
    monkeypatch.setattr("ratchet_service.job_files.work_directory.MAX_NAMES", 10)
    (outputs.work / "crowd").mkdir()
    for i in range(11):
        (outputs.work / "crowd" / str(i)).touch()
    assert outputs.refusal(path="crowd") == outputs.refusal("/archive") == (413, "too-many-files")
    assert len(outputs.names(path="runs")) == 3


@pytest.mark.parametrize(
    ("limits", "code"),
    [(output_files.Limits(entries=3), "too-many-files"), (output_files.Limits(total_bytes=2050), "archive-too-large")],
)
def test_output_archive_above_entry_or_size_limit_is_refused(
    outputs: Outputs, limits: output_files.Limits, code: str
) -> None:
    found = output_files.Files(outputs.api.database, outputs.api.settings.paths, ConcurrencyLimit(1, ""), limits)
    with pytest.raises(Exception, match="one by one") as error:
        found.archive(outputs.id, "", include_unchanged=False)
    assert getattr(error.value, "code", None) == code
    found.archive(outputs.id, "runs/exp1", include_unchanged=False).resources.close()  # and nothing is held


def test_output_file_removed_or_truncated_while_sent_is_detected(outputs: Outputs) -> None:
    found = output_files.Files(outputs.api.database, outputs.api.settings.paths, ConcurrencyLimit(1, ""))
    (outputs.work / "runs" / "exp1" / "best.pt").unlink()
    archive = found.archive(outputs.id, "", include_unchanged=False)
    (outputs.work / "runs" / "log.txt").unlink()
    with archive.resources, tarfile.open(fileobj=io.BytesIO(b"".join(archive.parts))) as tar:
        names = tar.getnames()
    assert len(names) == 2 and archive.entries == 3  # who receives it can count
    big = outputs.work / "big"
    big.write_bytes(b"x" * (3 << 20))
    content = found.content(outputs.id, "big")
    with content.resources:
        parts = content.read_range(0, content.size)
        next(parts)
        os.truncate(big, 1 << 20)
        with pytest.raises(OSError, match="truncated"):
            list(parts)
    with big.open("wb") as out:
        out.write(b"y" * 10)
        out.flush()
        content = found.content(outputs.id, "big")
        out.write(b"z" * 10)
    with content.resources:
        assert b"".join(content.read_range(0, content.size)) == b"y" * 10


@pytest.fixture
def narrow(api: Api) -> Iterator[str]:
    """The same service with room for one transfer at a time."""
    with Server(create_app(replace(api.settings, max_file_transfers=1), FakeSubmission(), api.database)) as url:
        yield url


def test_concurrent_output_transfers_are_limited_and_slots_released(outputs: Outputs, narrow: str) -> None:
    with (outputs.work / "big").open("wb") as out:
        out.truncate(256 << 20)  # more than the sockets hold
    place = f"{narrow}/v1/jobs/{outputs.id}/files"
    with httpx.Client(timeout=30, verify=False) as client:

        def answer(path: str, **headers: str) -> httpx.Response:
            """The service may end a transfer a moment after its client has all of it."""

            def asked() -> httpx.Response | None:
                got = client.get(f"{place}/content", params={"path": path}, headers=headers)
                return None if got.status_code == 503 else got

            return wait_for(asked, "its turn", 30)

        with client.stream("GET", f"{place}/content", params={"path": "big"}) as slow:
            assert slow.status_code == 200
            busy = client.get(f"{place}/archive", params={"path": "runs"})
            assert problem_status_and_code(busy) == (503, "busy") and busy.headers["retry-after"] == "1"
            assert client.get(place).status_code == 200
        for _ in range(3):  # after a client that left, refusals and whole answers
            assert answer("none").status_code == 404
            assert answer("runs/log.txt", Range="bytes=99-").status_code == 416
            assert answer("runs/log.txt").text == "hello\n"
        assert problem_status_and_code(client.get(f"{place}/archive", params={"path": "none"}))[0] in (404, 503)
        assert answer("runs/log.txt").text == "hello\n"


@AS_ROOT
def test_output_files_unreadable_by_the_service_are_listed_as_refused(api: Api) -> None:
    """The job's directory belongs to another user, as with --run-as, and two things in it to root; a third can be listed, but not
    searched."""
    with open_home() as homes:
        paths = homes.job("job-0123456789ab")
        (paths.work_dir / "runs").mkdir(parents=True)
        (paths.work_dir / "runs" / "log.txt").write_text("hello")
        (paths.work_dir / "names-only").mkdir()
        (paths.work_dir / "names-only" / "a.txt").touch()
        (paths.work_dir / "names-only").chmod(0o444)
        paths.kept_marker.write_text('{"owner": "local"}')
        file_access.give_to_user(paths.root, UID, UID)
        (paths.work_dir / "locked").write_text("x")
        (paths.work_dir / "locked").chmod(0o600)
        (paths.work_dir / "closed").mkdir(mode=0o700)
        found = output_files.Files(api.database, homes, ConcurrencyLimit(1, ""))
        page = found.page(paths.root.name, "", recursive=True, include_unchanged=False, limit=9, cursor=None)
        assert {item.path: item.refused for item in page.items} == {
            "closed": "file-unreadable", "locked": "file-unreadable", "names-only": "file-unreadable",
            "runs": None, "runs/log.txt": None,
        }  # fmt: skip
        with pytest.raises(Refused, match="the service may not read") as error:
            found.content(paths.root.name, "locked")
        assert error.value.code == "file-unreadable"
        archive = found.archive(paths.root.name, "", include_unchanged=False)
        with archive.resources:
            assert archive.notes == ["3 left out: files and directories without read permission for the service"]
            assert b"hello" in b"".join(archive.parts)
        paths.work_dir.chmod(0)  # as users' code may
        with pytest.raises(Refused, match="the service may not read"):
            found.page(paths.root.name, "", recursive=True, include_unchanged=False, limit=9, cursor=None)


def ended(outputs: Outputs, **columns: Any) -> None:
    (outputs.paths.root / "attempts" / "0001").mkdir(parents=True)
    (outputs.paths.checkpoints / "step-000000000005.a0001").mkdir(parents=True)
    outputs.api.set_phase(outputs.id, JobPhase.SUCCEEDED, **columns)


def test_delete_keeps_outputs_and_a_second_delete_removes_them_on_request(outputs: Outputs) -> None:
    client, place = outputs.api.client, f"/v1/jobs/{outputs.id}"
    ended(outputs)
    assert outputs.api.client.delete(place).json() == {
        "id": outputs.id, "checkpoints": None, "outputs": str(outputs.work), "remote": None,
    }  # fmt: skip
    left = sorted(p.relative_to(outputs.paths.root).as_posix() for p in outputs.paths.root.rglob("*"))
    assert left == ["KEPT", "work", "work/runs", "work/runs/exp1", "work/runs/exp1/best.pt", "work/runs/log.txt"]
    assert client.get(place).status_code == 404 and client.delete(place).status_code == 404
    assert outputs.names() == ["runs", "runs/exp1", "runs/exp1/best.pt", "runs/log.txt"]  # they can be fetched still
    assert outputs.get("/content", path="runs/log.txt").text == "hello\n"
    assert client.delete(place, params={"outputs": "true"}).json() == {
        "id": outputs.id, "checkpoints": None, "outputs": None, "remote": None,
    }  # fmt: skip
    assert not outputs.paths.root.exists()
    assert outputs.refusal() == (404, "job-not-found")
    assert client.delete(place, params={"outputs": "true"}).status_code == 404


def test_delete_with_outputs_or_without_any_removes_the_job_directory(outputs: Outputs, tmp_path: Path) -> None:
    ended(outputs)
    answer = outputs.api.client.delete(f"/v1/jobs/{outputs.id}", params={"outputs": "true"})
    assert answer.json()["outputs"] is None and not outputs.paths.root.exists()
    (tmp_path / "other").mkdir()
    plain = Outputs(outputs.api, tmp_path / "other")
    (plain.work / "runs" / "exp1" / "best.pt").unlink()
    (plain.work / "runs" / "exp1").rmdir()
    (plain.work / "runs" / "log.txt").unlink()
    (plain.work / "runs").rmdir()
    ended(plain)
    assert plain.api.client.delete(f"/v1/jobs/{plain.id}").json()["outputs"] is None
    assert not plain.paths.root.exists()


def test_delete_keeps_changed_code_files_as_outputs(outputs: Outputs) -> None:
    (outputs.work / "train.py").write_text("print(2)\n")
    ended(outputs)
    outputs.api.client.delete(f"/v1/jobs/{outputs.id}", params={"keep_checkpoints": "true"})
    assert (outputs.work / "train.py").read_text() == "print(2)\n" and not (outputs.work / "configs").exists()
    assert sorted(p.name for p in outputs.paths.root.iterdir()) == ["KEPT", "checkpoints", "work"]
    answer = outputs.api.client.delete(f"/v1/jobs/{outputs.id}", params={"outputs": "true"}).json()
    assert answer["checkpoints"] == str(outputs.paths.checkpoints)
    assert [p.name for p in outputs.paths.root.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(("asked", "stays"), [(False, True), (True, False)])
def test_ttl_expiry_removes_outputs_only_with_ttl_outputs(outputs: Outputs, asked: bool, stays: bool) -> None:
    job = outputs.api.job(outputs.id)
    ended(outputs, ttl=0.0, spec={**job["spec"], "ttl_outputs": asked})
    Expiry(outputs.api.database, outputs.api.settings.paths).run()
    assert outputs.api.client.get(f"/v1/jobs/{outputs.id}").status_code == 404
    assert (outputs.work / "runs" / "log.txt").exists() == outputs.paths.root.exists() == stays


def test_sweep_deleted_after_a_crash_keeps_the_outputs(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(outputs)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    homes = outputs.api.settings.paths
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(delete_job, "remove_tree", crash)  # after the rows have gone, in the middle of the files
        delete_job.delete(outputs.api.database, outputs.id, homes=homes)
    assert delete_job.sweep_deleted(outputs.api.database, homes) == [outputs.id]
    assert sorted(p.name for p in outputs.paths.root.iterdir()) == ["KEPT", "work"]
    assert (outputs.work / "runs" / "log.txt").exists()


def test_output_files_are_readable_by_job_readers_and_removable_by_the_owner(team: Team, tmp_path: Path) -> None:
    outputs = Outputs(team.api(team.ann), tmp_path)
    place = f"/v1/jobs/{outputs.id}"
    for client in (team.ann, team.bob, team.eve, team.root):
        assert client.get(f"{place}/logs").status_code == client.get(f"{place}/files").status_code == 200
        assert client.get(f"{place}/files/content", params={"path": "runs/log.txt"}).text == "hello\n"
    assert problem_status_and_code(team.nobody.get(f"{place}/files/content", params={"path": "runs/log.txt"}))[0] == 401
    scraper = team.member("prometheus", Role.VIEWER, Scope.METRICS_READ)
    assert problem_status_and_code(scraper.get(f"{place}/files")) == (403, "not-allowed")
    ended(outputs)
    everything = {"outputs": "true"}
    assert problem_status_and_code(team.bob.delete(place, params=everything)) == (403, "not-allowed")
    assert team.ann.delete(place).json()["outputs"] == str(outputs.work)
    assert problem_status_and_code(team.bob.delete(place, params=everything)) == (403, "not-allowed")
    assert problem_status_and_code(team.eve.delete(place, params=everything)) == (403, "not-allowed")
    assert team.eve.get(f"{place}/files").status_code == 200
    with ThreadPoolExecutor(2) as pool:
        codes = sorted(pool.map(lambda _: team.ann.delete(place, params=everything).status_code, range(2)))
    assert codes[0] == 200 and codes[1] in (200, 404) and not outputs.paths.root.exists()
