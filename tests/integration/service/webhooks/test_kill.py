"""A real service delivers to a receiver with every fault, is killed and started again: no event is lost or out of order."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook as Verifier

from ratchet_contract.api.webhooks import WebhookRequest
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Webhook
from ratchet_service.usecases import webhooks
from tests.support.receiver import LIES, Request, happen, job_row, receiving
from tests.support.server import Server, wait_for

pytestmark = pytest.mark.processes
OPTIONS = ("--no-reconciler", "--webhook-network", "127.0.0.0/8")
JOBS = 10
EVENTS = int(os.environ.get("RATCHET_TEST_WEBHOOKS", "200"))
FAULTS = ("500", "503", "429", "404", "close", "redirect", *LIES)
"""What the receiver does with some events when it gets them first; with one in 250 it hangs."""


class Faulty:
    """A receiver that does what ``seed`` says: faults, kills of the service before it answers, and times in which it is down."""

    def __init__(self, server: Server, seed: int) -> None:
        random_ = Random(seed)
        numbers = [*range(1, EVENTS)]
        random_.shuffle(numbers)
        take = iter(numbers)
        self.faults = {next(take): "hang" for _ in range(max(1, EVENTS // 250))}
        self.faults |= {next(take): FAULTS[one % len(FAULTS)] for one in range(max(len(FAULTS), EVENTS // 20))}
        self.kills = {next(take): ("200", "close")[one % 2] for one in range(max(2, EVENTS // 100))}
        self.outages = {next(take) for _ in range(max(1, EVENTS // 200))}
        self.killed = threading.Event()
        self.numbers: dict[tuple[str, int], int] = {}
        self._server, self._refusals = server, 0

    def __call__(self, request: Request) -> str:
        if "job" not in request.json["data"]:
            return "200"
        first = request.event not in self.numbers
        number = self.numbers.setdefault(request.event, len(self.numbers))
        if first and number in self.kills:
            self._server.kill()
            self.killed.set()
            return self.kills[number]
        if first and number in self.faults:
            return self.faults[number]
        if first and number in self.outages:
            self._refusals = 10
        self._refusals = max(0, self._refusals - 1)
        return "503" if self._refusals else "200"


def test_no_event_is_lost_or_out_of_order_over_faults_of_the_receiver_and_kills(tmp_path: Path) -> None:
    began, server = time.monotonic(), Server(tmp_path / "home", *OPTIONS)
    behave, kills = Faulty(server, seed=EVENTS), 0
    try:
        server.start()
        database = Database(sqlite_url(server.paths.database))
        jobs = [job_row(database, f"j{number}") for number in range(JOBS)]
        with receiving(behave) as receiver:
            made = server.call("POST", "/v1/webhooks", json={"url": receiver.url, "types": ["job.*"]}).json()
            path = f"/v1/webhooks/{made['id']}"
            assert server.call("POST", f"{path}/test").json()["delivered"]
            assert receiver.requests.pop().json["type"] == "webhook.test"

            def all_happen() -> None:
                for number in range(EVENTS):
                    happen(database, jobs[number * 7 % JOBS])

            producer = threading.Thread(target=all_happen)
            producer.start()

            def all_accepted() -> bool:
                nonlocal kills
                if behave.killed.is_set():
                    behave.killed.clear()
                    kills += 1
                    server.start()
                return len({one.id for one in receiver.accepted()}) == EVENTS

            wait_for(all_accepted, "every event", 60 + EVENTS / 2)
            producer.join()
            wait_for(lambda: server.call("GET", path).json()["pending"] == 0, "no event to be pending", 30)
            accepted, requests = receiver.accepted(), [*receiver.requests]
            last = server.call("GET", f"{path}/deliveries").json()["items"]
            assert len(last) == 50 and {one["status"] for one in last} == {"delivered"}
        database.dispose()
    finally:
        server.stop()
    assert {*FAULTS, "hang"} <= {one.answer for one in requests}
    assert kills == len(behave.kills)
    times = Counter(one.id for one in accepted)
    assert max(times.values()) == 2 and sum(times.values()) - EVENTS <= kills, (
        "accepted, but not recorded before a kill"
    )
    first: dict[str, Request] = {}
    for request in requests:
        Verifier(made["secret"]).verify(request.body, request.headers)
    for request in accepted:
        assert first.setdefault(request.id, request).body == request.body
    by_job: dict[str, list[int]] = defaultdict(list)
    for request in first.values():
        by_job[request.event[0]].append(request.event[1])
    assert {job: len(events) for job, events in by_job.items()} == dict.fromkeys(jobs, EVENTS // JOBS)
    assert all(events == sorted(events) for events in by_job.values())
    seconds, doubles = time.monotonic() - began, len(accepted) - EVENTS
    print(
        f"\n{EVENTS} events of {JOBS} jobs in {seconds:.0f} s: {len(requests)} requests, {kills} kills of the service,"
    )
    print(f"{len(requests) - len(accepted)} not accepted, {doubles} accepted twice, 0 lost, 0 out of order")


def test_second_service_on_the_database_continues_when_the_first_is_killed(tmp_path: Path, postgres_url: str) -> None:
    main = Database(postgres_url)
    auto = main.engine.execution_options(isolation_level="AUTOCOMMIT")
    with auto.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE two_services")
    database = Database(main.url.set(database="two_services").render_as_string(hide_password=False))
    upgrade(database)
    shared = {"RATCHET_DATABASE_URL": database.url.render_as_string(hide_password=False)}
    servers = [Server(tmp_path / name, *OPTIONS, variables=shared) for name in "ab"]

    def kill_one(_: Request) -> str:
        if len(receiver.requests) == 20:
            with database.read() as session:
                owner = str(session.scalar(sa.select(Webhook.lease_owner)))
            (holder,) = [one for one in servers if one.process and f"/{one.process.pid}/" in owner]
            holder.kill()
        return "200"

    try:
        for server in servers:
            server.start()
        with receiving(kill_one) as receiver:
            with database.write() as session:
                webhooks.create(session, "root", WebhookRequest(url=receiver.url, types=["job.*"]))
            jobs = [job_row(database, f"j{number}") for number in range(5)]
            for number in range(50):
                happen(database, jobs[number % 5])
            wait_for(lambda: len({one.id for one in receiver.accepted()}) == 50, "every event", 60)
        assert sum(one.process is not None and one.process.poll() is None for one in servers) == 1
        events = list(dict.fromkeys(one.event[1] for one in receiver.requests))
        assert len(receiver.requests) == 51, "one event twice: that of the kill"
        assert events == sorted(events)
    finally:
        for server in servers:
            server.stop()
        database.dispose()
        with auto.connect() as connection:
            connection.exec_driver_sql("DROP DATABASE two_services WITH (FORCE)")
        main.dispose()
