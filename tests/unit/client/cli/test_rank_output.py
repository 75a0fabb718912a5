"""What ``ratchet run`` shows of the ranks' logs: every byte once, attempt after attempt, to the last one."""

from __future__ import annotations

import io
import os
import select
import sys
from pathlib import Path

import pytest

from ratchet_client.cli.run.rank_output import RankOutput, last_lines
from ratchet_contract.paths import JobPaths


def write(job: JobPaths, attempt: int, rank: int, data: bytes) -> None:
    path = job.attempt(attempt).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def test_single_rank_output_is_byte_exact_and_skips_already_shown(tmp_path: Path) -> None:
    job, out = JobPaths(tmp_path), io.BytesIO()
    write(job, 1, 0, b"shown before\n")
    with RankOutput(job, {0}, 1, out):
        write(job, 1, 0, b"\xff half a line")
        write(job, 2, 0, b"10 %\r20 %\r")
        write(job, 2, 1, b"of another rank\n")
        write(job, 2, 0, b"the end")  # just before the block ends
    assert out.getvalue() == b"\xff half a line\n10 %\r20 %\rthe end\n"


def test_rank_output_write_failure_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobPaths(tmp_path)
    with open("/dev/full", "wb", buffering=0) as full, RankOutput(job, {0}, 0, full):
        write(job, 1, 0, b"one\n")
        write(job, 2, 0, b"two\n")
    assert capsys.readouterr().err.count("the ranks' output cannot be shown (No space left on device)") == 1


def test_multi_rank_output_prefixes_each_line_with_rank(tmp_path: Path) -> None:
    job, out = JobPaths(tmp_path), io.BytesIO()
    with RankOutput(job, None, 0, out):
        write(job, 1, 0, b"one\ntwo\n")
        write(job, 1, 1, b"three\nfour")
    assert out.getvalue() == b"1.0 | one\n1.0 | two\n1.1 | three\n1.1 | four\n"


def test_last_lines_are_those_that_the_rank_ended(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    write(job, 1, 0, "first\nTypeError: a\u2028b\x85c\x0cd\nexit\n".encode())
    assert last_lines(job, 1, 0, 2) == ["TypeError: a\u2028b\x85c\x0cd", "exit"]


def test_note_starts_new_line_after_progress_bar_on_same_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, terminal = os.openpty()
    job = JobPaths(tmp_path)
    write(job, 1, 0, b"\r 10 %|#   |")
    with (
        open(terminal, "wb", buffering=0) as screen,
        monkeypatch.context() as patched,
        RankOutput(job, {0}, 0, screen) as shown,
    ):
        assert select.select([controller], [], [], 20)[0]
        patched.setattr(sys, "stderr", os.fdopen(os.dup(terminal), "w"))
        shown.note("attempt 1 ended")
        shown.note("attempt 2 starts")
        sys.stderr.close()
        seen = b""
        while not seen.endswith(b"attempt 2 starts\r\n") and select.select([controller], [], [], 20)[0]:
            seen += os.read(controller, 1 << 12)  # the kernel hands a terminal's bytes over when it gets to them
    os.close(controller)
    assert seen == b"\r 10 %|#   |\r\nattempt 1 ended\r\nattempt 2 starts\r\n"
