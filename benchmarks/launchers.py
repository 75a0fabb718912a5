"""How long a job takes to begin, and to begin again, by its launcher: what the engine adds to processes of this machine.

The same script, as a Session, on two ranks: as processes, as a batch job of one node, as one of two nodes, as two pods. Slurm is
a real one, all on this machine, which has nothing else to run: a queue's wait is not in the figures. Kubernetes is the tests'
model of it (``tests/support/kube``), which starts pods as processes and pulls no images: of its figures only what Ratchet does
counts. Needs root and Slurm's packages. ``RATCHET_BENCH_ROUNDS`` (default 5) sets how many.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.runs import Run, run_ratchet
from benchmarks.startup import parts_table, table
from benchmarks.stats import estimate, machine
from examples.demo.processes import Service
from tests.support.engines import STRANGER
from tests.support.kube.cluster import Cluster
from tests.support.slurm import missing_reason, slurm_cluster
from tests.support.tcp_proxy import TcpProxy

_SCRIPT: Final = "managed.py"
_BATCH: Final = {"kind": "slurm"}
_TWO: Final = {"nodes": 2, "ranks_per_node": 1, "device": "cpu"}
_PODS: Final = "pods (modelled), two nodes"
WAYS: Final[dict[str, dict[str, Any]]] = {
    "local": {},
    "Slurm, one node": {"launcher": _BATCH},
    "Slurm, two nodes": {"launcher": _BATCH, "world": _TWO},
    _PODS: {"launcher": {"kind": "kubernetes"}, "world": _TWO},
}


def main() -> None:
    absent = missing_reason()
    if absent is not None:
        print(f"no Slurm here: {absent}", file=sys.stderr)
        return
    rounds = int(os.environ.get("RATCHET_BENCH_ROUNDS", "5"))
    print(f"{machine()}; {rounds} interleaved rounds, medians [95 %]")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-bench-"))
        home, file = Path(folder) / "home", Path(folder) / "launchers.json"
        os.environ.update(stack.enter_context(slurm_cluster()).variables)
        relay = stack.enter_context(TcpProxy(lambda: str(json.loads((home / "service.json").read_text())["url"])))
        pods = stack.enter_context(Cluster(Path(folder) / "pods", claims={"home": home}))
        kubernetes = {
            "claim": "home", "url": relay.url, "kubeconfig": str(pods.kubeconfig), "image": "worker:1",
            "run_as_user": STRANGER, "run_as_group": STRANGER, "allow_host_access": True,
        }  # fmt: skip
        file.write_text(json.dumps({"local": {}, "slurm": {}, "kubernetes": kubernetes}))
        service = Service(home, "--launchers", str(file))
        try:
            service.start()
            measure(service, Path(folder), rounds)
        finally:
            service.stop()


def measure(service: Service, folder: Path, rounds: int) -> None:
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name in WAYS if number % 2 == 0 else reversed(WAYS):
            place = Path(tempfile.mkdtemp(dir=folder))
            place.chmod(0o777)  # the pods' user writes there, too
            stamps = {"volumes": [{"mount_path": str(place), "host_path": str(place), "read_only": False}]}
            runs[name].append(run_ratchet(service, _SCRIPT, place, **WAYS[name], **(stamps if name == _PODS else {})))
    table("POST -> first training step of rank 0", runs, lambda run: run.first)
    table("SIGKILL of rank 1 -> first step of the restarted group", runs, lambda run: run.again)
    parts_table("where the time to the first step goes", runs, lambda run: run.first_parts)
    parts_table("where the time after the kill goes", runs, lambda run: run.again_parts)
    _share(runs)


def _share(runs: dict[str, list[Run]]) -> None:
    """From the launch file, written just before an agent is asked for, to the agent; less what the bare process takes."""
    print("\nthe engine's own share: launch file -> agent, less the local launcher's median")
    base = statistics.median(run.first_parts["agent"] for run in runs["local"])
    for name, found in runs.items():
        if name != "local":
            for title, parts in (("first", [r.first_parts for r in found]), ("again", [r.again_parts for r in found])):
                print(f"  {name:<28} {title}   {estimate([part['agent'] - base for part in parts])} s")


if __name__ == "__main__":
    main()
