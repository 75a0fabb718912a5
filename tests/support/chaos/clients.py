"""What clients do through the relay: they submit, act, and try again until an answer comes through."""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from ratchet_client import RatchetClient
from ratchet_contract.errors import RatchetError
from ratchet_contract.phases import JobPhase
from tests.support.chaos.jobs import Plan
from tests.support.chaos.world import World

RETRIED: Final = (
    "service-unreachable", "request-in-progress", "idempotency-in-progress", "disconnected", "database-unavailable", "disk-full",
)  # fmt: skip


@dataclass
class Submitted:
    plan: Plan
    answers: list[Future[str]]
    phase: JobPhase = JobPhase.QUEUED
    job_id: str | None = None
    resumed_at: float = 0.0

    @property
    def ids(self) -> set[str]:
        """One, if all goes well; none as long as no answer has come through."""
        ended = [one for one in self.answers if one.done() and not one.cancelled()]
        return {one.result() for one in ended if one.exception() is None}

    @property
    def has_ended(self) -> bool:
        return self.phase.terminal


@dataclass
class Tally:
    """What has happened, for the people who read the result."""

    faults: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    resumed: int = 0  # jobs that had ended as no-progress, and were resumed by hand
    restarts: int = 0  # of processes that ended by themselves while the database or the disk was away


class Clients:
    """Each call is a client of its own, in a thread."""

    def __init__(self, world: World, tally: Tally, seed: int) -> None:
        self._world, self._tally, self._seed = world, tally, seed
        self._pool = ThreadPoolExecutor(24)

    def close(self, *, wait: bool = True) -> None:
        """Begin no more, and ``wait`` for those under way, which may be at it for minutes; else they end with the process."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def begin(self, plan: Plan) -> Submitted:
        """It is under way; where the plan says so, two do it at the same time."""
        key = f"chaos-{self._seed}-{plan.number}"
        return Submitted(plan, [self._pool.submit(self.submit, plan.spec, key) for _ in range(1 + plan.twice)])

    def call(self, job: Submitted, action: str) -> None:
        self._tally.actions[action] += 1

        def call() -> None:
            assert job.job_id is not None
            with self._client(20.0) as client:
                try:
                    getattr(client, action)(job.job_id)
                except RatchetError as error:
                    self._tally.actions[error.code] += 1

        self._pool.submit(call)

    def submit(self, spec: dict[str, Any], key: str) -> str:
        """The job's id, once an answer has come through, however often it takes."""
        end = time.monotonic() + 240
        while True:
            try:
                with self._client(60.0) as client:
                    return client.submit(spec, idempotency_key=key, upload=False).id
            except RatchetError as error:
                if time.monotonic() > end or error.code not in RETRIED:
                    print(f"submission {key}: {error.code}: {error}", file=sys.stderr)
                    raise

    def _client(self, retry_for: float) -> RatchetClient:
        return RatchetClient(self._world.relay.url, timeout=10.0, retry_for=retry_for, token=self._world.token)
