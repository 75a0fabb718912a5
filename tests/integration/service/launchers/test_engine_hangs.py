"""One engine hangs, and the jobs of another are looked after.

Slurm's commands are scripts on PATH: what they do while they hang is to wait for a FIFO, for as long as the test wants.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service.db.models import Job
from ratchet_service.launchers import engine_thread
from ratchet_service.launchers.registry import Launchers, load
from tests.support.control_plane import Plane, trainer_launcher
from tests.support.server import wait_for

one_database = pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
"""What is under test asks the database nothing of its own."""

HANGS = """#!/bin/sh
cd {folder} || exit 1
if [ "$(cat hangs 2>/dev/null)" = {name} ]; then echo $$ >hanging; cat gate >/dev/null; rm hanging; fi
"""
COMMANDS = {
    "sinfo": "echo slurm-wlm 22.05.8",
    "squeue": "cat jobs",
    "sbatch": """\
name=$(sed -n 's/^#SBATCH --job-name=//p')
printf '%-200s' 7 "$name" PENDING Resources 0 0 N/A '' '' >>jobs
echo >>jobs
echo 7""",
    "scancel": "",
    "sacct": "",
}


class Scripts:
    """Slurm's commands, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.mkfifo(folder / "gate")
        (folder / "jobs").touch()
        for name, text in COMMANDS.items():
            (folder / name).write_text(HANGS.format(folder=folder, name=name) + text + "\n")
            (folder / name).chmod(0o755)

    def hang(self, name: str) -> None:
        (self.folder / "hangs").write_text(name)

    def hanging(self) -> bool:
        """A command waits, and has not been given up."""
        with suppress(OSError, ValueError):
            return Path(f"/proc/{int((self.folder / 'hanging').read_text())}").exists()
        return False

    def go_on(self) -> None:
        (self.folder / "hangs").unlink(missing_ok=True)
        wait_for(lambda: self._opened() or not self.hanging(), "the command to go on", 30)

    def start(self) -> None:
        """The batch job gets its nodes."""
        (self.folder / "new").write_text((self.folder / "jobs").read_text().replace("PENDING", "RUNNING"))
        (self.folder / "new").replace(self.folder / "jobs")

    def submitted(self) -> int:
        return len((self.folder / "jobs").read_text().splitlines())

    def _opened(self) -> bool:
        with suppress(OSError):  # nobody reads
            os.close(os.open(self.folder / "gate", os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False


@pytest.fixture
def scripts(
    control_plane: Plane, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scripts]:
    made = Scripts(tmp_path_factory.mktemp("slurm"))
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    yield made
    made.go_on()


def both(plane: Plane, scripts: Scripts) -> Launchers:
    """``command_seconds``: longer than any wait here, so that no command is given up."""
    settings = {"python": sys.executable, "poll_seconds": 0.1, "command_seconds": 120}
    file = scripts.folder / "launchers.yaml"
    file.write_text(json.dumps({"slurm": settings}))
    return Launchers({"local": trainer_launcher(plane.paths), **load(plane.paths, file)})


@one_database
@pytest.mark.parametrize("what", ["squeue", "sbatch"])
def test_local_job_runs_while_slurm_commands_hang(
    control_plane: Plane, scripts: Scripts, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(engine_thread, "UNREACHABLE_AFTER_SECONDS", 0.5)
    held = control_plane.submit()
    with control_plane.database.write() as session:
        job = session.get_one(Job, held)
        job.spec = job.spec | {"launcher": {"kind": "slurm"}}
    if what == "sbatch":
        scripts.hang(what)
    launchers = both(control_plane, scripts)
    control_plane.start_reconciler_with(launchers)
    if what == "squeue":
        control_plane.wait_job(held, lambda job: job.reason == "engine-queue", "told that it waits")
        scripts.hang(what)
    wait_for(scripts.hanging, f"{what} to hang", 30)
    local = control_plane.submit({"steps": 5})
    assert control_plane.wait(local, JobPhase.SUCCEEDED).attempt == 1
    control_plane.wait_job(
        held, lambda _: any(e.type == "engine-unreachable" for e in control_plane.events(held)), "told"
    )
    assert scripts.hanging(), "the local job may have waited for it"
    (attempt,) = control_plane.attempts(held)
    assert attempt.ended_at is None and control_plane.job(held).phase is JobPhase.STARTING
    scripts.go_on()
    control_plane.wait_job(held, lambda job: job.reason == "engine-queue", "told that it waits")
    scripts.start()
    control_plane.wait_job(held, lambda job: job.reason is None, "out of Slurm's queue")
    assert len(control_plane.attempts(held)) == 1 and scripts.submitted() == 1
    for reconciler, _ in control_plane.reconcilers:
        reconciler.stop()
    slurm = launchers["slurm"]
    assert isinstance(slurm, engine_thread.ThreadedLauncher)
    slurm.close()
