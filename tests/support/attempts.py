"""One attempt on a directory of its own: launch file, agent process, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import AttemptResult, LaunchFile
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_worker.ipc.progress_counter import CounterReader
from tests.support.fake_report_service import TOKEN, ReportService
from tests.support.fork_server import SERVICES, Program
from tests.support.server import processes_below, wait_for

RESOLVED = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable)
AGENT = Path(__file__).with_name("agent_with_fake_ranks.py")


def process_environment(pid: int) -> dict[str, str]:
    """What a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


class Attempt:
    """``plans``: what each stand-in rank does (see ``stand_in_rank``); one rank per entry, on ``nodes`` nodes."""

    def __init__(
        self,
        home: Path,
        plans: list[dict[str, Any]],
        *,
        spec: dict[str, Any] | None = None,
        nodes: int = 1,
        **launch: Any,
    ):
        self.home = HomePaths(home)
        self.paths = self.home.job("job-1").attempt(1)
        self.service = ReportService(self.home.service_file, nodes)
        env = {"STAND_IN": json.dumps({str(rank): plan for rank, plan in enumerate(plans)})}
        data: dict[str, Any] = {
            "name": "test",
            "task": {"entrypoint": "nothing:Nothing"},
            "world": {"nodes": nodes, "ranks_per_node": len(plans) // nodes, "device": "cpu"},
            **(spec or {}),
        }
        data["env"] = {**env, **data.get("env", {})}
        self.launch = LaunchFile(
            job_id="job-1",
            attempt=1,
            world_size=len(plans),
            ranks=list(range(len(plans) // nodes)),
            spec=parse_spec(data),
            job_root=str(self.home.job("job-1").root),
            attempt_dir=str(self.paths.root),
            workdir=str(home),
            report_token=TOKEN,
            service_file=str(self.home.service_file),
            **{"resolved": RESOLVED, **launch},
        )
        self.paths.root.mkdir(parents=True)
        self.paths.launch_file.write_text(self.launch.model_dump_json())
        self.agents: list[subprocess.Popen[bytes] | Program] = []

    def start(
        self, env: dict[str, str] | None = None, *, node: int = 0, **timing: float
    ) -> subprocess.Popen[bytes] | Program:
        """Start an agent; every agent's output goes to agent.log."""
        command = [sys.executable, "-P", str(AGENT), str(self.paths.launch_file), json.dumps(timing), str(node)]
        with self.paths.agent_log.open("ab") as log:
            agent = SERVICES.start(command, log.fileno(), env={**os.environ, **(env or {})})
        self.agents.append(agent)
        return agent

    def wait(self, deadline: float = 30) -> AttemptResult:
        """The result of node 0, after the newest agent has exited."""
        agent = self.agents[-1]
        wait_for(lambda: agent.poll() is not None, "the agent to end", deadline)
        return self.result()

    def result(self, node: int = 0) -> AttemptResult:
        path = self.paths.node(node).result_file
        assert path.exists(), self.log()
        return AttemptResult.model_validate_json(path.read_bytes())

    def wait_step(self, rank: int, step: int = 3) -> None:
        def reached() -> bool:
            reading = CounterReader(self.paths.counter(rank)).read()
            assert self.agents[-1].poll() is None, self.log()
            return reading is not None and reading.finished >= step

        wait_for(reached, f"rank {rank} to reach step {step}", 30, 0.02)

    def wait_log(self, text: str) -> None:
        wait_for(lambda: text in self.log(), f"{text!r} in the agent's log", 30)

    def rank_pids(self) -> list[int]:
        """Live processes of the attempt that are not the agent."""
        agents = {agent.pid for agent in self.agents}
        return [pid for pid in processes_below(self.paths.root) if pid not in agents]

    def pid_of(self, rank: int) -> int:
        for pid in self.rank_pids():
            with suppress(OSError):
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        raise AssertionError(f"rank {rank} is not alive\n{self.log()}")

    def log(self) -> str:
        return self.paths.agent_log.read_text()

    def close(self) -> None:
        """Leave nothing behind, whatever the test did."""
        self.service.stop()
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait(10)
        for pid in processes_below(self.paths.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_below(self.paths.root), "the attempt's processes to go", 10)
