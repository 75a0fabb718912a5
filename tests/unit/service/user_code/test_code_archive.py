"""What is made of an archive that was sent: the tree whose digest it came under, or nothing at all."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet_contract.code import tree
from ratchet_contract.code.archive import BadArchive, archive_size, largest_archive, unpack, write_archive
from ratchet_contract.code.tree import Limits
from ratchet_service.user_code.snapshot import snapshot, snapshot_file

Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "train.py").write_text("import pkg.model\n")
    (root / "pkg" / "model.py").write_text("width = 3\n" * 1000)
    (root / "pkg" / "deep" / ("long-" * 40 + "ünïcode.txt")).write_bytes(b"")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "alias.py").symlink_to("pkg/model.py")
    return root


def tar(*members: Member) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return io.BytesIO(out.getvalue())


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


def test_archive_unpacks_identical_tree_under_digest(project: Path, tmp_path: Path) -> None:
    digest = snapshot(project, tmp_path / "code")
    sent = b"".join(write_archive(tree.list_entries(tmp_path / "code" / digest)))
    assert sent == b"".join(write_archive(tree.list_entries(tmp_path / "code" / digest)))
    assert len(sent) == archive_size(tree.list_entries(project)) < largest_archive(Limits(len(sent), 5))
    place = tmp_path / "node" / "code" / digest
    unpack(io.BytesIO(sent), digest, place)

    def seen(root: Path) -> dict[str, tuple[int, bytes]]:
        paths = [root, *root.rglob("*")]
        return {
            str(p.relative_to(root)): (
                stat.S_IMODE(p.lstat().st_mode),
                os.fsencode(p.readlink()) if p.is_symlink() else p.read_bytes() if p.is_file() else b"",
            )
            for p in paths
        }

    assert seen(place) == seen(tmp_path / "code" / digest)
    unpack(io.BytesIO(sent), digest, place)  # two agents of one node
    assert [p.name for p in place.parent.iterdir()] == [digest]


def test_tree_digest_is_stable_across_versions_and_umask(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("import pkg.model\n")
    (root / "pkg" / "model.py").write_text("width = 3\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "alias.py").symlink_to("pkg/model.py")
    for plain, executable in ((0o644, 0o755), (0o660, 0o770), (0o400, 0o500)):
        for name in ("train.py", "pkg/model.py"):
            (root / name).chmod(plain)
        (root / "run.sh").chmod(executable)
        known = "7088699e6821d8254a7bb2b6ed98ba978c2fcca160e58ce174f703195929421d"
        assert tree.tree_digest(tree.list_entries(root)) == known
    assert snapshot(root, tmp_path / "code") == known
    assert tree.tree_digest(tree.list_entries(tmp_path / "code" / known)) == known
    one = "adf047892c42891bff6ccb1e3edddb2e9fef3c9c6037790ea01e6c87f96a769e"
    assert snapshot_file(root / "run.sh", tmp_path / "code") == one


def test_single_file_archive_has_no_size_or_name_restrictions(tmp_path: Path) -> None:
    (tmp_path / "weights.pyc").write_bytes(b"x" * 5000)
    digest = snapshot_file(tmp_path / "weights.pyc", tmp_path / "code")
    sent = b"".join(write_archive([tree.file_entry(tmp_path / "code" / digest / "weights.pyc")]))
    unpack(io.BytesIO(sent), digest, tmp_path / "node", one_file=True, limits=Limits(max_bytes=10))
    assert (tmp_path / "node" / "weights.pyc").read_bytes() == b"x" * 5000


OUTSIDE = "it has the name"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (lambda: tar(member("/etc/evil", b"x")), OUTSIDE),
        (lambda: tar(member("../evil", b"x")), OUTSIDE),
        (lambda: tar(member("a/../../evil", b"x")), OUTSIDE),
        (lambda: tar(member("link", kind=tarfile.SYMTYPE, link="../secret")), "points outside"),
        (lambda: tar(member("link", kind=tarfile.SYMTYPE, link="/etc/passwd")), "points outside"),
        (lambda: tar(member("hard", kind=tarfile.LNKTYPE, link="x")), "neither a file nor"),
        (lambda: tar(member("device", kind=tarfile.CHRTYPE)), "neither a file nor"),
        (lambda: tar(member("pipe", kind=tarfile.FIFOTYPE)), "neither a file nor"),
        (lambda: tar(member("big", b"x" * 2000)), "more than 3 files or"),
        (lambda: tar(*(member(str(i)) for i in range(4))), "more than 3 files or"),
        (lambda: tar(member("n/" * 600 + "x")), "longer than"),
        (lambda: tar(member("other.py", b"x")), "its digest is"),
        (lambda: io.BytesIO(b"<html>" * 200), "not a valid archive"),
        (lambda: tar(member("twice", b"x"), member("twice", b"y")), "names that the file system"),
        (lambda: tar(member("a", b"x"), member("a/b", b"y")), "names that the file system"),
        (lambda: tar(member("a" * 300, b"x")), "names that the file system"),
        (lambda: tar(member("link", kind=tarfile.SYMTYPE, link="l" * 4100)), "names that the file system"),
        (lambda: tar(member("mine.pyc", b"x")), "do not count as code"),
        (lambda: tar(member("venv/pyvenv.cfg"), member("venv/mine.py", b"x")), "do not count as code"),
        (lambda: tar(member("x", b"n" * 100_000, tarfile.GNUTYPE_LONGNAME)), "longer than"),
        (lambda: tar(*[member("x", b"n\0", tarfile.GNUTYPE_LONGNAME)] * 2000), "not a valid archive"),
        (lambda: tar(member("x", b"9 size=9\n", tarfile.XHDTYPE), member("y", b"x")), "neither a file nor"),
        (lambda: io.BytesIO(tar(member("cut", b"x" * 900)).getvalue()[:1000]), "not a valid archive"),
    ],
)
def test_refused_archive_leaves_no_files(sent: Callable[[], io.BytesIO], says: str, tmp_path: Path) -> None:
    place = tmp_path / "below" / "code"
    with pytest.raises(BadArchive, match=says):
        unpack(sent(), "0" * 64, place, limits=Limits(max_bytes=1000, max_files=3))
    assert [p.name for p in tmp_path.rglob("*")] == ["below"]


def test_directory_that_disappears_during_cleanup_does_not_hide_why_the_archive_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another program cleans up there; it acts at the worst moment, just before a directory's mode is changed."""
    chmod = Path.chmod

    def vanish(path: Path, mode: int) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", vanish)
    with pytest.raises(BadArchive, match="its digest is"):
        unpack(tar(member("pkg/other.py", b"x")), "0" * 64, tmp_path / "code")


def test_unpack_never_writes_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    place = tmp_path / "below" / "code"
    link = member("way", kind=tarfile.SYMTYPE, link=str(tmp_path))
    with pytest.raises((BadArchive, OSError)):
        unpack(tar(link, member("way/victim", b"theirs")), "0" * 64, place)
    assert (tmp_path / "victim").read_text() == "mine" and not place.exists()
