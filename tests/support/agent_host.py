"""An agent host in a process of its own: as root with processes of its own, as in a container; else on the machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.local.agent_host_client import Question, send_request
from tests.support.fork_server import ROOT
from tests.support.server import wait_for

APART = os.geteuid() == 0 and shutil.which("unshare") is not None
"""Does it see its own processes alone?"""
COMMAND = (sys.executable, "-m", "ratchet_service", "agent-host", "--cpu-slots", "8", "--home")


def launchers_file(folder: Path) -> Path:
    path = folder / "launchers.json"
    path.write_text(json.dumps({"local": {"agent_host": True}}))
    return path


class AgentHost:
    """Its processes get nothing of this one's environment but where programs and modules are."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home.with_name("agent-host.log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if APART else []
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*own, *COMMAND, str(self.home)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )
        wait_for(self._answers, "the agent host to answer", 60)

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()
        with suppress(EngineUnreachable):
            return bool(send_request(self.home, Question(what="ping")))
        return False

    @property
    def pid(self) -> int:
        """Of the host itself, as this process knows it."""
        assert self.process is not None
        if not APART:
            return self.process.pid
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    @property
    def proc(self) -> Path:
        """/proc as its processes see it."""
        return Path(f"/proc/{self.pid}/root/proc")

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; with it go, where it is ``APART``, its agents."""
        assert self.process is not None
        with suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        process = self.process
        assert process is not None
        return wait_for(lambda: None if process.poll() is None else (process.returncode,), "its end", 60)[0]
