"""Checks that need more than the standard library, as processes with a deadline; and the deadline for all the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ratchet_contract.findings import Finding, ProbeReport, failed, not_checked

WORKER_SECONDS: Final = 90.0
"""For torch from a cold disk, twice, and the meeting of two processes."""
SERVICE_SECONDS: Final = 40.0


@contextmanager
def started(command: list[str], environ: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own; whatever of the group is alive at the end is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def worker(python: str) -> ProbeReport:
    """What the interpreter that trains says of itself."""
    return _ask("worker python", [python, "-P", "-m", "ratchet_worker.doctor"], "worker", WORKER_SECONDS, python)


def database(home: Path) -> ProbeReport:
    """What the service's own code says of its database."""
    if find_spec("sqlalchemy") is None or find_spec("alembic") is None:
        return ProbeReport(
            findings=[
                not_checked(
                    "database",
                    "unknown",
                    detail="the service's packages are not installed here",
                    cure="pip install 'ratchet-train[service]'",
                )
            ]
        )
    command = [sys.executable, "-P", "-m", "ratchet_service.doctor", "--home", str(home)]
    return _ask("database", command, "service", SERVICE_SECONDS, sys.executable)


def _ask(name: str, command: list[str], extra: str, seconds: float, python: str) -> ProbeReport:
    try:
        with started(command) as process:
            out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return _only(
            failed(
                name,
                "hangs",
                detail=f"no answer in {seconds:g} s from {' '.join(command)}",
                cure="run that command by hand and see where it stops",
            )
        )
    except OSError as error:
        return _only(
            failed(
                name, "not found", detail=f"{python}: {error.strerror}", cure="name an interpreter with --python PATH"
            )
        )
    try:
        return ProbeReport.model_validate_json(out.splitlines()[-1] if out.strip() else "")
    except ValidationError:
        return _only(_mute(name, python, extra, process.returncode, err))


def _mute(name: str, python: str, extra: str, code: int, err: str) -> Finding:
    """An interpreter that could not run the probe at all: too old, without Ratchet, or broken."""
    version = _version(python)
    if version is not None and version < (3, 11):
        return failed(
            name,
            ".".join(map(str, version)),
            detail=f"{python} is too old",
            cure="Ratchet needs Python 3.11 or newer: name another interpreter with --python PATH",
        )
    last = (err.strip().splitlines() or [f"it ended with {code} and said nothing"])[-1]
    return failed(
        name, "no answer", detail=f"{python}: {last}", cure=f"{python} -m pip install 'ratchet-train[{extra}]'"
    )


def _version(python: str) -> tuple[int, ...] | None:
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        return tuple(int(part) for part in done.stdout.strip().split("."))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _only(finding: Finding) -> ProbeReport:
    return ProbeReport(findings=[finding])


def within(seconds: float, name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of ``check``, or after ``seconds`` the finding that it hangs: a dead network file system never answers.

    What hangs is left in a thread that ends with this process.
    """
    box: list[Finding] = []

    def run() -> None:
        try:
            box.extend(check())
        except Exception as error:  # a check that breaks is a check not made, not the end of all others
            box.append(
                not_checked(
                    name, "unknown", detail=f"{type(error).__name__}: {error}", cure="report it: this check has a fault"
                )
            )

    thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [
            failed(
                name,
                "hangs",
                detail=f"no answer in {seconds:g} s",
                cure="see what it waits for: a mount that is gone, a dead disk",
            )
        ]
    return box
