"""The service against Ray Jobs: submissions a second, seconds from a submission to the first line of the script, and memory.

``RATCHET_BENCH_RAY`` names a Python with ``ray[default]``. Without it, an environment of its own is made in the run's temporary
directory; if it cannot be made, Ray is left out. Both get the same script over HTTP, eight jobs at a time on eight slots, by
turns, after a first job that is not measured. What differs: a Ray job is a plain command, which imports nothing. A job of Ratchet
has imported torch before its script begins, has a snapshot of its code, and is stored durably before the answer. So Ray is also
measured with a command that imports torch.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx

from benchmarks.service_slots import SLOTS, park, stamps, submit
from examples.demo.processes import Service, wait_for
from ratchet_contract.processes import procfs

_ROUNDS: Final = 4
_SECONDS: Final = 1.0
"""Of a job."""
_DEADLINE: Final = 900.0
_SLEEP: Final = Path(__file__).with_name("scripts") / "stamped_sleep.py"


def against_ray(folder: Path) -> None:
    """Print the table, or why it is left out."""
    python = _ray_python(folder)
    if python is None:
        print(
            "\nRay Jobs: left out, since ray[default] cannot be installed; RATCHET_BENCH_RAY names a Python that has it"
        )
        return
    cold = Service(folder / "cold", "--standby", "off", "--cpu-slots", str(SLOTS))
    warm = Service(folder / "warm", "--standby", f"processes={SLOTS}", "--cpu-slots", str(SLOTS))
    try:
        cold.start(), warm.start()
        with ray_head(python, folder / "ray") as (url, pid):
            _compare(folder, cold, warm, url, pid)
    finally:
        cold.stop()
        warm.stop()


def _compare(folder: Path, cold: Service, warm: Service, url: str, ray: int) -> None:
    plain = f"{sys.executable} {_SLEEP}"
    torch = f"{sys.executable} -c 'import torch, runpy, sys; sys.argv[0:1] = []; runpy.run_path(sys.argv[0])' {_SLEEP}"
    ways: dict[str, Callable[[Path], object]] = {
        "Ratchet, cold": lambda out: submit(cold, out, _SECONDS),
        "Ratchet, parked": lambda out: submit(warm, out, _SECONDS),
        "Ray Jobs": lambda out: _submit_to_ray(url, f"{plain} {out} {_SECONDS}"),
        "Ray Jobs, import torch": lambda out: _submit_to_ray(url, f"{torch} {out} {_SECONDS}"),
    }
    control = {"Ratchet, cold": [cold.pid], "Ratchet, parked": [warm.pid]}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    waits: dict[str, list[float]] = {name: [] for name in ways}
    memory = {name: _pss(control.get(name) or [ray, *procfs.live_descendants(ray)]) for name in ways}
    (folder / "first").mkdir()
    for number, way in enumerate(ways.values()):
        way(folder / "first" / f"job-{number}")
    wait_for("the first jobs", lambda: len(stamps(folder / "first", 2)) == len(ways), _DEADLINE, folder)
    for number in range(_ROUNDS):
        for name, way in ways.items():
            place = folder / f"{name.replace(' ', '-')}-{number}"
            place.mkdir()
            if name == "Ratchet, parked":
                park(warm, place / "first")
            asked = []
            begin = time.perf_counter()
            for job in range(SLOTS):
                asked.append((place / f"job-{job}", time.time()))
                way(place / f"job-{job}")
            rates[name].append(SLOTS / (time.perf_counter() - begin))
            wait_for(f"the jobs of {name}", lambda place=place: len(stamps(place, 2)) == SLOTS, _DEADLINE, folder)
            waits[name] += [float(out.read_text().split()[0]) - at for out, at in asked]
    print(
        f"\n{SLOTS} jobs at a time, {_ROUNDS} rounds: submissions a second; submission to the script's first line; memory"
    )
    for name in ways:
        found = sorted(waits[name])
        p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
        print(f"  {name:<23} {statistics.median(rates[name]):6.1f} /s; median {statistics.median(found):.2f} s", end="")
        print(f", p99 {p99:.2f} s; control plane at rest {memory[name]:.0f} MB (PSS)")


def _submit_to_ray(url: str, entrypoint: str) -> None:
    body = {"entrypoint": entrypoint, "entrypoint_num_cpus": 1, "submission_id": f"bench-{secrets.token_hex(6)}"}
    answer = _client.post(f"{url}/api/jobs/", json=body)
    answer.raise_for_status()


_client: Final = httpx.Client(timeout=60.0)


def _pss(pids: list[int]) -> float:
    """MB (1e6 bytes) of memory, shared pages by their share."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e6


def _ray_python(folder: Path) -> Path | None:
    if given := os.environ.get("RATCHET_BENCH_RAY"):
        return Path(given)
    place = folder / "ray-environment"
    python = place / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "ray[default]"]
    for command in ([sys.executable, "-m", "venv", str(place)], install):
        if subprocess.run(command, capture_output=True).returncode:
            return None
    return python


@contextmanager
def ray_head(python: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """A Ray cluster of this machine with its dashboard, in ``folder``; its URL, and the pid of its first process."""
    folder.mkdir()
    port, dashboard = _free_port(), _free_port()
    command = [str(python.with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--num-cpus={SLOTS}", f"--port={port}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    command += [f"--temp-dir={folder}", "--object-store-memory=100000000"]
    url = f"http://127.0.0.1:{dashboard}"
    log = folder / "head.log"
    with log.open("wb") as out:
        head = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for("Ray's dashboard", lambda: _answers(f"{url}/api/jobs/"), 120.0, log)
        yield url, head.pid
    finally:
        pids = [*procfs.live_descendants(head.pid), head.pid]
        head.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            head.wait(30.0)
        for pid in pids:
            procfs.kill(pid)
        head.wait()


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError, json.JSONDecodeError):
        return _client.get(url).status_code == 200
    return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
