"""What a step costs under each hook on a slow network: two hosts, one rank each, on a link of 1 Gbit/s and of 100 Mbit/s.

The hosts are network namespaces of this machine (see ``namespaces``). The ranks are the worker's own, started with what an agent
gives them, and run ``scripts/network.py``, a Session; only the agent is missing, which serves one machine so far. There is one
group of ranks per hook, all alive at once: they take turns on the link, so that every round has a block of steps of each, and a
ratio is taken between blocks of one round. ``RATCHET_BENCH_HOOKS`` (names as in the table, separated by commas) and
``RATCHET_BENCH_ROUNDS`` set what is measured.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from benchmarks.namespaces import ADDRESSES, INTERFACE, Link, NoNamespaces
from benchmarks.processes import logs
from benchmarks.stats import estimate, machine
from examples.demo.processes import DemoError, spool
from ratchet_contract import environment as names
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_hooks.summary import HookSummary
from ratchet_worker.launch_env import plan_ranks
from ratchet_worker.starter import ProcessStarter, RankProcess

SCRIPTS: Final = Path(__file__).with_name("scripts")
RATES: Final = {"1 Gbit/s": 1_000_000_000, "100 Mbit/s": 100_000_000}
LOW_RANK: Final = {"start_powerSGD_iter": 2}
HOOKS: Final[dict[str, dict[str, Any]]] = {
    "allreduce": {"name": "allreduce"},
    "fp16_compress": {"name": "fp16_compress"},
    "bf16_compress": {"name": "bf16_compress"},
    "quantization_pertensor": {"name": "quantization_pertensor"},
    "powerSGD rank 1": {"name": "powerSGD", "matrix_approximation_rank": 1, **LOW_RANK},
    "powerSGD rank 4": {"name": "powerSGD", "matrix_approximation_rank": 4, **LOW_RANK},
    "batched_powerSGD rank 1": {"name": "batched_powerSGD", "matrix_approximation_rank": 1, **LOW_RANK},
    "noop": {"name": "noop"},
}
AGAINST: Final = "allreduce"
WARM_UP: Final = 4  # steps: past the start of PowerSGD, and past DDP's rebuilding of its buckets
ROUNDS: Final = 8
_BLOCK_SECONDS: Final = 0.4
_LONGEST_BLOCK: Final = 20  # steps
_PORTS_FROM: Final = 20_000  # in a network of our own
_DEADLINE: Final = 180.0  # seconds, for the start of all ranks together, and for one turn


@dataclass(frozen=True)
class Model:
    """``depth`` square layers of ``width``; ``batch``: samples per rank."""

    width: int
    depth: int
    batch: int


MODEL: Final = Model(1024, 8, 32)  # 33.6 MB of gradients


@dataclass(frozen=True)
class Measured:
    """Of one hook at one rate: seconds of a step in each block, bytes that a rank sends per step as counted at its interface."""

    seconds: list[float]
    wire: float


def main() -> None:
    wanted = os.environ.get("RATCHET_BENCH_HOOKS", ",".join(HOOKS)).split(",")
    if unknown := sorted(set(wanted) - set(HOOKS)):
        raise SystemExit(f"RATCHET_BENCH_HOOKS: no {', '.join(unknown)} here; there are {', '.join(HOOKS)}")
    print(machine())
    rounds = int(os.environ.get("RATCHET_BENCH_ROUNDS", ROUNDS))
    try:
        tables({name: spec for name, spec in HOOKS.items() if name in wanted or name == AGAINST}, MODEL, RATES, rounds)
    except NoNamespaces as error:
        raise SystemExit(f"network: not measured. {error}") from error


def tables(hooks: Mapping[str, Mapping[str, Any]], model: Model, rates: Mapping[str, int], rounds: int) -> None:
    """Start a group per hook, measure at each rate, print a table for each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-bench-")))
        link = stack.enter_context(Link())
        groups: dict[str, Group] = {}
        for name, hook in hooks.items():
            groups[name] = Group(link, folder / str(len(groups)), hook, model, _PORTS_FROM + len(groups))
            stack.callback(groups[name].kill)
        for group in groups.values():
            group.ready()
            group.turn(WARM_UP)
        for rate, bits in rates.items():
            link.limit(bits)
            measured = measure(link, groups, rounds)
            _table(rate, bits, measured, {name: group.summary() for name, group in groups.items()})
    print(
        f"ratio: a block of steps / the block of {AGAINST} in the same round. sent: bytes per step and rank, as the hook's\n"
        "summary counts them; wire: as the interface does. limit: `sent` at the rate of the link, in both directions at once.\n"
        "noop does not communicate: its time is that of computing alone."
    )


def measure(link: Link, groups: Mapping[str, Group], rounds: int) -> dict[str, Measured]:
    """``rounds`` blocks of each group, by turns."""
    blocks: dict[str, int] = {}
    before: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    wire = dict.fromkeys(groups, 0)
    for name, group in groups.items():
        blocks[name] = min(_LONGEST_BLOCK, max(1, math.ceil(_BLOCK_SECONDS / group.turn(1))))
        before[name] = 0 if blocks[name] == 1 else 1  # a step of a second or more hardly feels what this is for
    for number in range(rounds):
        for name in list(groups)[:: 1 if number % 2 == 0 else -1]:
            sent = link.sent(0)
            seconds[name].append(groups[name].turn(blocks[name], before=before[name]) / blocks[name])
            wire[name] += link.sent(0) - sent
    return {name: Measured(seconds[name], wire[name] / (rounds * (blocks[name] + before[name]))) for name in groups}


def _table(rate: str, bits: int, measured: Mapping[str, Measured], summaries: Mapping[str, HookSummary]) -> None:
    base = measured[AGAINST].seconds
    print(_line(rate, "ms per step [95 %]", f"ratio to {AGAINST} [95 %]", "sent", "wire", "limit", "time / limit"))
    for name, of_hook in measured.items():
        sent = summaries[name].bytes_after or 0
        milliseconds = estimate([1e3 * value for value in of_hook.seconds])
        ratio = estimate([a / b for a, b in zip(of_hook.seconds, base, strict=True)])
        limit = sent * 8 / bits * 1e3
        share = f"{milliseconds.median / limit:.2f}" if limit else "-"
        figures = (f"{sent / 1e6:.3f} MB", f"{of_hook.wire / 1e6:.3f} MB", f"{limit:.1f} ms", share)
        time_ = f"{milliseconds.median:.1f} [{milliseconds.low:.1f}, {milliseconds.high:.1f}]"
        print(_line(f"  {name}", time_, str(ratio), *figures), flush=True)


def _line(title: str, time_: str, ratio: str, sent: str, wire: str, limit: str, share: str) -> str:
    return f"{title:<26} {time_:<26} {ratio:<28} {sent:>10} {wire:>10} {limit:>10} {share:>13}"


class Group:
    """The ranks of one job, one per host, and the sockets over which they get their turns."""

    def __init__(self, link: Link, home: Path, hook: Mapping[str, Any], model: Model, port: int) -> None:
        self._ranks: list[RankProcess] = []
        self._streams: list[TextIO] = []
        home.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(home / "turns"))
        self._listener.listen()
        self._listener.settimeout(1.0)
        self.attempt = HomePaths(home).job("bench").attempt(1)
        spec = _spec(hook, model, home / "turns")
        for node in range(len(ADDRESSES)):
            self._ranks.append(_start(link, _launch(home, self.attempt, spec, node), node, port))

    def ready(self) -> None:
        """Wait until every rank asks for a turn."""
        end = time.monotonic() + _DEADLINE
        while len(self._streams) < len(self._ranks):
            try:
                channel, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > end or any(rank.exit_code() is not None for rank in self._ranks):
                    raise self._failed("a group did not start") from None
                continue
            channel.settimeout(_DEADLINE)
            self._streams.append(channel.makefile("rw"))
            channel.close()  # the stream keeps it
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int, *, before: int = 0) -> float:
        """Seconds that the slower rank took for ``steps`` steps behind ``before`` others, from barrier to barrier.

        The ranks run only meanwhile: even idle ones look after their job's wishes, for a percent of a core each."""
        self._signal(signal.SIGCONT)
        for stream in self._streams:
            stream.write(f"{before} {steps}\n")
            stream.flush()
        try:
            seconds = max(float(json.loads(stream.readline())) for stream in self._streams)
        except (OSError, ValueError) as error:
            raise self._failed(f"a group did not do its {steps} steps") from error
        self._signal(signal.SIGSTOP)
        return seconds

    def summary(self) -> HookSummary:
        """Rank 0's newest report of its hook from behind the warm-up; with further steps where there is none yet."""
        end = time.monotonic() + _DEADLINE
        while time.monotonic() < end:
            found = [HookSummary.model_validate(m["summary"]) for m in spool(self.attempt, 0) if m["kind"] == "hook"]
            if found and found[-1].step >= WARM_UP:
                return found[-1]
            self.turn(1)
        raise self._failed("a rank reported nothing of its hook")

    def kill(self) -> None:
        """Nothing of a measurement is worth a last checkpoint."""
        for rank in self._ranks:
            rank.kill_group()
            rank.reap()
        for stream in self._streams:
            stream.close()
        self._listener.close()

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            os.kill(rank.pid, number)

    def _failed(self, text: str) -> DemoError:
        return DemoError(f"{text}\n{logs(self.attempt)}")


def _spec(hook: Mapping[str, Any], model: Model, turns: Path) -> JobSpec:
    """Not through ``parse_spec``: it refuses several nodes, for which there is no launcher yet."""
    arguments = {**vars(model), "turns": turns}
    return JobSpec.model_validate(
        {
            "name": "bench-network",
            "code": {"path": str(SCRIPTS)},
            "script": ["network.py", *(str(part) for key, value in arguments.items() for part in (f"--{key}", value))],
            "world": {"nodes": len(ADDRESSES), "ranks_per_node": 1, "device": "cpu"},
            "env": {"GLOO_SOCKET_IFNAME": INTERFACE},
            "hook": dict(hook),
            "checkpoint": {"every_steps": None},
        }
    )


def _launch(home: Path, attempt: AttemptPaths, spec: JobSpec, node: int) -> LaunchFile:
    job = HomePaths(home).job("bench")
    job.work.mkdir(parents=True, exist_ok=True)
    return LaunchFile(
        job_id="bench",
        epoch=1,
        node=node,
        world_size=spec.world.size,
        ranks=[node],
        spec=spec,
        resolved=Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable),
        job_root=str(job.root),
        attempt_dir=str(attempt.root),
        code_dir=str(SCRIPTS),
        workdir=str(job.work),
        report_token="none",
        service_file=str(HomePaths(home).service_file),
    )


def _start(link: Link, launch: LaunchFile, node: int, port: int) -> RankProcess:
    """A rank of the agent's own making, on its host. Rank 0 opens the rendezvous' socket itself: here is another host."""
    attempt = AttemptPaths(Path(launch.attempt_dir))
    file = attempt.root / f"launch-{node}.json"
    attempt.root.mkdir(parents=True, exist_ok=True)
    file.write_text(launch.model_dump_json())
    (plan,) = plan_ranks(launch, attempt, store_port=port, store_fd=None, inherited=os.environ)
    env = {**plan.env, names.LAUNCH_FILE: str(file), names.MASTER_ADDR: ADDRESSES[0]}
    command: Sequence[str] = [*link.command(node), *plan.command]
    return ProcessStarter().start(replace(plan, command=command, env=env))


if __name__ == "__main__":
    main()
