"""All agents of many attempts in one process: locks, ``agent.json`` and real reports over HTTP, with ranks that are made up.

``python -m benchmarks.scripts.farm INBOX OUT [STEPS]``: takes attempts from ``INBOX`` (``tiny_agent``) until it is killed. Each
has its turn every 0.3 s, and where it has nothing but figures it leaves turns out as an agent does (``periods_to_wait``); a step
lasts a second and brings two metrics, progress comes twice a second, and an alert every ``STEPS`` steps, if that is given. A line
per report: when, seconds until the answer, seconds late.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.processes.procfs import start_time
from ratchet_contract.protocol.messages import AgentFile, LaunchFile
from ratchet_contract.version import REPORT_AFTER_HEADER
from ratchet_worker.agent.report_sender import periods_to_wait
from ratchet_worker.agent.service_client import parse_seconds
from ratchet_worker.ipc.report_spool import LOW_PRIORITY_KINDS

PERIOD: Final = 0.3
_THREADS: Final = 8
_ALERT_STEPS: Final = int(sys.argv[3]) if sys.argv[3:] else 0


class Attempt:
    """One agent's part: what its rank would have written, sent until it is acknowledged."""

    def __init__(self, launch: LaunchFile) -> None:
        self.launch = launch
        paths = AttemptPaths(Path(launch.attempt_dir)).node(0)
        self._lock = paths.lock_file.open("w")  # held for as long as this process lives
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        pid = os.getpid()
        told = AgentFile(pid=pid, start_time=start_time(pid) or 0, host=os.uname().nodename)
        temporary = paths.agent_file.with_suffix(".tmp")
        temporary.write_text(told.model_dump_json())
        temporary.rename(paths.agent_file)
        self.due = time.monotonic() + PERIOD * (hash(launch.job_id) % 100) / 100
        self._begun = time.monotonic()
        self._spool: list[dict[str, Any]] = [
            self._message("training", base={"step": 0, "attempt": None, "digest": None})
        ]
        self._acked = 0
        self._step = 0
        self._progress_at = 0.0
        self._turns = 1  # in which figures alone wait still
        self._connection: http.client.HTTPConnection | None = None

    def _message(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"kind": kind, "rank": 0, "at": datetime.now(UTC).isoformat(), **values}

    def _live(self) -> None:
        """What the rank has done since the last look."""
        alive = time.monotonic() - self._begun
        while self._step < int(alive):
            self._step += 1
            values = {"loss": 1.0 / self._step, "lr": 0.1}
            self._spool.append(self._message("metrics", step=self._step, values=values))
            if _ALERT_STEPS and self._step % _ALERT_STEPS == 0:
                self._spool.append(self._message("alert", step=self._step, title="alert", text="of a benchmark"))
        if alive - self._progress_at >= 0.5:
            self._progress_at = alive
            self._spool.append(self._message("progress", step=self._step, total_steps=100_000, steps_per_second=1.0))

    def report(self, url: str) -> float | None:
        """Send one; seconds until the answer was there, None where this turn is left out."""
        self._live()
        fresh = self._spool[:500]
        if self._turns and all(message["kind"] in LOW_PRIORITY_KINDS for message in fresh):
            self._turns -= 1
            return None
        batches = [{"rank": 0, "from_seq": self._acked + 1, "messages": fresh}] if fresh else []
        launch = self.launch
        body = {"job_id": launch.job_id, "attempt": launch.attempt, "phase": "RUNNING", "last_step": self._step}
        data = json.dumps(body | {"batches": batches}).encode()
        if self._connection is None:
            address = urlsplit(url)
            self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        path = f"/v1/jobs/{launch.job_id}/attempts/{launch.attempt}/reports"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {launch.report_token}"}
        begin = time.perf_counter()
        self._connection.request("POST", path, data, headers)
        answer = self._connection.getresponse()
        told = answer.read()
        seconds = time.perf_counter() - begin
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {told[:500].decode(errors='replace')}")
        after = parse_seconds(answer.getheader(REPORT_AFTER_HEADER))
        self._turns = periods_to_wait(seconds, PERIOD, self.launch.spec.policy.stop_grace, after)
        acked = json.loads(told)["acked"].get("0", self._acked)
        del self._spool[: acked - self._acked]
        self._acked = acked
        return seconds

    def disconnected(self) -> None:
        """The next report makes a new connection and sends again what was not acknowledged."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._turns = None, 0


class Farm:
    def __init__(self, inbox: Path, out: Path) -> None:
        self._inbox, self._out = inbox, out
        self._queues: list[list[Attempt]] = [[] for _ in range(_THREADS)]
        self._taken = 0

    def run(self) -> None:
        """Take attempts for ever; ``OUT``.count tells how many there are."""
        for number in range(_THREADS):
            threading.Thread(target=self._work, args=(number,), daemon=True).start()
        while True:
            for entry in sorted(self._inbox.iterdir()):
                if not entry.name.startswith("."):
                    launch = LaunchFile.model_validate_json(Path(entry.read_text()).read_bytes())
                    entry.unlink()
                    self._queues[self._taken % _THREADS].append(Attempt(launch))
                    self._taken += 1
            self._out.with_suffix(".count").write_text(str(self._taken))
            time.sleep(0.05)

    def _work(self, number: int) -> None:
        queue = self._queues[number]
        with self._out.with_suffix(f".{number}").open("a", buffering=1) as out:
            while True:
                due = min(queue, key=lambda attempt: attempt.due, default=None)
                now = time.monotonic()
                if due is None or due.due > now:
                    time.sleep(0.01 if due is None else min(0.01, due.due - now))
                    continue
                url = json.loads(Path(due.launch.service_file).read_text())["url"]
                try:
                    seconds = due.report(url)
                except (
                    OSError,
                    http.client.HTTPException,
                ) as error:  # the service has closed an idle connection
                    print(f"{due.launch.job_id}: {error!r}", file=sys.stderr, flush=True)
                    due.disconnected()
                    seconds = None
                late = now - due.due
                due.due = time.monotonic() + PERIOD
                if seconds is not None:
                    out.write(f"{time.time():.3f} {seconds:.6f} {late:.6f}\n")


if __name__ == "__main__":
    Farm(Path(sys.argv[1]), Path(sys.argv[2])).run()
