"""What the Slurm launcher makes of a job that squeue has forgotten, by the answers of sacct. The commands are scripts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AgentFile
from ratchet_service.launchers.base import AttemptRef, EngineUnreachable
from ratchet_service.launchers.slurm import launcher as launcher_module
from ratchet_service.launchers.slurm.launcher import SlurmLauncher
from ratchet_service.launchers.slurm.settings import Settings
from ratchet_service.launchers.slurm.squeue import Queue

DOWN = "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"
DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


class Site:
    """A launcher, an attempt whose agent has started and whose job squeue does not list, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.folder, self.calls = 0.0, folder / "bin", folder / "calls"
        self.folder.mkdir()
        self.command("sinfo", "echo slurm 22.05.8")
        self.command("squeue", "")
        self.ref = AttemptRef("job-0123456789ab", 1, AttemptPaths(folder / "attempt"), 1)
        self.ref.paths.node(0).root.mkdir(parents=True)
        self.ref.paths.node(0).agent_file.write_text(AgentFile(pid=1, start_time=1, host="h").model_dump_json())
        settings = Settings.model_validate({"commands": str(self.folder), "poll_seconds": 1, "file_seconds": 0})
        self.launcher = SlurmLauncher(HomePaths(folder), settings, {"PATH": "/usr/bin:/bin"})
        self.launcher._queue = Queue(self.launcher._commands, 1, lambda: self.now)
        monkeypatch.setattr(launcher_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def command(self, name: str, text: str) -> None:
        program = self.folder / name
        program.write_text(f"#!/bin/sh\necho {name} >> {self.calls}\n{text}\n")
        program.chmod(0o755)

    def end(self) -> tuple[Cause, str]:
        state = self.launcher.poll(self.ref)
        assert not state.alive
        (end,) = state.ends
        return end.cause, end.message


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def record(state: str, ref: AttemptRef) -> str:
    return f"echo '17|{ref.name}|{state}|0:15'"


def test_accounting_that_does_not_answer_is_waited_for(site: Site) -> None:
    site.command("sacct", DOWN)
    for _ in range(5):
        site.now += 2
        with pytest.raises(EngineUnreachable, match="Connection refused"):
            site.launcher.poll(site.ref)
    assert site.calls.read_text().split().count("sacct") == 2, "the accounting and the completion log, once in 10 s"
    site.command("sacct", record("TIMEOUT", site.ref))
    site.now += 20
    assert site.end()[0] is Cause.TIME_LIMIT


def test_accounting_that_does_not_answer_is_not_waited_for_for_ever(site: Site) -> None:
    site.command("sacct", DOWN)
    with pytest.raises(EngineUnreachable):
        site.launcher.poll(site.ref)
    site.now += 400
    cause, message = site.end()
    assert cause is Cause.UNKNOWN and "Connection refused" in message and "no accounting" not in message


def test_completion_log_is_used_while_the_accounting_does_not_answer(site: Site) -> None:
    site.command("sacct", f'case "$*" in *--completion*) {record("PREEMPTED", site.ref)};; *) {DOWN};; esac')
    assert site.end()[0] is Cause.HIGHER_PRIORITY


@pytest.mark.parametrize("answer", [DISABLED, ""], ids=["no accounting", "no record"])
def test_job_of_which_slurm_keeps_no_record_ends_with_an_unknown_cause_at_once(site: Site, answer: str) -> None:
    site.command("sacct", answer)
    cause, message = site.end()
    assert cause is Cause.UNKNOWN and "keeps no record" in message
    site.end()
    assert site.calls.read_text().split().count("sacct") == 2


@pytest.mark.parametrize("setpriv", [True, False], ids=["exit code 127", "ENOENT"])
def test_job_on_a_host_without_sacct_ends_with_an_unknown_cause_at_once(site: Site, setpriv: bool) -> None:
    if setpriv:
        site.command("sacct", "echo 'setpriv: failed to execute sacct: No such file or directory' >&2; exit 127")
    else:
        site.launcher._commands._setpriv = None
    cause, message = site.end()
    assert cause is Cause.UNKNOWN and "keeps no record" in message
