"""What a step costs under Ratchet's loop beyond the same step written by hand, per hook, at two model sizes; and with everything
on, which adds a save every 50 steps.

A real job of two ranks under a real service and agent runs ``scripts/step.py``, which alternates blocks of steps of both loops
in one process. The ratio of a pair of blocks is free of whatever slows the machine for longer than a pair; the median over the
pairs comes with its 95 % interval, and blocks of one and the same loop against each other show what the method itself sees.
``RATCHET_BENCH_PAIRS`` (default 40, and 24 for the large model), ``RATCHET_BENCH_BLOCK`` (steps, where nothing is saved) and
``RATCHET_BENCH_SIZES`` (``small,large,many,everything-small,everything-large``) set the size.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import agent_pid, attempt_paths, cpu_shares, ended, logs, until
from benchmarks.stats import estimate, machine
from examples.demo.processes import DemoError, Service, spool

SCRIPTS: Final = Path(__file__).with_name("scripts")
RANKS: Final = 2
HOOKS: Final[dict[str, dict[str, Any]]] = {
    "allreduce": {"name": "allreduce"},
    "fp16_compress": {"name": "fp16_compress"},
    "powerSGD": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 2},
}


BUCKET_CAP_MB: Final = {"powerSGD": 1024}
"""One bucket: with more of them the all-reduces of torch's own hook cross on gloo, and the process aborts. Else DDP's default."""


@dataclass(frozen=True)
class Size:
    """A model and how it is measured. ``batch``: samples per rank; ``block``: steps that are timed together. ``aim``: the lower
    end of the ratio's interval is to be at most this; each block then has one save, near its start. None: nothing is saved."""

    width: int
    depth: int
    batch: int
    block: int
    pairs: int
    aim: float | None = None


SIZES: Final = {
    "small": Size(512, 4, 32, 20, 40),
    "large": Size(2048, 6, 32, 2, 24),
    "many": Size(64, 250, 32, 4, 24),  # 500 small tensors
    "everything-small": Size(512, 4, 32, 50, 40, 1.03),
    "everything-large": Size(2048, 6, 32, 50, 40, 1.02),
}
ONE_HOOK: Final = dict.fromkeys(("many", "everything-small", "everything-large"), ("allreduce",))
"""Sizes that are there for what a step costs by tensors or saves, whatever the hook."""
WARM_UP: Final = 5  # steps before the first block; past START_ITERATION of powerSGD


def main() -> None:
    names = os.environ.get("RATCHET_BENCH_SIZES", ",".join(SIZES)).split(",")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        service = Service(Path(folder) / "home")
        try:
            service.start()
            table(service, Path(folder), {name: _size(name) for name in names})
        finally:
            service.stop()
        # in a process of its own, whose torch makes its directories in this folder
        subprocess.run([sys.executable, "-m", "benchmarks.walk"], env={**os.environ, "TMPDIR": folder}, check=True)


def table(service: Service, folder: Path, sizes: Mapping[str, Size], hooks: Sequence[str] = tuple(HOOKS)) -> None:
    """One job, and one line, per size and hook."""
    columns = ("ratio of a pair [95 %]", "of CPU time [95 %]", "control [95 %]", "us per step", "by hand", "no hook")
    print(_line("", *columns, "CPU of agent, service, own threads"))
    for name, size in sizes.items():
        for hook in ONE_HOOK.get(name, hooks):
            _row(name, hook, size, _measure(service, hook, size, folder))
    print(
        "ratio: Ratchet's loop / hand-written loop, torch's hook. control: neighbouring blocks of one and the same loop."
    )


def _size(name: str) -> Size:
    size = SIZES[name]
    pairs = int(os.environ.get("RATCHET_BENCH_PAIRS", size.pairs))
    block = int(os.environ.get("RATCHET_BENCH_BLOCK", size.block)) if size.aim is None else size.block
    return replace(size, block=block, pairs=pairs)


def _measure(service: Service, hook: str, size: Size, folder: Path) -> dict[str, Any]:
    """Run one job; what its rank 0 measured, and the CPU seconds of agent and service meanwhile."""
    # A block has one step that is not timed; the save is after the third.
    every, warm_up = (None, WARM_UP) if size.aim is None else (size.block + 1, size.block - 2)
    arguments = {"hook": hook, **asdict(size), "warm-up": warm_up, "out": str(folder / "result.json")}
    del arguments["aim"]
    if hook in BUCKET_CAP_MB:
        arguments["bucket-cap-mb"] = BUCKET_CAP_MB[hook]
    spec = {
        "name": "bench-step",
        "code": {"path": str(SCRIPTS)},
        "script": ["step.py", *(text for key, value in arguments.items() for text in (f"--{key}", str(value)))],
        "world": {"ranks_per_node": RANKS, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "hook": HOOKS[hook],
        "ddp": {"bucket_cap_mb": BUCKET_CAP_MB.get(hook)},
        "checkpoint": {"every_steps": every, "first": "off", "keep_last": 2},
    }
    job = service.client.submit(spec)
    attempt = attempt_paths(service, job.id)
    begun, out = Path(arguments["out"] + ".begun"), Path(arguments["out"])
    until("the measurement to begin", begun.exists, 120, attempt)
    pids = {"agent": agent_pid(attempt), "service": service.pid}
    shares = cpu_shares(pids, lambda: until("the measurement to end", out.exists, 1200, attempt))
    until("the job to end", lambda: ended(attempt), 60, attempt)
    saves = [m["seconds"] for m in spool(attempt, 0) if m["kind"] == "checkpoint" and m["reason"] == "schedule"]
    if every is not None and len(saves) < size.pairs:
        raise DemoError(f"{len(saves)} saves in {size.pairs} blocks\n{logs(attempt)}")
    result = {**json.loads(out.read_text()), "cpu": shares, "saves": saves}
    begun.unlink()
    out.unlink()
    return result


def _row(name: str, hook: str, size: Size, result: dict[str, Any]) -> None:
    wall = {key: [block[0] for block in blocks] for key, blocks in result["blocks"].items()}
    cpu = {key: [block[1] for block in blocks] for key, blocks in result["blocks"].items()}
    each = {key: statistics.median(values) / size.block * 1e6 for key, values in wall.items()}
    own = sum(result["own_threads"].values()) / result["spent"]
    loads = ", ".join(f"{share:.1%}" for share in (*result["cpu"].values(), own))
    title = f"{name} {hook} ({result['parameters'] / 1e6:.1f} M)"
    ratios = (estimate(_pairs(wall)), estimate(_pairs(cpu)), estimate(_control(wall["managed"], wall["plain"])))
    times = (f"{each[key]:.0f}" for key in ("managed", "plain", "alone"))
    print(_line(title, *map(str, ratios), *times, loads), flush=True)
    made, empty = (estimate([s * 1e6 for s in result["fingerprints"][key]]) for key in ("made", "empty"))
    share = [made.median / each["managed"], made.low / each["managed"], made.high / each["managed"]]
    if size.aim is not None:
        verdict = "met" if ratios[0].low <= size.aim else "not met"
        seconds = statistics.median(result["saves"])
        print(f"  a save every {size.block} steps, of {seconds:.3f} s; aim: lower end <= {size.aim:.2f}, {verdict}")
    print(
        f"  fingerprint of a step: {made.median:.1f} [{made.low:.1f}, {made.high:.1f}] us, "
        f"{share[0]:.2%} [{share[1]:.2%}, {share[2]:.2%}] of a step; "
        f"an empty tensor of 5 KB before it {empty.median:.1f} us"
    )


def _line(title: str, pairs: str, cpu: str, control: str, ours: str, plain: str, alone: str, loads: str) -> str:
    return f"{title:<28} {pairs:<22} {cpu:<22} {control:<22} {ours:>11} {plain:>9} {alone:>9}  {loads}"


def _pairs(blocks: Mapping[str, list[float]]) -> list[float]:
    return [a / b for a, b in zip(blocks["managed"], blocks["plain"], strict=True)]


def _control(managed: list[float], plain: list[float]) -> list[float]:
    """Ratios of two blocks of one loop that followed each other directly, where a pair is turned around; by turns upside down, so
    that a drift of the machine does not look like a difference."""
    twos = [(loop[i], loop[i + 1]) for i in range(0, len(plain) - 1, 2) for loop in [plain if i % 4 == 0 else managed]]
    return [a / b if i % 4 < 2 else b / a for i, (a, b) in enumerate(twos)]


if __name__ == "__main__":
    main()
