"""All agents of many attempts in one process, as cheap as possible: locks, ``agent.json`` and real reports over HTTP, with ranks
that are made up.

``python -m benchmarks.scripts.farm INBOX OUT [STEPS]``: takes attempts from ``INBOX`` (``tiny_agent``) until it is killed. Each
reports at the times at which an agent would: every 0.3 s at first; where it has nothing but figures, after ``periods_to_wait``,
and meanwhile its connection waits for a request of the service (``watch``). A step lasts a second. Rank 0 sends two metrics of
each step and progress twice a second, each rank its hook's summary with step times once a second, and an alert every ``STEPS``
steps, if that is given. An attempt that is to stop ends half a second later.

``OUT``.reports has a line per report: when, seconds until the answer, seconds late; ``OUT``.stops a line per stop request that
has arrived: job, when. Times are Unix seconds.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import resource
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.processes.procfs import start_time
from ratchet_contract.protocol.messages import AgentFile, AttemptResult, LaunchFile, RankEnd
from ratchet_contract.version import REPORT_AFTER_HEADER
from ratchet_worker.agent.report_sender import WATCH_SECONDS, periods_to_wait
from ratchet_worker.agent.service_client import parse_seconds
from ratchet_worker.ipc.report_spool import LOW_PRIORITY_KINDS

PERIOD: Final = 0.3
_STOP_SECONDS: Final = 0.5
_TIMEOUT: Final = 60.0
_AFTER: Final = REPORT_AFTER_HEADER.lower().encode()
_SUMMARY: Final = (
    '{"name":"allreduce","rank":%d,"step":%d,"phase":"steady","iteration":%d,"compression_rate":1.0,'
    '"elements_before":1000000,"elements_after":1000000,"bytes_before":4000000,"bytes_after":4000000,"buckets":2}'
)
_FIGURES: Final = {f'{{"kind":"{kind}"' for kind in LOW_PRIORITY_KINDS}


class Connection(asyncio.Protocol):
    """A client's HTTP/1.1 connection that is kept, with one request at a time."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._answer is None:
            return
        head = head.lower()
        length = _header(head, b"content-length") or b"0"
        if len(body) >= int(length):
            self._received = b""
            answer, self._answer = self._answer, None
            answer.set_result((int(head[9:12]), head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the service has closed the connection"))

    async def call(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Status, head in lower case and body of the answer. Raises ``OSError`` without one."""
        if self.transport is None:
            raise ConnectionResetError("the service has closed the connection")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await asyncio.wait_for(self._answer, _TIMEOUT)


def _header(head: bytes, name: bytes) -> bytes | None:
    """A header's value. ``head``: in lower case."""
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else None


class Attempt:
    """One agent's part: what its ranks would have written, sent until it is acknowledged."""

    def __init__(self, launch: LaunchFile, alert_steps: int) -> None:
        self.launch = launch
        self._alert_steps = alert_steps
        self._paths = AttemptPaths(Path(launch.attempt_dir)).node(0)
        self._lock = self._paths.lock_file.open("w")  # held until the attempt ends
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        pid = os.getpid()
        agent = AgentFile(pid=pid, start_time=start_time(pid) or 0, host=os.uname().nodename)
        _write(self._paths.agent_file, agent.model_dump_json())
        self._started_at = datetime.now(UTC).isoformat()
        self._begun = time.monotonic()
        self._phase, self._desired, self._checkpoint_request = "RUNNING", "run", 0
        self._cause = ""
        self._stop_at = 0.0
        base = '"base":{"step":0,"attempt":null,"digest":null}'
        self._spools: list[list[str]] = [[] for _ in launch.ranks]
        self._spools[0].append(self._message("training", 0, base))
        self._acked = [0] * len(launch.ranks)
        self._step = 0
        self._progress_at = 0.0
        self._turns = 1  # in which figures alone wait still
        self._connection = Connection()
        self._address = ("", 0)
        self._head = ""

    def _message(self, kind: str, rank: int, more: str) -> str:
        return f'{{"kind":"{kind}","rank":{rank},"at":"{self._now}",{more}}}'

    @property
    def _now(self) -> str:
        return datetime.now(UTC).isoformat()

    def _live(self) -> None:
        """What the ranks have done since the last look."""
        alive = time.monotonic() - self._begun
        zero = self._spools[0]
        while self._step < int(alive):
            self._step += 1
            values = f'"step":{self._step},"values":{{"loss":{1.0 / self._step},"lr":0.1}}'
            zero.append(self._message("metrics", 0, values))
            for rank, spool in enumerate(self._spools):
                times = '"times":{"ready":0.4,"step":1.0}'
                summary = _SUMMARY % (rank, self._step, self._step)
                spool.append(self._message("hook", rank, f'"summary":{summary},{times}'))
            if self._alert_steps and self._step % self._alert_steps == 0:
                text = f'"step":{self._step},"title":"alert","text":"of a benchmark"'
                zero.append(self._message("alert", 0, text))
        while alive - self._progress_at >= 0.5:
            self._progress_at += 0.5
            zero.append(
                self._message("progress", 0, f'"step":{self._step},"total_steps":100000,"steps_per_second":1.0')
            )

    async def run(self, reports: Any, stops: Any) -> None:
        """Report until the attempt has ended."""
        await asyncio.sleep(random.uniform(0, PERIOD))
        while self._phase != "ENDED":
            due = time.monotonic()
            try:
                await self._wait()
                due = time.monotonic()
                self._live()
                seconds = await self._report(stops)
            except OSError as error:  # the service has closed an idle connection
                print(f"{self.launch.job_id}: {error!r}", file=sys.stderr, flush=True)
                self._connection = Connection()
                await asyncio.sleep(PERIOD)
                continue
            late = time.monotonic() - seconds - due
            reports.write(f"{time.time():.3f} {seconds:.6f} {late:.6f}\n")
        self._lock.close()

    async def _wait(self) -> None:
        """Until the next report is due; an agent looks at all that it waits for every 0.3 s."""
        self._live()
        figures = all(message.partition(",")[0] in _FIGURES for spool in self._spools for message in spool)
        if self._phase != "RUNNING" or self._desired != "run" or not figures:
            await asyncio.sleep(PERIOD)
            return
        seconds = PERIOD * (self._turns + 1)
        if self._alert_steps:
            until = self._alert_steps - (time.monotonic() - self._begun) % self._alert_steps
            seconds = min(seconds, until + random.uniform(0, PERIOD))
        if seconds < WATCH_SECONDS:
            await asyncio.sleep(seconds)
            return
        since = time.monotonic()
        known = f"desired={self._desired}&checkpoint_request={self._checkpoint_request}"
        request = f"GET {self._path}/control?{known}&wait={seconds - PERIOD:.1f} HTTP/1.1\r\n{self._head}\r\n"
        status, _, body = await self._connection.call(request.encode())
        if status != 200:
            raise RuntimeError(f"{status}: {body[:500]!r}")
        changed = json.loads(body)["changed"]
        await asyncio.sleep(random.uniform(0, PERIOD) if changed else max(0.0, since + seconds - time.monotonic()))

    @property
    def _path(self) -> str:
        return f"/v1/jobs/{self.launch.job_id}/attempts/{self.launch.attempt}"

    async def _connect(self) -> None:
        url = urlsplit(json.loads(Path(self.launch.service_file).read_text())["url"])
        self._head = f"Host: {url.netloc}\r\nAuthorization: Bearer {self.launch.report_token}\r\n"
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(Connection, url.hostname, url.port)

    async def _report(self, stops: Any) -> float:
        """Send one; seconds until the answer was there."""
        if self._connection.transport is None:
            await self._connect()
        batches = [
            f'{{"rank":{rank},"from_seq":{self._acked[rank] + 1},"messages":[{",".join(spool[:500])}]}}'
            for rank, spool in enumerate(self._spools)
            if spool
        ]
        ending = self._stop_at and time.monotonic() - self._stop_at >= _STOP_SECONDS
        result = self._result() if ending else None
        phase = "ENDED" if result else self._phase
        body = (
            f'{{"job_id":"{self.launch.job_id}","attempt":{self.launch.attempt},"phase":"{phase}",'
            f'"last_step":{self._step},"batches":[{",".join(batches)}],"result":{result or "null"}}}'
        ).encode()
        head = f"POST {self._path}/reports HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        begin = time.perf_counter()
        status, answer, content = await self._connection.call(request)
        seconds = time.perf_counter() - begin
        if status != 200:
            raise RuntimeError(f"{status}: {content[:500]!r}")
        if result:
            self._phase = "ENDED"
            return seconds
        after = parse_seconds((_header(answer, _AFTER) or b"").decode())
        self._turns = periods_to_wait(seconds, PERIOD, self.launch.spec.policy.stop_grace, after)
        ack = json.loads(content)
        for rank, spool in enumerate(self._spools):
            acked = ack["acked"].get(str(rank), self._acked[rank])
            del spool[: acked - self._acked[rank]]
            self._acked[rank] = acked
        control = ack["control"]
        self._checkpoint_request = control["checkpoint_request"]
        if control["desired"] != self._desired and self._desired == "run":
            stops.write(f"{self.launch.job_id} {time.time():.6f}\n")
            self._phase, self._stop_at, self._cause = "STOPPING", time.monotonic(), control["cause"]
        self._desired = control["desired"]
        return seconds

    def _result(self) -> str:
        """Write ``result.json``, and return its text."""
        now = self._now
        ends = [RankEnd(rank=rank, exit_code=143, last_step=self._step) for rank in self.launch.ranks]
        result = AttemptResult(
            job_id=self.launch.job_id, attempt=self.launch.attempt, cause=Cause(self._cause), last_step=self._step,
            started_at=self._started_at, stop_at=now, ended_at=now, ranks=ends,
        ).model_dump_json()  # fmt: skip
        _write(self._paths.result_file, result)
        return result


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


async def run(inbox: Path, out: Path, alert_steps: int) -> None:
    """Take attempts for ever; ``OUT``.count has their number."""
    taken, tasks = 0, set[asyncio.Task[None]]()
    with out.with_suffix(".reports").open("a", 1) as reports, out.with_suffix(".stops").open("a", 1) as stops:
        while True:
            for entry in sorted(inbox.iterdir()):
                if not entry.name.startswith("."):
                    launch = LaunchFile.model_validate_json(Path(entry.read_text()).read_bytes())
                    entry.unlink()
                    tasks.add(asyncio.create_task(Attempt(launch, alert_steps).run(reports, stops)))
                    taken += 1
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                task.result()
            out.with_suffix(".count").write_text(str(taken))
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a lock and a connection for each attempt
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0))
