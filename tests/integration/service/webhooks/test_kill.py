"""A real service delivers to a receiver with every fault, is killed and started again: no event is lost or out of order."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook as Verifier

from ratchet_contract.api.webhooks import WebhookRequest
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Webhook
from ratchet_service.usecases import webhooks
from tests.support.receiver import Request, happen, job_row, receiving
from tests.support.server import Server, wait_for

pytestmark = pytest.mark.processes
OPTIONS = ("--no-reconciler", "--webhook-network", "127.0.0.0/8")
JOBS, EVENTS = 10, 200
FAULTS = {5: "500", 31: "close", 58: "redirect", 77: "503", 120: "hang", 140: "429", 171: "close"}
"""What the receiver does with the n-th event when it gets it first."""
KILLS = {60: "200", 180: "close"}
"""The same; before it answers, the service is killed, which can then not record the answer."""


def test_no_event_is_lost_or_out_of_order_over_faults_of_the_receiver_and_a_kill(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", *OPTIONS)
    tries: Counter[tuple[str, int]] = Counter()
    numbers: dict[tuple[str, int], int] = {}
    killed = threading.Event()
    down = False

    def behave(request: Request) -> str:
        if "job" not in request.json["data"]:
            return "200"
        tries[request.event] += 1
        number = numbers.setdefault(request.event, len(numbers))
        if down:
            return "503"
        if number in KILLS and tries[request.event] == 1:
            server.kill()
            killed.set()
            return KILLS[number]
        return FAULTS.get(number, "200") if tries[request.event] == 1 else "200"

    try:
        server.start()
        database = Database(sqlite_url(server.paths.database))
        jobs = [job_row(database, f"j{number}") for number in range(JOBS)]
        with receiving(behave) as receiver:
            made = server.call("POST", "/v1/webhooks", json={"url": receiver.url, "types": ["job.*"]}).json()
            path = f"/v1/webhooks/{made['id']}"
            assert server.call("POST", f"{path}/test").json()["delivered"]
            assert receiver.requests.pop().json["type"] == "webhook.test"

            def happened(begin: int, end: int) -> None:
                for number in range(begin, end):
                    happen(database, jobs[number * 7 % JOBS])

            happened(0, 100)
            assert killed.wait(60)
            down = True  # and it goes away while the service is started again
            happened(100, 150)
            server.start()
            before = len(receiver.requests)
            wait_for(lambda: len(receiver.requests) > before, "the service to go on", 30)
            down = False
            killed.clear()
            happened(150, EVENTS)
            assert killed.wait(60)
            server.start()
            wait_for(lambda: len({one.id for one in receiver.accepted()}) == EVENTS, "every event", 90)
            wait_for(lambda: server.call("GET", path).json()["pending"] == 0, "no event to be pending", 30)
            accepted = receiver.accepted()
            assert set(FAULTS.values()) <= {one.answer for one in receiver.requests}
            last = server.call("GET", f"{path}/deliveries").json()["items"]
            assert len(last) == 50 and {one["status"] for one in last} == {"delivered"}
        database.dispose()
    finally:
        server.stop()
    assert max(Counter(one.id for one in accepted).values()) == 2, "accepted, but not recorded before the kill"
    first: dict[str, Request] = {}
    for request in accepted:
        Verifier(made["secret"]).verify(request.body, request.headers)
        assert first.setdefault(request.id, request).body == request.body
    by_job: dict[str, list[int]] = defaultdict(list)
    for request in first.values():
        by_job[request.event[0]].append(request.event[1])
    assert {job: len(events) for job, events in by_job.items()} == dict.fromkeys(jobs, EVENTS // JOBS)
    assert all(events == sorted(events) for events in by_job.values())


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
