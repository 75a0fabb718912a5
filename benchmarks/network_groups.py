"""Groups of ranks for ``benchmarks.network``, one rank per host: a job's, and those of a script that is written by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from benchmarks.namespaces import ADDRESSES, INTERFACE, Link
from benchmarks.processes import logs
from examples.demo.processes import DemoError, spool
from ratchet_contract import env_vars as names
from ratchet_contract.checkpoint.manifest import HOOK_SUMMARY
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_hooks.summary import HookSummary
from ratchet_worker.agent.rank_environment import plan_ranks
from ratchet_worker.agent.rank_starter import RankPlan
from ratchet_worker.agent.rendezvous import Rendezvous

SCRIPTS: Final = Path(__file__).with_name("scripts")
WARM_UP: Final = 4  # steps: past the start of PowerSGD, and past DDP's rebuilding of its buckets
_DEADLINE: Final = 180.0  # seconds, for the start of all ranks together, and for one turn


@dataclass(frozen=True)
class Model:
    """``depth`` square layers of ``width``; ``batch``: samples per rank."""

    width: int
    depth: int
    batch: int


@dataclass(frozen=True)
class Training:
    """``hook``: of a spec; with ``by_hand`` the arguments of ``stock.register``, without any of which DDP has no hook.
    ``bucket_cap_mb``: MiB; None: DDP's default."""

    hook: Mapping[str, Any]
    by_hand: bool = False
    bucket_cap_mb: float | None = None

    def script(self, model: Model, turns: Path) -> list[str]:
        """The script in ``SCRIPTS`` and its arguments."""
        arguments: dict[str, object] = {**vars(model), "turns": turns}
        if self.by_hand and self.hook:
            arguments["hook"] = json.dumps(dict(self.hook))
        if self.by_hand and self.bucket_cap_mb is not None:
            arguments["bucket-cap-mb"] = self.bucket_cap_mb
        words = [str(part) for key, value in arguments.items() for part in (f"--{key}", value)]
        return ["network_by_hand.py" if self.by_hand else "network.py", *words]


class Group:
    """Its ranks, one per host, and the sockets over which they get their turns."""

    def __init__(self, link: Link, home: Path, training: Training, model: Model, port: int) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._streams: list[TextIO] = []
        home.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(home / "turns"))
        self._listener.listen()
        self._listener.settimeout(1.0)
        self.attempt = HomePaths(home).job("bench").attempt(1)
        script = training.script(model, home / "turns")
        for node in range(len(ADDRESSES)):
            plan = _plan(_launch(home, self.attempt, _spec(training, script), node), port)
            if training.by_hand:
                command = [sys.executable, str(SCRIPTS / script[0]), *script[1:]]
                plan = replace(plan, command=command, env=_torchs_own(plan.env))
            self._ranks.append(_start(plan, link.command(node)))

    def ready(self) -> None:
        """Wait until every rank asks for a turn."""
        end = time.monotonic() + _DEADLINE
        while len(self._streams) < len(self._ranks):
            try:
                channel, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > end or any(rank.poll() is not None for rank in self._ranks):
                    raise self._failed("a group did not start") from None
                continue
            channel.settimeout(_DEADLINE)
            self._streams.append(channel.makefile("rw"))
            channel.close()  # the stream keeps it
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int, *, before: int = 0) -> tuple[float, float]:
        """Seconds that the slower rank took for ``steps`` steps behind ``before`` others, from barrier to barrier, and CPU
        seconds of all ranks meanwhile.

        The ranks run only then: even idle ones look after their job's wishes, for a percent of a core each."""
        self._signal(signal.SIGCONT)
        for stream in self._streams:
            stream.write(f"{before} {steps}\n")
            stream.flush()
        try:
            took = [json.loads(stream.readline()) for stream in self._streams]
        except (OSError, ValueError) as error:
            raise self._failed(f"a group did not do its {steps} steps") from error
        self._signal(signal.SIGSTOP)
        return max(seconds for seconds, _ in took), sum(cpu for _, cpu in took)

    def summary(self) -> HookSummary:
        """Of a job: rank 0's newest report of its hook from behind the warm-up; with further steps where there is none yet."""
        end = time.monotonic() + _DEADLINE
        while time.monotonic() < end:
            found = [HOOK_SUMMARY.validate_python(m["summary"]) for m in spool(self.attempt, 0) if m["kind"] == "hook"]
            if found and found[-1].step >= WARM_UP:
                return found[-1]
            self.turn(1)
        raise self._failed("a rank reported nothing of its hook")

    def kill(self) -> None:
        """Nothing of a measurement is worth a last checkpoint."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        for stream in self._streams:
            stream.close()
        self._listener.close()

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            os.kill(rank.pid, number)

    def _failed(self, text: str) -> DemoError:
        return DemoError(f"{text}\n{logs(self.attempt)}")


def _spec(training: Training, script: Sequence[str]) -> JobSpec:
    """Not through ``parse_spec``: it refuses several nodes, for which there is no launcher yet."""
    return JobSpec.model_validate(
        {
            "name": "bench-network",
            "code": {"path": str(SCRIPTS)},
            "script": list(script),
            "world": {"nodes": len(ADDRESSES), "ranks_per_node": 1, "device": "cpu"},
            "hook": {"name": "allreduce"} if training.by_hand else dict(training.hook),
            "ddp": {"bucket_cap_mb": training.bucket_cap_mb},
            "checkpoint": {"every_steps": None},
        }
    )


def _launch(home: Path, attempt: AttemptPaths, spec: JobSpec, node: int) -> LaunchFile:
    job = HomePaths(home).job("bench")
    job.work_dir.mkdir(parents=True, exist_ok=True)
    return LaunchFile(
        job_id="bench",
        attempt=1,
        node=node,
        world_size=spec.world.size,
        ranks=[node],
        spec=spec,
        resolved=Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable),
        job_root=str(job.root),
        attempt_dir=str(attempt.root),
        code_dir=str(SCRIPTS),
        workdir=str(job.work_dir),
        report_token="none",
        service_file=str(HomePaths(home).service_file),
    )


def _plan(launch: LaunchFile, port: int) -> RankPlan:
    """A rank of the agent's own making. Rank 0 opens the rendezvous' socket itself: here is another host."""
    attempt = AttemptPaths(Path(launch.attempt_dir))
    file = attempt.root / f"launch-{launch.node}.json"
    attempt.root.mkdir(parents=True, exist_ok=True)
    file.write_text(launch.model_dump_json())
    (plan,) = plan_ranks(launch, attempt, Rendezvous(ADDRESSES[0], port, INTERFACE, None), inherited=os.environ)
    return replace(plan, env={**plan.env, names.LAUNCH_FILE: str(file)})


def _start(plan: RankPlan, prefix: Sequence[str]) -> subprocess.Popen[bytes]:
    """Behind ``prefix``, which puts it on its host; leader of a session, as every rank is."""
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    with plan.log.open("ab") as log:
        return subprocess.Popen(
            [*prefix, *plan.command], cwd=plan.cwd, env=dict(plan.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def _torchs_own(env: Mapping[str, str]) -> dict[str, str]:
    """A rank's variables but for Ratchet's, and for those of an agent that serves the rendezvous, which rank 0 does here."""
    return {key: value for key, value in env.items() if not key.startswith(("RATCHET_", "TORCHELASTIC_"))}
