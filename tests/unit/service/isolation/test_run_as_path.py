"""Which directory keeps the user of ``--run-as`` from the interpreter: the one that is closed, through every link."""

from __future__ import annotations

from pathlib import Path

from ratchet_service.isolation.run_as import first_closed_directory
from ratchet_service.isolation.sandbox import User

NOBODY = User(54321, 54321, (54321,), "/", "nobody-here")


def test_inaccessible_directory_behind_symlink_is_found(tmp_path: Path) -> None:
    for folder in (*reversed(tmp_path.parents), tmp_path):
        if folder.owner() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)  # pytest's own directories are closed
    real = tmp_path / "private" / "bin" / "python"
    real.parent.mkdir(parents=True)
    real.write_text("")
    link = tmp_path / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../private/bin/python")
    assert first_closed_directory(NOBODY, link) is None
    (tmp_path / "private").chmod(0o700)
    assert first_closed_directory(NOBODY, link) == tmp_path / "private"
    assert first_closed_directory(NOBODY, tmp_path / "venv") is None
    owner = (tmp_path / "private").stat()
    assert first_closed_directory(User(owner.st_uid, 1, (1,), "/", "owner"), link) is None
