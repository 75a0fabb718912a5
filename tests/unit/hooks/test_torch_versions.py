"""Which interpreter, version of torch and tests ``make test-torch`` takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ratchet_hooks.torch_versions import OLDEST, TESTED
from tests.support import torch_versions
from tests.support.docs import ROOT
from tests.support.torch_versions import SELECTION, interpreter, release

HERE = f"python{sys.version_info[0]}.{sys.version_info[1]}"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_interpreter_search_skips_broken_pyenv_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "shims" / HERE, "echo 'pyenv: no such command' >&2; exit 127")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=f"no {HERE} that works, neither on PATH nor below ~/.pyenv/versions"):
        interpreter(HERE)
    version = HERE.removeprefix("python")
    real = script(tmp_path / f".pyenv/versions/{version}.2/bin/{HERE}", f'exec "{sys.executable}" "$@"')
    assert interpreter(HERE) == str(real)
    script(tmp_path / "bin" / HERE, f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{tmp_path / 'bin'}")
    assert interpreter(HERE) == str(tmp_path / "bin" / HERE)


def test_release_resolves_newest_oldest_and_exact_version(tmp_path: Path) -> None:
    pip = script(tmp_path / "python", "echo 'torch (2.99.1)'; echo 'Available versions: 2.99.1, 2.99.0'")
    assert release("newest", str(pip)) == "2.99.1"
    assert release("oldest", str(pip)) == f"{OLDEST}.0" and release("2.11.0", str(pip)) == "2.11.0"
    with pytest.raises(SystemExit, match="no newest version of torch: ERROR: none"):
        release("newest", str(script(tmp_path / "other", "echo 'ERROR: none' >&2; exit 1")))


def test_uninstallable_torch_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "ROOT", tmp_path)
    made = script(tmp_path / ".venv-torch/2.8.0-py3.11/bin/python", "exit 1")
    python = script(tmp_path / "python", "echo 3.11")
    for _ in range(2):  # it is tried again
        with pytest.raises(SystemExit, match=r"pip could not install torch 2\.8\.0 for"):
            torch_versions.environment("2.8.0", str(python))
    made.write_text("#!/bin/sh\n")
    assert torch_versions.environment("2.8.0", str(python)) == made


def test_selected_test_files_exist_and_are_unique() -> None:
    files = [file for part in SELECTION.values() for file in part]
    assert len(files) == len(set(files)) and [file for file in files if not (ROOT / "tests" / file).is_file()] == []


def test_torch_versions_page_lists_tested_versions() -> None:
    """A minor version is called tested when its row of the table says that nothing failed."""
    lines = (ROOT / "docs/torch-versions.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.count("|") == 7]
    green = {torch.strip().rpartition(".")[0] for torch, _, _, failed, *_ in rows[2:] if failed.strip() == "0"}
    assert green == set(TESTED) and rows[0][3].strip() == "failed"
