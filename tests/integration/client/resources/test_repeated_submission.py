"""However often a submission is repeated, and whatever is lost on the way: one job for each Idempotency-Key.

RATCHET_TEST_POSTS sets how many (default 12); with 1000 about three minutes.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from ratchet_client import RatchetClient
from ratchet_contract.errors import RatchetError
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Event, Job
from tests.support.control_plane import Plane, trainer_spec
from tests.support.faulty_proxy import FAULTS, FaultyProxy
from tests.support.server import wait_for

pytestmark = pytest.mark.takes_turns

POSTS = int(os.environ.get("RATCHET_TEST_POSTS", "12"))


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database, cpu_slots=1)
    yield made
    made.close()


def submit(url: str, token: str, number: int, seed: int) -> str:
    """The job's id, once an answer has come through; now and then two clients ask at the same time."""
    spec = trainer_spec(name=f"n-{number}", script=None, ttl=86_400) | {"priority": -1000}
    answers: list[str] = []

    def ask() -> None:
        with RatchetClient(url, timeout=10.0, retry_for=60.0, token=token) as client:
            answers.append(client.submit(spec, idempotency_key=f"key-{seed}-{number}", upload=False).id)

    def ask_too() -> None:
        with suppress(RatchetError):  # whoever gives up is asked for by the other
            ask()

    twin = threading.Thread(target=ask_too)
    if random.Random(number).random() < 0.3:
        twin.start()
    end = time.monotonic() + 240
    while time.monotonic() < end:
        try:
            ask()
            break
        except (
            RatchetError
        ) as error:  # the service was away for longer than a client waits, or another client has the key
            assert error.code in ("service-unreachable", "idempotency-in-progress"), f"{error.code}: {error.detail}"
            time.sleep(0.2)  # another client has the key now
    if twin.ident is not None:
        twin.join()
    assert answers and len(set(answers)) == 1, answers
    return answers[0]


@pytest.mark.timeout(3600)
def test_repeated_submission_over_faulty_relay_creates_one_job_per_key(control_plane: Plane) -> None:
    seed = int(os.environ.get("RATCHET_TEST_SEED", "1"))
    service = control_plane.start_process()

    def url() -> str:
        return str(json.loads(control_plane.paths.service_file.read_text())["url"])

    kills, token = 0, control_plane.token
    with FaultyProxy(url, seed) as relay, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(submit, relay.url, token, number, seed) for number in range(POSTS)]
        while not all(each.done() for each in asked):
            done = sum(each.done() for each in asked)
            if done >= (kills + 1) * max(5, POSTS // 8) and kills < 6:  # SIGKILL in the middle of whatever it does
                service.kill()
                service.wait()
                kills += 1
                service = control_plane.start_process()
            wait_for(lambda done=done: sum(each.done() for each in asked) > done, "the next answer", 120)
        try:
            ids = [each.result() for each in asked]
        except AssertionError as error:
            raise AssertionError(f"{error}; the services' log: {control_plane.log()}") from error
    with control_plane.database.read() as session:
        names = Counter(session.scalars(sa.select(Job.name)))
        submitted = Counter(session.scalars(sa.select(Event.job_id).where(Event.type == "submitted")))
    assert names == Counter({f"n-{number}": 1 for number in range(POSTS)})
    assert submitted == Counter(dict.fromkeys(ids, 1))
    assert kills > 0
    if POSTS >= 40:
        assert set(relay.done) == set(FAULTS), relay.done
    print(
        f"seed {seed}: {POSTS} of {POSTS} keys have one job; {dict(relay.done)}; the service was killed {kills} times"
    )
