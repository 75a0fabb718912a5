"""What webhooks cost the service: jobs that report, each with an alert every few seconds, with a webhook and without in turn."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.service_calls import SPEC
from benchmarks.service_http import Link, admin_token, cpu_seconds, process, quantiles, until_written
from benchmarks.service_running import until_running
from ratchet_contract.paths import HomePaths

_ALERT_STEPS: Final = 5
"""A step lasts a second."""
_SETTLE: Final = 2.0


def webhooks(engine: str, url: str | None, folder: Path, jobs: int, rounds: int, seconds: float) -> None:
    """Print the service's share of a core and the time of a report's answer, with and without a webhook that gets the alerts
    of ``jobs`` jobs: medians of ``rounds`` pairs of ``seconds`` each, and the median of the pairs' ratios."""
    home, inbox, out, log = folder / "home", folder / "inbox", folder / "farm", folder / "log"
    home.mkdir(mode=0o700)
    inbox.mkdir()
    command = ["benchmarks.scripts.farmed_service", str(home), str(inbox), str(jobs), *([url] if url else [])]
    farmed = ["benchmarks.scripts.farm", str(inbox), str(out), str(_ALERT_STEPS)]
    received = folder / "received"
    with (
        process(["benchmarks.scripts.receiver", str(received)], folder / "receiver.log") as receiver,
        process(farmed, folder / "farm.log"),
        process(command, log) as service,
    ):
        link = Link(json.loads(until_written(HomePaths(home).service_file, service, log))["url"], admin_token(url))
        endpoint = until_written(received.with_suffix(".url"), receiver, folder / "receiver.log")
        made = link.call("POST", "/v1/webhooks", {"url": endpoint, "types": ["job.alert"]})[1]
        change = f"/v1/webhooks/{made['id']}"
        for _ in range(jobs):
            link.call("POST", "/v1/jobs", SPEC)
        until_running(link, jobs, log, folder / "farm.log")

        def measure(body: dict[str, Any]) -> tuple[float, float]:
            """The share of a core, and the median of a report's answer in ms, after this change of the webhook."""
            link.call("PATCH", change, body)
            time.sleep(_SETTLE)
            os.truncate(folder / "farm.reports", 0)
            begin, before = time.monotonic(), cpu_seconds(service.pid)
            time.sleep(seconds)
            share = (cpu_seconds(service.pid) - before) / (time.monotonic() - begin)
            lines = [line.split() for line in (folder / "farm.reports").read_text().splitlines()]
            return share, quantiles([float(parts[1]) for parts in lines])[0]

        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        delivered = 0
        for number in range(rounds):
            for on in (False, True) if number % 2 else (True, False):
                before = received.stat().st_size if received.exists() else 0
                found[on].append(measure({"enabled": True, "from_now": True} if on else {"enabled": False}))
                delivered += (received.stat().st_size if received.exists() else 0) - before if on else 0
    if not delivered:
        raise RuntimeError(f"no alert was delivered: {log.read_text()[-2000:]}")
    rate = delivered / (rounds * (seconds + _SETTLE))
    print(f"\n{engine}: {jobs} jobs, {rate:.1f} alerts a second delivered to a webhook; medians of {rounds} pairs")
    for index, name, scale, unit in ((0, "share of a core", 100, "%"), (1, "a report's answer, p50", 1, "ms")):
        without, having = ([one[index] for one in found[on]] for on in (False, True))
        ratio = statistics.median(b / a for a, b in zip(without, having, strict=True))
        medians = [statistics.median(one) * scale for one in (without, having)]
        print(f"  {name}: {medians[0]:.1f} {unit} without, {medians[1]:.1f} {unit} with: {ratio:.2f}x")
