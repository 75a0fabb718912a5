"""Which directory keeps the user of ``--run-as`` from the interpreter: the one that is closed, through every link."""

from __future__ import annotations

from pathlib import Path

from ratchet_service.confined import User
from ratchet_service.worker_user import closed_to

NOBODY = User(54321, 54321, (54321,), "/", "nobody-here")


def test_the_closed_directory_is_found_behind_a_link(tmp_path: Path) -> None:
    for folder in (*reversed(tmp_path.parents), tmp_path):
        if folder.owner() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)  # pytest's own directories are closed
    real = tmp_path / "private" / "bin" / "python"
    real.parent.mkdir(parents=True)
    real.write_text("")
    link = tmp_path / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../private/bin/python")
    assert closed_to(NOBODY, link) is None
    (tmp_path / "private").chmod(0o700)
    assert closed_to(NOBODY, link) == tmp_path / "private"
    assert closed_to(NOBODY, tmp_path / "venv") is None
    owner = (tmp_path / "private").stat()
    assert closed_to(User(owner.st_uid, 1, (1,), "/", "owner"), link) is None
