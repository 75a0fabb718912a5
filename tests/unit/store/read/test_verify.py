"""``python -m ratchet_store.verify``: every damaged block is named, and the exit status says which kind of trouble it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_store.read.verify import check, main
from ratchet_store.write import rank_file
from tests.support.checkpoints import make_chain, make_checkpoint, write_ranks


def test_verify_names_every_damaged_block_with_byte_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "BLOCK", 4096)
    manifest = make_checkpoint(tmp_path, 7, scale=24)
    directory, (first, second) = tmp_path / manifest.id, manifest.files
    done: list[tuple[int, int]] = []
    finding = check(directory, lambda *told: done.append(told))
    assert finding.status == "ok" and done[-1] == (manifest.size, manifest.size)
    for file, places in [(first, [0, 4096, 9000]), (second, [second.size - 1])]:
        raw = bytearray((directory / file.name).read_bytes())
        for at in places:
            raw[at] ^= 1
        (directory / file.name).write_bytes(raw)
    finding = check(directory)
    last = len(second.blocks) - 1
    assert finding.status == "damaged"
    assert [(f.file, f.block, f.begin, f.end) for f in finding.flaws] == [
        (first.name, 0, 0, 4096), (first.name, 1, 4096, 8192), (first.name, 2, 8192, 12288),
        (second.name, last, last * 4096, second.size),
    ]  # fmt: skip
    (directory / second.name).unlink()
    assert [f.block for f in check(directory).flaws] == [0, 1, 2, None] and "missing" in str(check(directory))


@pytest.mark.parametrize("unreadable", [(0, 0), (1, 0), (0, 4096), (1, 4096)])
def test_damage_is_found_also_if_other_bytes_are_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unreadable: tuple[int, int]
) -> None:
    monkeypatch.setattr(rank_file, "BLOCK", 4096)
    manifest = make_checkpoint(tmp_path, 7, scale=24)
    directory, names = tmp_path / manifest.id, [file.name for file in manifest.files]
    damaged = names[1] if unreadable == (0, 0) else names[0]
    with (directory / damaged).open("r+b") as file:
        file.write(b"\0")
    preadv = os.preadv

    def fail(fd: int, buffers: Any, offset: int) -> int:  # as a bad sector does, which a test cannot make
        if (Path(f"/proc/self/fd/{fd}").readlink().name, offset) == (names[unreadable[0]], unreadable[1]):
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    assert main([str(directory)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and "Input/output error" in out
    finding = check(directory)
    assert [(flaw.file, flaw.block) for flaw in finding.flaws] == [(damaged, 0)]
    assert names[unreadable[0]] in (finding.error or "")


def test_verify_command_prints_lines_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = make_chain(tmp_path, 10, 20)
    write_ranks(tmp_path / checkpoint_dir_name(30, 1))
    assert main([str(tmp_path), str(tmp_path / chain[0].id)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2].split(":")[1].split(",")[0] for line in out] == [
        " ok",
        " ok",
        " uncommitted",
        " ok",
    ]
    assert main([str(tmp_path / checkpoint_dir_name(30, 1))]) == 2
    assert main([str(tmp_path / "nothing")]) == main(["s3://bucket/prefix"]) == 2
    capsys.readouterr()
    (tmp_path / chain[1].id / MANIFEST_NAME).write_text("{")
    assert main(["--json", str(tmp_path), str(tmp_path / "nothing")]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["status"] for item in told] == ["ok", "damaged", "uncommitted", "unreadable"]
    assert told[1]["flaws"][0]["file"] == MANIFEST_NAME


def test_verify_command_runs_without_torch_inside_checkpoint(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, 10)
    code = "import sys; sys.modules['torch'] = None; from ratchet_store.verify import main; sys.exit(main(['.']))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / manifest.id, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "") and f"{manifest.id}: ok" in ran.stdout
