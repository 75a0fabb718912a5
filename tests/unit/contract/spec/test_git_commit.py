"""Which commit code is at, and what differs, on real repositories; git runs nothing of theirs."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from ratchet_client.cli.commands.list_jobs import commit_text
from ratchet_contract.code.tree import list_entries
from ratchet_contract.spec import git_commit as module
from ratchet_contract.spec.git_commit import GitFacts, git_facts

pytestmark = pytest.mark.processes


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory ``code`` with a committed module, link, program and submodule, in a repository that has more."""
    sub = tmp_path / "sub"
    sub.mkdir()
    git(sub, "init", "-q")
    (sub / "inner.py").write_text("inner = 1\n")
    git(sub, "add", ".")
    git(sub, "commit", "-qm", "inner")
    top = tmp_path / "top"
    code = top / "code"
    (code / "lib").mkdir(parents=True)
    git(top, "init", "-q")
    (top / "README").write_text("beside\n")
    (code / "train.py").write_text("a = 1\n")
    (code / "lib" / "näme.py").write_text("b = 1\n")
    (code / "run.sh").write_text("#!/bin/sh\n")
    (code / "run.sh").chmod(0o755)
    (code / "link.py").symlink_to("train.py")
    git(top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(sub), "code/sub")
    git(top, "add", ".")
    git(top, "commit", "-qm", "one")
    return code


def facts(code: Path) -> GitFacts:
    found = git_facts(code, list_entries(code))
    assert found is not None
    return found


def test_git_facts_report_commit_and_changed_files(code: Path) -> None:
    commit = git(code, "rev-parse", "HEAD")
    assert facts(code) == GitFacts(commit=commit, changed=0)
    (code.parent / "README").write_text("what lies beside the code does not count\n")
    (code / "train.py").touch()
    assert facts(code).changed == 0
    (code / "train.py").write_text("a = 2\n")
    (code / "new.py").write_text("untracked, and in the snapshot\n")
    (code / "lib" / "näme.py").unlink()
    (code / "run.sh").chmod(0o644)
    (code / "sub" / "inner.py").write_text("inner = 2\n")
    found = facts(code)
    assert (found.commit, found.changed) == (commit, 5)
    blobs = {name: git(code, "hash-object", name) for name in ("new.py", "run.sh", "sub/inner.py", "train.py")}
    lines = [f"{name}\x00100644\x00{blob}\n" for name, blob in blobs.items()] + [
        f"lib/näme.py\x00000000\x00{'0' * 40}\n"
    ]
    assert found.diff == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    git(code, "add", "-A")  # the index is not looked at
    assert facts(code) == found


def test_git_facts_do_not_count_files_left_out_of_snapshot(code: Path) -> None:
    left_out = [entry for entry in list_entries(code) if entry.path != "train.py"]
    assert git_facts(code, left_out) == facts(code)


def test_git_facts_of_worktree_use_worktree_commit(code: Path, tmp_path: Path) -> None:
    first = git(code, "rev-parse", "HEAD")
    (code / "train.py").write_text("a = 2\n")
    git(code, "commit", "-qam", "two")
    git(code, "worktree", "add", "-q", str(tmp_path / "tree"), first)
    other = tmp_path / "tree" / "code"
    assert facts(other) == GitFacts(commit=first, changed=0)  # the submodule is not checked out there
    assert facts(code) == GitFacts(commit=git(code, "rev-parse", "HEAD"), changed=0) != facts(other)


def test_git_facts_run_no_hooks_filters_or_configured_programs(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    evil = tmp_path / "evil.sh"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    evil.chmod(0o755)
    for hook in ("post-checkout", "fsmonitor-watchman", "post-index-change"):
        (code.parent / ".git" / "hooks" / hook).symlink_to(evil)
    for key in ("core.fsmonitor", "core.pager", "pager.ls-tree", "filter.x.clean", "diff.external", "core.sshCommand"):
        git(code, "config", key, str(evil))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".gitconfig").write_text("[core\n this is no configuration")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(evil))
    (code / ".gitattributes").write_text("*.py filter=x\n")
    (code / "train.py").write_text("a = 3\n")
    assert facts(code).changed == 2 and not ran.exists()


@pytest.mark.parametrize("known", [True, False], ids=["this git", "a git without GIT_NO_LAZY_FETCH"])
def test_nothing_is_fetched_into_a_partial_clone(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Which would run a program that the clone's configuration names."""
    top, part, ran = code.parent, tmp_path / "part", tmp_path / "ran"
    git(top, "config", "uploadpack.allowFilter", "true")
    git(top, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=tree:0", f"file://{top}", str(part))
    evil = tmp_path / "evil.sh"
    evil.write_text(f'#!/bin/sh\ntouch {ran}\nexec git-upload-pack "$@"\n')
    evil.chmod(0o755)
    git(part, "config", "remote.origin.uploadpack", str(evil))
    (part / "code").mkdir()
    if not known:
        monkeypatch.delitem(module._ENVIRON, "GIT_NO_LAZY_FETCH")
    assert "partial clone" in str(facts(part / "code").reason) and not ran.exists()
    if not known:
        monkeypatch.delitem(module._ENVIRON, "GIT_ALLOW_PROTOCOL")
        assert facts(part / "code").commit and ran.exists()  # else the test shows nothing


def test_git_facts_are_none_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_facts(tmp_path, []) is None
    monkeypatch.setenv("PATH", str(tmp_path))  # not even that git is not installed
    assert git_facts(tmp_path, []) is None
    (tmp_path / ".git").mkdir()
    assert facts(tmp_path) == GitFacts(reason="git is not installed where the code was read")
    monkeypatch.undo()
    assert git_facts(tmp_path, []) is None  # whatever it is, git does not take it for one


def test_git_facts_give_reason_when_commit_is_unknown(code: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    assert facts(tmp_path / "empty") == GitFacts(reason="the git repository has no commit yet")
    (code.parent / "other").mkdir()
    assert facts(code.parent / "other") == GitFacts(
        reason="the commit of the git repository has no file of this directory"
    )
    (code / "gone.py").write_text("deleted while it is looked at\n")
    found = list_entries(code)
    (code / "gone.py").unlink()
    unread = git_facts(code, found)
    assert unread == GitFacts(reason="the code or its git repository cannot be read: No such file or directory")


def test_git_facts_of_repository_outside_code_root_are_refused(code: Path, tmp_path: Path) -> None:
    """Neither the directory's own, nor one that it says to have as a submodule."""
    told = git_facts(code, [], lambda place: place != code.parent)
    assert told is not None and "--code-root" in str(told.reason)
    elsewhere = tmp_path / "elsewhere"
    git(tmp_path, "clone", "-q", str(tmp_path / "sub"), str(elsewhere))
    (code / "sub" / ".git").write_text(f"gitdir: {elsewhere}/.git\n")
    assert facts(code).changed == 0
    told = git_facts(code, list_entries(code), lambda place: not place.is_relative_to(elsewhere))
    assert told is not None and "--code-root" in str(told.reason)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_git_facts_of_repository_owned_by_another_user_give_reason(code: Path) -> None:
    for place in (code.parent, code.parent / ".git", code.parent / ".git" / "HEAD"):
        os.chown(place, 12345, 12345)
    assert facts(code) == GitFacts(reason="the git repository belongs to another user than the one that reads it")


def test_git_facts_bound_git_output_and_run_time(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MAX_LIST_BYTES", 100)
        assert facts(code) == GitFacts(reason="the commit of the git repository has too many files")
    other = tmp_path / "bin"
    other.mkdir()
    (other / "git").write_text("#!/bin/sh\n")
    (other / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{os.environ['PATH']}")
    assert facts(code) == GitFacts(reason="the output of git cannot be parsed")
    (other / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(module, "GIT_TIMEOUT_SECONDS", 0.2)
    assert facts(code) == GitFacts(reason="git took longer than 0.2 s")


@pytest.mark.parametrize(
    ("git", "shown"),
    [
        (None, None),
        (GitFacts(commit="a" * 40, changed=0), "a" * 40),
        (GitFacts(commit="a" * 40, changed=2, diff="b" * 64), f"{'a' * 40} + uncommitted changes in 2 files (sha256:{'b' * 16})"),
        (GitFacts(reason="the git repository has no commit yet"), "unknown: the git repository has no commit yet"),
    ],
)  # fmt: skip
def test_commit_words_format_commit_and_changes(git: GitFacts | None, shown: str | None) -> None:
    assert commit_text({"code": {"path": "/code", "git": None if git is None else git.model_dump()}}) == shown
