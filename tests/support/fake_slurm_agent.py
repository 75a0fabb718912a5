"""Stands in for the agent where only Slurm and the launcher are looked at: it starts and ends as one, and has no ranks.

``ACT`` of the spec's ``env`` is JSON, node -> word: ``deaf`` hears no signal, ``end`` completes, ``crash`` ends with code 1 and
no result; else it ends as an agent does, with a result, on SIGTERM and SIGUSR1.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

CAUSES = {signal.SIGTERM: "sigterm", signal.SIGUSR1: "time-limit"}


def main() -> int:
    launch_file, node = Path(sys.argv[-3]), int(os.environ[sys.argv[-1]])
    root = launch_file.parent / f"node-{node:05d}" if node else launch_file.parent
    lock = os.open(root / "agent.lock", os.O_RDWR | os.O_CREAT)  # until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 75
    if (root / "agent.json").exists():
        return 75
    heard: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    for number in CAUSES:
        signal.signal(number, hear)
    launch = json.loads(launch_file.read_text())
    act = json.loads(launch["spec"]["env"].get("ACT", "{}")).get(str(node), "")
    (root / "env.json").write_text(json.dumps(dict(os.environ)))
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    _write(root / "agent.json", {"pid": os.getpid(), "start_time": start, "host": f"host-{node}"})
    print("began", flush=True)
    if act == "crash":
        return 1
    while act != "end" and (act == "deaf" or not heard):
        time.sleep(0.05)
    cause = CAUSES[signal.Signals(heard[0])] if heard else "completed"
    now = "2026-01-01T00:00:00Z"
    result = {"protocol": launch["protocol"], "job_id": launch["job_id"], "attempt": launch["attempt"], "node": node}
    _write(
        root / "result.json",
        {**result, "cause": cause, "last_step": 0, "started_at": now, "ended_at": now, "ranks": []},
    )
    return 143 if heard else 0


def _write(path: Path, data: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(data))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    sys.exit(main())
