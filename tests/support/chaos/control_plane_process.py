"""A process of the control plane as it is in earnest, but for: stand-in agents for stand-in jobs, a short lease, the wall clock
(``tests.support.clock_jumps``), where it writes that it listens, and what was planted in it.

``python -m tests.support.chaos.control_plane_process OPTIONS`` (JSON, see ``Options``).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_contract import env_vars
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_service.commands.serve import ServeOptions, acquire_slots, open_database, serve
from ratchet_service.config.network import Listening
from ratchet_service.config.settings import Settings
from ratchet_service.config.standby_bounds import OFF, StandbyBounds
from ratchet_service.db import clock
from ratchet_service.errors import StartError
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import AGENT as REAL
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.local.standby import Standby
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler.loop import Reconciler
from ratchet_service.scheduling.machine import Machine
from ratchet_service.scheduling.scheduler import Preemption
from tests.support import clock_jumps
from tests.support.fake_trainer import AGENT
from tests.support.fork_server import RANKS, ROOT, TRAINERS, fork_agent

LEASE: Final = 5.0
"""Seconds, of reconcilers that are processes of their own: less than they are stopped for now and then."""
MIN_RUN: Final = 3.0
CLAIM: Final = 60.0
"""Seconds until a request whose process was killed may be made again; processes are stopped for less."""
STANDBY: Final = StandbyBounds(seconds=15.0)
"""Of a parked agent after its job has ended; so long none is parked again, too, after one has been killed."""
PARKED_BY: Final = "TEST_PARKED_BY"
"""Variable of agents: ``Options.listening`` of the process that has started them."""
Role = Literal["service", "api", "reconciler"]


@dataclass(frozen=True)
class Options:
    """``url``: the address that agents are told; ``listening``: the file where it says its port; ``jump``: see ``jumps``;
    ``standby``: it parks agents; ``hand_over``: see ``StruckStandby``; ``ends_with``: the process that real agents end with."""

    role: Role
    home: str
    database: str
    slots: int
    url: str
    listening: str
    jump: str
    standby: bool
    hand_over: str
    ends_with: str
    planted: str | None = None

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.chaos.control_plane_process", json.dumps(asdict(self))]


class StruckStandby(Standby):
    """Strikes in the moment in which a parked agent is given an attempt, where the file ``order`` asks for it. The file has a
    shell's commands, in which AGENT, SERVER and SERVICE are pids. It is renamed when they are run, beside the hand-over."""

    def __init__(self, bounds: StandbyBounds, order: Path) -> None:
        super().__init__(bounds)
        self._order = order

    def _raise_priority(self, parked: Any) -> None:
        super()._raise_priority(parked)
        try:
            commands = self._order.read_text()
            self._order.rename(self._order.with_name(f"{self._order.name}.{time.monotonic_ns()}"))
        except OSError:
            return
        pids = {"AGENT": parked.pid, "SERVER": parked.server, "SERVICE": os.getpid()}
        subprocess.run(["sh", "-c", commands], env={name: str(pid) for name, pid in pids.items()}, check=False)


class MixedLauncher(LocalLauncher):
    """A stand-in's agent for a spec that has a stand-in's plan, forked from what has imported it; the real one for all others, on
    which a service with ``standby`` starts as in earnest."""

    def __init__(self, home: HomePaths, options: Options) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": ROOT,
            env_vars.ENDS_WITH: options.ends_with,
            PARKED_BY: options.listening,
        }
        super().__init__(home, environ=environ, standby=STANDBY if options.standby else OFF)
        self.standby = StruckStandby(STANDBY if options.standby else OFF, Path(options.hand_over))

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        plan = super().plan(launch)
        agent = AGENT if "TRAINER" in launch.spec.env else (sys.executable, *REAL)
        return replace(plan, argv=(*agent, str(plan.ref.paths.launch_file)))

    def _start(self, plan: LaunchPlan, node: int, env: dict[str, str]) -> int:
        interpreter = TRAINERS
        if "TRAINER" not in plan.launch.spec.env:
            # Real ranks do without the tests. Nor had what they are forked from, without which they would outlive the run.
            interpreter, env = RANKS, {name: value for name, value in env.items() if name != "PYTHONPATH"}
            if self._parks:
                return super()._start(plan, node, env)
        paths = plan.ref.paths.node(node)
        paths.root.mkdir(parents=True, exist_ok=True)
        return fork_agent(interpreter.address, plan.argv, env, paths.agent_log) or super()._start(plan, node, env)


@dataclass(frozen=True)
class _Told(Listening):
    """Says on which port it listens; ``url`` is another's, which stands between."""

    file: str = ""

    @contextmanager
    def bind(self) -> Iterator[socket.socket]:
        with super().bind() as bound:
            told = Path(self.file)
            partial = told.with_suffix(".part")
            partial.write_text(json.dumps({"pid": os.getpid(), "port": bound.getsockname()[1]}))
            partial.rename(told)
            yield bound


def run(options: Options) -> None:
    """Until it is killed. Raises ``StartError``."""
    settings = Settings(home=Path(options.home), database_url=options.database, claim_seconds=CLAIM)
    launcher = MixedLauncher(HomePaths(settings.home), options)
    launchers = Launchers({launcher.kind: launcher})
    preemption = Preemption(min_run_seconds=MIN_RUN)
    if options.role != "reconciler":
        listen = _Told(url=options.url, file=options.listening)
        serve(
            ServeOptions(
                settings, listen, options.slots, options.role == "service", launchers=launchers, preemption=preemption
            )
        )
        return
    database = open_database(settings)
    acquire_slots(database, launchers)
    reconciler = Reconciler(
        database,
        settings.paths,
        launchers,
        Machine((), 4, options.slots).capacity,
        timing=Timing(launch_deadline=30.0, kill_after=5.0, linger=10.0),
        lease_seconds=LEASE,
        preemption=preemption,
    )
    signal.signal(signal.SIGTERM, lambda *_: reconciler.stop())
    reconciler.run()


def main(arguments: list[str]) -> int:
    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(relativeCreated)9.0f %(levelname)s %(name)s %(message)s"
    )
    given: dict[str, Any] = json.loads(arguments[0])
    options = Options(**given)
    clock_jumps.install(clock, Path(options.jump))
    if options.planted is not None:
        from tests.support.chaos.planted_faults import plant

        plant(options.planted)
    try:
        run(options)
    except StartError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
