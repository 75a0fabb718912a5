"""Runs checks in processes or threads of their own, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import ValidationError

from ratchet_contract.doctor.findings import Finding, ProbeReport, failed, not_checked

WORKER_SECONDS: Final = 90.0
"""Enough to load torch from a cold disk twice, and for the rendezvous of two processes."""
SERVICE_SECONDS: Final = 40.0
_GRACE: Final = 10.0


ProbeResult: TypeAlias = Callable[[], ProbeReport]


@dataclass(frozen=True)
class Probe:
    """A command that prints a ``ProbeReport`` within ``seconds``. ``name``: the name of the finding that replaces the report if
    the command fails. ``extra``: the extra of ratchet-train that the command needs."""

    name: str
    command: list[str]
    extra: str
    seconds: float

    @property
    def python(self) -> str:
        """The interpreter that runs the command."""
        return self.command[0]


def worker(python: str) -> AbstractContextManager[ProbeResult]:
    """Return a context that runs the worker's checks in the interpreter ``python``. The context yields a function that blocks
    until they are done and returns their report."""
    return start_probe(Probe("worker python", [python, "-P", "-m", "ratchet_worker.doctor"], "worker", WORKER_SECONDS))


def database(home: Path) -> AbstractContextManager[ProbeResult]:
    """Return a context that runs the checks of the database in another process. The context yields a function that blocks until
    they are done and returns their report. Without the service's packages nothing runs, and the report says so."""
    if find_spec("sqlalchemy") is None or find_spec("alembic") is None:
        detail = "the service's packages are not installed here"
        return nullcontext(
            lambda: _only(
                not_checked("database", "unknown", detail=detail, cure="pip install 'ratchet-train[service]'")
            )
        )
    command = [sys.executable, "-P", "-m", "ratchet_service.doctor", "--home", str(home)]
    return start_probe(Probe("database", command, "service", SERVICE_SECONDS))


@contextmanager
def start_probe(probe: Probe) -> Iterator[ProbeResult]:
    """Start the probe's command, and yield a function that blocks and returns its report. On exit, the command's process group is
    killed."""
    try:
        process = subprocess.Popen(
            probe.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        detail, cure = f"{probe.python}: {error.strerror}", "name an interpreter with --python PATH"
        report = _only(failed(probe.name, "not found", detail=detail, cure=cure))
        yield lambda: report
        return
    try:
        yield lambda: _read_report(probe, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _read_report(probe: Probe, process: subprocess.Popen[str]) -> ProbeReport:
    """Return the report that the process has printed, or a report with the reason if there is none. Waits for at most
    ``probe.seconds`` for it."""
    try:
        out, err = process.communicate(timeout=probe.seconds)
    except subprocess.TimeoutExpired:
        detail = f"no answer in {probe.seconds:g} s from {' '.join(probe.command)}"
        cure = "run that command by hand to see where it hangs"
        return _only(failed(probe.name, "hangs", detail=detail, cure=cure))
    try:
        return ProbeReport.model_validate_json(out.splitlines()[-1] if out.strip() else "")
    except ValidationError:
        return _only(_probe_failed(probe.name, probe.python, probe.extra, process.returncode, err))


def _probe_failed(name: str, python: str, extra: str, code: int, err: str) -> Finding:
    """Return the finding for an interpreter that could not run the probe. ``code``: its exit status; ``err``: its standard
    error."""
    version = _version(python)
    if version is not None and version < (3, 11):
        return failed(
            name,
            ".".join(map(str, version)),
            detail=f"{python} is too old",
            cure="Ratchet needs Python 3.11 or newer: name another interpreter with --python PATH",
        )
    if "No module named" in err and "ratchet" in err:
        return failed(
            name,
            "without Ratchet",
            detail=f"{python} cannot import ratchet_{extra}",
            cure=f"{python} -m pip install 'ratchet-train[{extra}]'",
        )
    last = (err.strip().splitlines() or [f"it ended with {code} and printed nothing"])[-1]
    return failed(
        name, "no answer", detail=f"{python}: {last}", cure=f"{python} -m pip install 'ratchet-train[{extra}]'"
    )


def _version(python: str) -> tuple[int, ...] | None:
    """Return the version of the interpreter ``python``, like ``(3, 11, 4)``; None if it cannot be run."""
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


def with_timeout(seconds: float, name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of ``check``, which runs in a thread. If it raises an exception or takes longer than ``seconds``,
    return a single finding, with the name ``name``. A check that takes longer continues in its thread."""
    box: list[Finding] = []

    def run() -> None:
        """Run the check and append its findings, or one for its exception, to ``box``."""
        try:
            box.extend(check())
        except Exception as error:  # an error in one check must not stop the others
            box.append(
                not_checked(
                    name,
                    "unknown",
                    detail=f"{type(error).__name__}: {error}",
                    cure="report this: the check itself failed",
                )
            )

    # A check that hangs stays in its daemon thread until this process exits.
    thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    except KeyboardInterrupt:
        thread.join(_GRACE)  # lets the check remove its files
        raise
    if thread.is_alive():
        return [
            failed(
                name,
                "hangs",
                detail=f"no answer in {seconds:g} s",
                cure="find out what it waits for: an unreachable mount, a failed disk",
            )
        ]
    return box
