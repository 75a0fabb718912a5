"""Code over HTTP from clients whose directories the service does not see: whole and under its digest, or not at all."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet_contract.code import tree
from ratchet_contract.code.archive import write_archive
from ratchet_contract.code.tree import Limits
from ratchet_service.api.code_upload import Uploads
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database
from ratchet_service.user_code.snapshot import GRACE, remove_unreferenced
from tests.support.api import Api, FakeSubmission, Server
from tests.support.server import wait_for
from tests.support.small_disk import script_on_small_disk

TAR = {"Content-Type": "application/x-tar"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "model.py").write_text("width = 3\n" * 200_000)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "alias.py").symlink_to("pkg/model.py")
    return root


@pytest.fixture
def small(migrated_database: Database, tmp_path: Path) -> Iterator[tuple[httpx.Client, Path]]:
    """A service that takes three files, or a kilobyte; and where it keeps code."""
    settings = Settings(home=tmp_path / "home")
    app = create_app(settings, FakeSubmission(), migrated_database)
    app.state.service = replace(app.state.service, uploads=Uploads(settings.paths, Limits(1000, 3)))
    with Server(app) as url, httpx.Client(base_url=url, timeout=30, verify=False) as client:
        yield client, settings.paths.code


def packed(root: Path) -> tuple[str, bytes]:
    found = tree.list_entries(root)
    return tree.tree_digest(found), b"".join(write_archive(found))


def tar(*members: tuple[str, bytes, bytes]) -> bytes:
    """Of name, type and content; of a link, its target."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as made:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.SYMTYPE:
                info.linkname, data = data.decode(), b""
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def left(code: Path) -> list[str]:
    return sorted(path.name for path in code.iterdir() if path.name != ".lock") if code.is_dir() else []


def test_uploaded_code_tree_is_stored_once_and_kept_for_the_grace_period(api: Api, project: Path) -> None:
    code = api.settings.paths.code
    digest, sent = packed(project)
    place = f"/v1/code/{digest}"
    missing = api.client.get(place)
    assert (missing.status_code, missing.json()["code"]) == (404, "code-not-found")
    answers = []

    def send() -> None:
        answers.append(httpx.put(f"{api.client.base_url}{place}", content=sent, headers=TAR, timeout=60).status_code)

    both = [threading.Thread(target=send) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(answers) == [200, 201]
    assert tree.tree_digest(tree.list_entries(code / digest)) == digest
    assert (code / digest / "alias.py").read_text() == (project / "pkg" / "model.py").read_text()
    assert not os.access(code / digest / "run.sh", os.W_OK) or os.geteuid() == 0
    assert not [name for name in left(code) if name.startswith(".tmp-")]

    for ask in (lambda: api.client.get(place), lambda: api.client.put(place, content=sent, headers=TAR)):
        long_ago = time.time() - 2 * GRACE
        os.utime(code / digest, (long_ago, long_ago))
        answer = ask()
        assert (answer.status_code, answer.content) in ((204, b""), (200, b""))
        assert digest not in remove_unreferenced(code, set)
    os.utime(code / digest, (long_ago, long_ago))
    assert digest in remove_unreferenced(code, set)
    assert api.client.get(place).status_code == 404


BAD = [
    (tar(("../evil", tarfile.REGTYPE, b"x")), "has the name"),
    (tar(("/tmp/evil", tarfile.REGTYPE, b"x")), "has the name"),
    (tar(("link", tarfile.SYMTYPE, b"../../secret")), "points outside"),
    (tar(("link", tarfile.SYMTYPE, b"/etc/passwd")), "points outside"),
    (tar(("device", tarfile.CHRTYPE, b"")), "neither a file nor"),
    (tar(("hard", tarfile.LNKTYPE, b"")), "neither a file nor"),
    (tar(*((f"{i}.py", tarfile.REGTYPE, b"") for i in range(4))), "more than 3 files"),
    (tar(("big.py", tarfile.REGTYPE, b"x" * 1001)), "more than 3 files or"),
    (tar(("a/" * 600 + "x", tarfile.REGTYPE, b"")), "longer than"),
    (tar(("other.py", tarfile.REGTYPE, b"x")), "its digest is"),
    (tar(("x.pyc", tarfile.REGTYPE, b"x")), "do not count"),
    (tar(("cut.py", tarfile.REGTYPE, b"x" * 900))[:900], "not a valid archive"),
    (b"", "not a valid archive"),
    (b"PK\3\4" * 500, "not a valid archive"),
]


def test_upload_of_an_invalid_archive_is_refused_and_leaves_nothing(
    small: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    client, code = small
    place = f"/v1/code/{'0' * 64}"
    for sent, says in BAD:
        answer = client.put(place, content=sent, headers=TAR)
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (422, "code-archive-invalid"), problem
        assert says in problem["detail"] and left(code) == [], says
    assert not (tmp_path / "home" / "evil").exists() and not Path("/tmp/evil").exists()
    assert client.get(place).status_code == 404


def test_upload_of_a_too_large_body_or_other_media_type_is_refused(small: tuple[httpx.Client, Path]) -> None:
    client, code = small
    place = f"/v1/code/{'0' * 64}"

    def told(content: Any, path: str = place, **headers: str) -> tuple[int, str]:
        answer = client.put(path, content=content, headers={**TAR, **headers})
        return answer.status_code, answer.json()["code"]

    assert told(bytes(40_000)) == (413, "body-too-large")
    assert told(iter([bytes(10_000)] * 4)) == (413, "body-too-large")  # its length is not told before
    assert told(b"x", **{"Content-Type": "application/gzip"}) == (415, "unsupported-media-type")
    assert told(b"x", "/v1/code/..%2f..%2fetc")[0] in (404, 422)
    assert told(b"x", f"/v1/code/{'A' * 64}") == (422, "invalid-parameter")
    assert left(code) == []


def test_upload_aborted_by_the_client_leaves_nothing(api: Api, project: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = api.settings.paths.code
    digest, sent = packed(project)
    before = left(code)
    url = api.client.base_url
    head = f"PUT /v1/code/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-tar\r\n"
    head += f"Content-Length: {len(sent)}\r\n"

    def held() -> list[str]:
        """Files without a name that this process, the server's, has open where code is kept."""
        return [file for file in open_files() if file.startswith(str(code)) and "(deleted)" in file]

    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(head.encode() + b"\r\n" + sent[: len(sent) // 2])
        wait_for(held, "the service to receive")
    wait_for(lambda: not held(), "the service to give up")
    assert left(code) == before
    assert api.client.get(f"/v1/code/{digest}").status_code == 404
    assert not [record for record in caplog.records if "incident" in record.message]


def open_files() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(descriptor.readlink())


FULL = """
import os, sys
from pathlib import Path
import httpx
from ratchet_service.app import create_app
from ratchet_service.db.engine import Database
from ratchet_service.db.migrate import upgrade
from ratchet_service.config.settings import Settings
from tests.support.api import FakeSubmission, Server
from tests.integration.service.api.test_code_upload import TAR, left, packed

work, disk = map(Path, sys.argv[1:])
database = Database(f"sqlite:///{work}/full.db")
upgrade(database)
settings = Settings(home=disk)
with Server(create_app(settings, FakeSubmission(), database)) as url, httpx.Client(base_url=url, timeout=60) as client:
    for size in (3_000_000, 1_500_000, 500_000):  # no room for the archive; for the files beside it; for both
        (work / "mine" / "data.py").write_bytes(b"#" * size)
        digest, sent = packed(work / "mine")
        answer = client.put(f"/v1/code/{digest}", content=sent, headers=TAR)
        problem = answer.json() if answer.content else {}
        assert not problem or "is not stored" in problem["detail"], problem
        print(answer.status_code, problem.get("code"), len(left(settings.paths.code)))
database.dispose()
"""


def test_upload_on_a_full_disk_answers_507_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    said = script_on_small_disk(tmp_path, "2m", FULL, str(tmp_path), timeout=120)
    assert said == "507 disk-full 0\n507 disk-full 0\n201 None 1\n"
