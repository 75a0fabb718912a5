"""Runs rows one after the other, each in a process group of its own with a time limit. Standard library only.

A row that raises, dies or runs past its limit is red with the reason, and the others run. Nothing that a row started lives on:
all its processes have its directory in their environment (TMPDIR) or command line, and are killed at its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tests.gpu.rows import Row
from tests.gpu.work import Part, Size, Verdict, read_parts

ROOT: Final = Path(__file__).parents[2]
LEAST: Final = 3.0
"""Seconds: with less no row is begun."""
_LOG: Final = 20_000
"""Characters of a row's log that are kept, from its end."""


@dataclass
class Result:
    """What became of a row. ``seen``: the row's own sentence, or why it is not green."""

    row: str
    verdict: Verdict
    seconds: float
    seen: str
    parts: list[Part] = field(default_factory=list)
    log: str = ""


def run_rows(
    rows: Iterable[Row],
    device: str,
    size: Size,
    seconds: float,
    environ: Mapping[str, str],
    done: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Results in the order of ``rows``, each given to ``done`` at once. The rows may take ``seconds`` together: each gets the
    share of the time left that its ``share`` is of those still to run."""
    end, waiting, results = time.monotonic() + seconds, list(rows), list[Result]()
    while waiting:
        row, left = waiting[0], end - time.monotonic()
        limit = left * row.share(device) / (sum(each.share(device) for each in waiting) or 1)
        results.append(_run_row(row, device, size, limit, left, environ))
        done(results[-1])
        del waiting[0]
    return results


def _run_row(row: Row, device: str, size: Size, limit: float, left: float, environ: Mapping[str, str]) -> Result:
    if why := row.excluded(device):
        return Result(row.name, "not applicable", 0.0, why)
    if left < LEAST:
        return Result(row.name, "red", 0.0, "no time left")
    began = time.monotonic()
    # A TemporaryDirectory, unlike rmtree, also removes the read-only directories of code snapshots.
    with tempfile.TemporaryDirectory(prefix=f"ratchet-gpu-{row.name}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        error = _execute(row, device, size, max(limit, LEAST), folder, environ)
        seconds = time.monotonic() - began
        parts, said = read_parts(folder), _end(folder)
        log = (folder / "log").read_text(errors="replace")[-_LOG:]
    red = [part.name for part in parts if part.verdict == "red"]
    error = said.get("error") or error
    if error or red:
        seen = "; ".join(filter(None, [error, said.get("seen"), f"red: {', '.join(red)}" if red else ""]))
        return Result(row.name, "red", seconds, seen, parts, log)
    if not any(part.verdict == "green" for part in parts):
        return Result(row.name, "red", seconds, f"{said['seen']}; no case was run", parts, log)
    return Result(row.name, "green", seconds, said["seen"], parts)


def _execute(row: Row, device: str, size: Size, limit: float, folder: Path, environ: Mapping[str, str]) -> str:
    """Run it and end all its processes; why it did not end by itself, or an empty string."""
    temporary = folder / "tmp"
    temporary.mkdir()
    variables = {
        **environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary / "inductor"),
        "TRITON_CACHE_DIR": str(temporary / "triton"), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.gpu.row", row.function, str(folder), device, size, f"{limit:.1f}"]
    with (folder / "log").open("wb") as log:
        process = start(command, variables, log.fileno())
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"killed: it ran past its {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        left = kill_all(folder)
    if left:
        return f"processes {left} do not end by SIGKILL"
    if not (folder / "end.json").exists():
        return f"its process ended with exit code {code}"
    return ""


def start(command: list[str], variables: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def kill_all(folder: Path, patience: float = 10.0) -> list[int]:
    """SIGKILL all processes that name ``folder``, until there are none; those that are left after ``patience`` seconds."""
    end = time.monotonic() + patience
    while (found := processes_of(folder)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return found


def processes_of(folder: Path) -> list[int]:
    """Live processes (no zombies) whose command line or environment names ``folder``, this one excepted."""
    needle, found = os.fsencode(folder), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if (
                state not in "ZX"
                and needle in (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def _end(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / "end.json").read_text()))
    except FileNotFoundError:
        return {}


def as_json(result: Result) -> dict[str, object]:
    return asdict(result)
