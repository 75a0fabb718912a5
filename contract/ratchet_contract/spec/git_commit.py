"""The git commit of a directory of code, and the snapshot's differences from it. Git runs without network, hooks and the user's
configuration, and only reads the repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import Field, model_validator

from ratchet_contract.code.choice import Allowed, allow_all
from ratchet_contract.code.tree import DIGEST, Entry, read_chunks
from ratchet_contract.spec.types import SpecModel

GIT_TIMEOUT_SECONDS: Final = 10.0
"""Time limit of all git commands for one directory."""
_MAX_LIST_BYTES: Final = 64 << 20
"""Maximum size of a commit's list of files: half a million of them."""
_GITLINK: Final = "160000"
_ENVIRON: Final = {
    "LC_ALL": "C", "HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
}  # fmt: skip
_NO_REPOSITORY: Final = "not a git repository"
_PARTIAL: Final = "the git repository is a partial clone that lacks the commit's lists of files"
_ERROR_REASONS: Final = {
    "dubious ownership": "the git repository belongs to another user than the one that reads it",
    "unsafe repository": "the git repository belongs to another user than the one that reads it",  # before git 2.38
    "unknown revision": "the git repository has no commit yet",
    "lazy fetching disabled": _PARTIAL,
    "' not allowed": _PARTIAL,  # a git that does not know GIT_NO_LAZY_FETCH tries to fetch, and no protocol is allowed
}


class GitFacts(SpecModel):
    """What is known about the git commit of the code: ``commit`` and ``changed``, or ``reason``, which states why they are
    unknown."""

    commit: str | None = Field(None, pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$", description="The commit of HEAD.")
    changed: int | None = Field(
        None,
        ge=0,
        description="Files of the snapshot that differ from that commit: changed, added (untracked ones, too) or deleted.",
    )
    diff: str | None = Field(
        None,
        pattern=DIGEST,
        description="SHA-256 of these files, sorted by path, each as path, NUL, mode (000000: deleted), NUL, id of its git blob "
        "(zeros: deleted), newline; null: there are none.",
    )
    reason: str | None = Field(None, max_length=400, description="Why the commit is unknown.")

    @model_validator(mode="after")
    def _known_or_not(self) -> GitFacts:
        """Raise ``ValueError`` unless either ``reason`` alone or ``commit`` and ``changed`` are set, with ``diff`` if files
        changed."""
        if self.reason is not None:
            fits = (self.commit, self.changed, self.diff) == (None, None, None)
        else:
            fits = None not in (self.commit, self.changed) and (self.diff is None) == (self.changed == 0)
        if not fits:
            raise ValueError("give reason alone, or commit and changed, with diff where changed is not 0")
        return self


class _Unknown(Exception):
    """The commit cannot be determined; the message states why."""


class _Blob(NamedTuple):
    """A file in a git tree: its mode and the id of its content, as git writes them."""

    mode: str
    id: str


def git_facts(root: Path, entries: Iterable[Entry], is_allowed: Allowed = allow_all) -> GitFacts | None:
    """Return the git commit of the directory ``root`` and its differences from ``entries``, its snapshot; None without a
    repository. Only ``reason`` is set if they are unknown. ``is_allowed``: whether a directory may be read."""
    try:
        root = root.resolve()
        if not any(os.path.lexists(folder / ".git") for folder in (root, *root.parents)):
            return None
        return _Look(time.monotonic() + GIT_TIMEOUT_SECONDS, is_allowed).facts(root, entries)
    except _Unknown as error:
        return None if str(error) == _NO_REPOSITORY else GitFacts(reason=str(error)[:400])
    except OSError as error:
        return GitFacts(reason=f"the code or its git repository cannot be read: {error.strerror}"[:400])
    except ValueError:
        return GitFacts(reason="the output of git cannot be parsed")


class _Look:
    """Examines one directory. ``deadline``: when git is stopped. Methods raise ``_Unknown``, ``OSError``, or ``ValueError`` for
    unexpected output."""

    def __init__(self, deadline: float, is_allowed: Allowed) -> None:
        self._deadline = deadline
        self._is_allowed = is_allowed

    def facts(self, root: Path, entries: Iterable[Entry]) -> GitFacts:
        """Return the commit, and the number and the digest of the files that differ between it and ``entries``. Files of the
        commit that exist in ``root``, but not in ``entries``, do not count."""
        commit = self._commit(root)
        tree = self._tree(root, commit)
        if not tree:
            raise _Unknown("the commit of the git repository has no file of this directory")
        algorithm = "sha1" if len(commit) == 40 else "sha256"
        now = {entry.path: _blob(entry, algorithm) for entry in entries}
        differ = {path: blob for path, blob in now.items() if tree.get(path) != blob}
        gone = (path for path in tree.keys() - now.keys() if not os.path.lexists(root / path))
        differ |= dict.fromkeys(gone, _Blob("0" * 6, "0" * len(commit)))
        lines = (
            f"{path}\0{mode}\0{id_}\n".encode(errors="surrogateescape") for path, (mode, id_) in sorted(differ.items())
        )
        digest = hashlib.sha256(b"".join(lines)).hexdigest()
        return GitFacts(commit=commit, changed=len(differ), diff=digest if differ else None)

    def _commit(self, root: Path) -> str:
        """Return the id of the commit at HEAD. Raises ``_Unknown``, also if the repository may not be read."""
        told = self._run_git(
            root, "rev-parse", "--show-toplevel", "--absolute-git-dir", "--git-common-dir", "HEAD^{commit}"
        )
        *places, commit = told.decode(errors="surrogateescape").splitlines()
        if len(places) != 3:
            raise _Unknown("the path of the git repository has a line break")
        if not all(self._is_allowed((root / place).resolve()) for place in places):
            raise _Unknown("the git repository is outside the directories that the service may read (--code-root)")
        return commit

    def _tree(self, root: Path, commit: str) -> dict[str, _Blob]:
        """Return the files of a commit below ``root``, by path, with those of checked-out submodules."""
        found: dict[str, _Blob] = {}
        for line in (
            self._run_git(root, "ls-tree", "-r", "-z", commit).decode(errors="surrogateescape").split("\0")[:-1]
        ):
            about, _, path = line.partition("\t")
            mode, _, id_ = about.split(" ")
            if mode != _GITLINK:
                found[path] = _Blob(mode, id_)
            elif (root / path / ".git").exists():
                self._commit(root / path)  # checks that it is allowed
                found |= {f"{path}/{inner}": blob for inner, blob in self._tree(root / path, id_).items()}
        return found

    def _run_git(self, root: Path, *arguments: str) -> bytes:
        """Run a git command in ``root`` and return its output. Raises ``_Unknown`` for git that is missing, fails, takes too long
        or prints too much."""
        program = shutil.which("git")
        if program is None:
            raise _Unknown("git is not installed where the code was read")
        command = [program, "--no-pager", "-C", str(root), *arguments]
        environ = _ENVIRON | {"PATH": os.environ.get("PATH", os.defpath)}
        with tempfile.TemporaryFile() as errors:
            with subprocess.Popen(
                command, env=environ, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            ) as process:
                assert process.stdout is not None
                timer = threading.Timer(max(0.0, self._deadline - time.monotonic()), process.kill)
                timer.start()
                printed = process.stdout.read(_MAX_LIST_BYTES + 1)
                if len(printed) > _MAX_LIST_BYTES:
                    process.kill()
                code = process.wait()
                timer.cancel()
            errors.seek(0)
            said = errors.read(4096).decode(errors="replace")
        if len(printed) > _MAX_LIST_BYTES:
            raise _Unknown("the commit of the git repository has too many files")
        if code and time.monotonic() >= self._deadline:
            raise _Unknown(f"git took longer than {GIT_TIMEOUT_SECONDS:g} s")
        if code:
            if _NO_REPOSITORY in said:
                raise _Unknown(_NO_REPOSITORY)
            why = next((text for words, text in _ERROR_REASONS.items() if words in said), None)
            raise _Unknown(why or f"git {arguments[0]}: {(said.strip().splitlines() or ['failed'])[0]}")
        return printed


def _blob(entry: Entry, algorithm: str) -> _Blob:
    """Return the blob that git would make of a file or link without filters or conversion of line ends. Raises ``OSError``."""
    if entry.link is not None:
        target = os.fsencode(entry.link)
        return _Blob("120000", hashlib.new(algorithm, b"blob %d\0%b" % (len(target), target)).hexdigest())
    inner = hashlib.new(algorithm, b"blob %d\0" % entry.size)
    for chunk in read_chunks(entry.source):
        inner.update(chunk)
    return _Blob("100755" if entry.executable else "100644", inner.hexdigest())
