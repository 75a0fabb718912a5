"""Engines for the one suite that all launchers pass: each starts agents with stand-in ranks, the agents are real."""

from __future__ import annotations

import json
import os
import signal
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.launchers import engine_thread
from ratchet_service.launchers.base import AttemptRef, Launcher, LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import load
from ratchet_service.reconciler.launch import build_launch_file
from tests.support import slurm, two_node_launcher
from tests.support.fake_report_service import TOKEN, ReportService
from tests.support.kube.cluster import Cluster
from tests.support.kube.store import JOBS
from tests.support.server import processes_below

AGENT = Path(__file__).with_name("engine_agent.py")
IMAGE = "registry.example/worker:1"
STRANGER = 30303  # a user that owns nothing here: whose files pods write, where the service is root


class Engine:
    """One engine with the run directory of one service. ``launchers`` made here are closed with it."""

    kind: str
    python = sys.executable
    nodes = 2

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = HomePaths(directory / "home")
        self.home.jobs.mkdir(parents=True)
        self.service = ReportService(self.home.service_file, nodes=self.nodes)
        self.stack = ExitStack()
        self._jobs = 0

    def launcher(self, home: HomePaths | None = None) -> Launcher:
        """A new object, as a service makes it that has just started on ``home``."""
        made = self._launcher(home or self.home)
        if hasattr(made, "close"):
            self.stack.callback(made.close)
        return made

    @abstractmethod
    def _launcher(self, home: HomePaths) -> Launcher: ...

    @abstractmethod
    def group_count(self, ref: AttemptRef) -> int:
        """How many groups of that name the engine has now."""

    def launch(self, stand_in: dict[str, Any] | None = None, home: HomePaths | None = None, **spec: Any) -> LaunchFile:
        """The first attempt of a new job of one node, whose rank does as ``stand_in`` says."""
        self._jobs += 1
        where = home or self.home
        job_id = f"job-{self._jobs:012d}"
        world = {"nodes": 1, "ranks_per_node": 1, "device": "cpu", **spec.pop("world", {})}
        env = {"STAND_IN": json.dumps({str(rank): stand_in or {} for rank in range(world["nodes"])})}
        data = {"name": "n", "task": {"entrypoint": "a:B"}, "env": env, "launcher": {"kind": self.kind}, "world": world}
        parsed = parse_spec({**data, **self.spec(), **spec})
        resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=self.python)
        where.job(job_id).root.mkdir(parents=True)
        return build_launch_file(where, job_id, 1, parsed, resolved, (), TOKEN, Desired.RUN)

    def spec(self) -> dict[str, Any]:
        """What jobs of this engine give besides."""
        return {}

    def agents(self, plan: LaunchPlan) -> list[int]:
        """Live agents of the attempt."""
        found = []
        for pid in processes_below(plan.ref.paths.root):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if {os.fsencode(AGENT), os.fsencode(plan.ref.paths.launch_file)} <= set(words):
                found.append(pid)
        return found

    def close(self) -> None:
        self.stack.close()
        self.service.stop()
        for pid in processes_below(self.directory):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_rendezvous_service(self) -> None:
        """A service by which the nodes of one group find one another. Launchers that know its address are made afterwards."""
        self.service.stop()
        self.service = ReportService(self.home.service_file, nodes=self.nodes)
        self.service.start()

    def fake_python(self) -> Path:
        """A ``python`` whose ``-P -m ratchet_worker.agent`` is the agent with stand-in ranks."""
        path = self.directory / "bin" / "python"
        path.parent.mkdir(exist_ok=True)
        real, agent = f'"{sys.executable}"', f'{{ shift 3; exec "{sys.executable}" -P "{AGENT}" "$@"; }}'
        path.write_text(f'#!/bin/sh\n[ "$3" = ratchet_worker.agent ] && {agent}\nexec {real} "$@"\n')
        path.chmod(0o755)
        return path


class Local(Engine):
    kind = "local"
    nodes = 1

    def _launcher(self, home: HomePaths) -> Launcher:
        return LocalLauncher(home, agent=(sys.executable, "-P", str(AGENT)))

    def group_count(self, ref: AttemptRef) -> int:
        plan = LaunchPlan(ref, None, ())  # type: ignore[arg-type]
        return len(self.agents(plan)) // ref.nodes


class Twin(Local):
    """The launcher that another package brings, found by its entry point."""

    kind = "twin"
    nodes = 2

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(str(two_node_launcher.PLUGIN))
        before = directory / "before"
        before.write_text(f'#!/bin/sh\nshift\nexec "{self.fake_python()}" "$@"\n')  # in the place of the interpreter
        before.chmod(0o755)
        self._file = two_node_launcher.launchers_file(directory / "launchers.yaml", [[str(before)], [str(before)]])

    def _launcher(self, home: HomePaths) -> Launcher:
        return load(home, self._file)[self.kind]


class Kubernetes(Engine):
    """The modelled cluster, whose pods are processes: a live one cannot run here."""

    kind = "kubernetes"
    python = "python"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        claims = {"run-directory": self.home.home, "another": directory / "other"}
        self.cluster = Cluster(directory / "cluster", claims=claims)
        self.stack.callback(self.cluster.close)
        self.cluster.kubelet.images.first[IMAGE] = self.fake_python().parent
        self.service.start()

    def _launcher(self, home: HomePaths) -> Launcher:
        settings: dict[str, Any] = {
            "claim": "run-directory" if home == self.home else "another",
            "url": json.loads(self.home.service_file.read_text())["url"],
            "kubeconfig": str(self.cluster.kubeconfig),
            "image": IMAGE,
        }
        if os.getuid() == 0:
            settings |= {"run_as_user": STRANGER, "run_as_group": STRANGER}
        file = self.directory / "launchers.yaml"
        file.write_text(json.dumps({self.kind: settings}))
        return load(home, file)[self.kind]

    def group_count(self, ref: AttemptRef) -> int:
        return sum(job["metadata"]["name"] == ref.name for job in self.cluster.store.select(JOBS))


class Slurm(Engine):
    """A real slurmctld with two slurmd."""

    kind = "slurm"

    def __init__(self, directory: Path) -> None:
        absent = slurm.missing_reason()
        if absent:
            pytest.skip(absent)
        super().__init__(directory)
        self.cluster = self.stack.enter_context(slurm.slurm_cluster())
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in self.cluster.variables.items():
            patch.setenv(name, value)

    def _launcher(self, home: HomePaths) -> Launcher:
        settings = {"python": str(self.fake_python()), "poll_seconds": 0.2, "commands": "/usr/bin"}
        file = self.directory / "launchers.yaml"
        file.write_text(json.dumps({self.kind: settings}))
        return load(home, file)[self.kind]

    def group_count(self, ref: AttemptRef) -> int:
        listed = self.cluster.run("squeue", "-h", "-o", "%j", "-t", "PENDING,RUNNING,CONFIGURING,COMPLETING")
        return listed.split().count(ref.name)


ENGINES: dict[str, type[Engine]] = {"local": Local, "kubernetes": Kubernetes, "slurm": Slurm, "twin": Twin}


@contextmanager
def running_engine(kind: str, directory: Path) -> Iterator[Engine]:
    """The engine, and nothing of it left afterwards. On a machine that is busy its answers are waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_thread, "WAIT_SECONDS", 60.0)
        patch.setattr(engine_thread, "SLOW_WAIT_SECONDS", 60.0)
        made = ENGINES[kind](directory)
        try:
            yield made
        finally:
            made.close()
