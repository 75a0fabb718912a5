"""How long it takes to begin, and to begin again: the control plane's start, a job's first step, the first step after a kill.

Each against what people use today, in the same run: the bare imports of the libraries, and ``torchrun`` running the very same
script. Rounds are interleaved; the ratio of a round is free of what slows the machine for longer than a round.
``RATCHET_BENCH_ROUNDS`` (default 6) sets how many.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.runs import Run, run_ratchet, run_torchrun
from benchmarks.stats import estimate, machine
from examples.demo.processes import DemoError, Service
from ratchet_client import RatchetClient
from ratchet_contract.paths import HomePaths

LIBRARIES: Final = "import fastapi, sqlalchemy, uvicorn"


def main() -> None:
    rounds = int(os.environ.get("RATCHET_BENCH_ROUNDS", "6"))
    print(f"CPU, one machine: {machine()}; {rounds} interleaved rounds, medians [95 %]")
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        control_plane(Path(folder), rounds)
        cold = Service(Path(folder) / "cold", "--standby", "off")
        warm = Service(Path(folder) / "warm", "--standby", "on")
        try:
            cold.start(), warm.start()
            jobs(cold, warm, Path(folder), rounds)
        finally:
            cold.stop()
            warm.stop()


# --- the control plane ---------------------------------------------------------------------------------------------------


def control_plane(folder: Path, rounds: int) -> None:
    """Starts of the service against the bare imports of its libraries."""
    ready, bare, torch, memory = [], [], [], (0, 0, False)
    for number in range(rounds):
        seconds, memory = _serve(folder / f"serve-{number}")
        ready.append(seconds)
        bare.append(_python(LIBRARIES))
        torch.append(_python("import torch"))
    ratios = [a / b for a, b in zip(ready, bare, strict=True)]
    print("\ncontrol plane")
    print(f"  ratchet serve -> /readyz answers      {estimate(ready)} s")
    print(f"  limit: python -c '{LIBRARIES}'   {estimate(bare)} s; ratio {estimate(ratios)}")
    rss, pss, has_torch = memory
    print(f"  memory when ready: RSS {rss / 1024:.0f} MB, PSS {pss / 1024:.0f} MB; "
          f"libtorch in its maps: {'YES' if has_torch else 'no'}")  # fmt: skip
    print(f"  for comparison: python -c 'import torch'   {estimate(torch)} s")


def _serve(home: Path) -> tuple[float, tuple[int, int, bool]]:
    """Seconds from exec to the first ``ok`` of /readyz; then RSS and PSS (kB), and whether libtorch is mapped."""
    home.mkdir()
    command = [str(Path(sys.executable).with_name("ratchet")), "serve", "--home", str(home)]
    file = HomePaths(home).service_file
    with (home / "service.log").open("wb") as log, RatchetClient(home=home, retry_for=0.0) as client:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not (file.exists() and _ready(client)):
                if process.poll() is not None:
                    raise RuntimeError(f"the service ended at once: {(home / 'service.log').read_text()[-2000:]}")
                time.sleep(0.002)
            seconds = time.perf_counter() - begin
            return seconds, _memory(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _ready(client: RatchetClient) -> bool:
    with suppress(Exception):
        return client.ready()
    return False


def _memory(pid: int) -> tuple[int, int, bool]:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in rollup if line.startswith(("Rss:", "Pss:"))}
    return found["Rss"], found["Pss"], "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def _python(program: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - begin


# --- jobs ----------------------------------------------------------------------------------------------------------------


TORCHRUN: Final = "torchrun, plain.py"
SCRIPTS: Final = {
    "the same plain.py": "plain.py", "as a Session": "managed.py", "as a Task": "startup_task:StartupTask"
}  # fmt: skip
COLD: Final = {f"Ratchet, {name}, cold": script for name, script in SCRIPTS.items()}
PARKED: Final = {f"Ratchet, {name}, parked": script for name, script in SCRIPTS.items()}


FIRST_AIM: Final = 0.20
AGAIN_AIM: Final = 0.15
"""Aims of parked starts: ratios to torchrun."""


def jobs(
    cold: Service, warm: Service, folder: Path, rounds: int, ways: Sequence[str] = (TORCHRUN, *COLD, *PARKED)
) -> None:
    """First steps and restarts, the ways by turns; the others are compared with the first of ``ways``. ``warm``: a service
    that parks agents."""
    kinds = 0
    for script in ("plain.py", SCRIPTS["as a Task"]):  # the first start of each kind finds none
        kinds += 1
        run_ratchet(warm, script, Path(tempfile.mkdtemp(dir=folder)), parked=kinds)
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in ways if number % 2 == 0 else reversed(ways):
            place = Path(tempfile.mkdtemp(dir=folder))
            if name in PARKED:
                run = run_ratchet(warm, PARKED[name], place, parked=kinds)
            else:
                run = run_ratchet(cold, COLD[name], place) if name in COLD else _torchrun(place)
            runs[name].append(run)
    table("start -> first training step of rank 0 (POST, or exec of torchrun)", runs, lambda run: run.first, FIRST_AIM)
    table("SIGKILL of rank 1 -> first step of the restarted group", runs, lambda run: run.again, AGAIN_AIM)
    parts_table("where the time to the first step goes", runs, lambda run: run.first_parts)
    parts_table("where the time after the kill goes", runs, lambda run: run.again_parts)


def _torchrun(folder: Path, tries: int = 4) -> Run:
    """Its restarted ranks sometimes hang in ``init_process_group``; that is said, and the run made again."""
    for _ in range(tries - 1):
        try:
            return run_torchrun(Path(tempfile.mkdtemp(dir=folder)))
        except DemoError as error:
            print(f"  torchrun did not come back, once more: {str(error).splitlines()[0]}", flush=True)
    return run_torchrun(Path(tempfile.mkdtemp(dir=folder)))


def table(title: str, runs: dict[str, list[Run]], seconds: Callable[[Run], float], aim: float | None = None) -> None:
    """Print seconds and ratios to the first way. ``aim``: the largest ratio wanted of parked starts."""
    print(f"\n{title}")
    base = [seconds(run) for run in next(iter(runs.values()))]
    for name, found in runs.items():
        values = [seconds(run) for run in found]
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        wanted = ""
        if aim is not None and name in PARKED:
            wanted = f"   aim {aim:.2f}: {'met' if statistics.median(ratios) <= aim else 'MISSED'}"
        print(f"  {name:<36} {estimate(values)} s   ratio {estimate(ratios)}{wanted}")


def parts_table(title: str, runs: dict[str, list[Run]], parts: Callable[[Run], dict[str, float]]) -> None:
    print(f"\n{title} (medians, s)")
    for name, found in runs.items():
        several = [parts(run) for run in found]
        medians = {key: statistics.median(each[key] for each in several) for key in several[0]}
        print(f"  {name:<36} " + ", ".join(f"{key} {value:.2f}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
