"""Lets agents wait for a request to their job, such as to stop. If there are many jobs, reports are too rare to bring it soon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from ratchet_contract.phases import Desired, JobPhase
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.models import Job

log = logging.getLogger(__name__)

_INTERVAL_SECONDS: Final = 0.25
"""Seconds between two queries, one for all waiting agents."""
_ERROR_PAUSE_SECONDS: Final = 2.0
_ACTIVE: Final = [phase for phase in JobPhase if phase.active]
_SELECT: Final = sa.select(Job.id, Job.attempt, Job.desired, Job.checkpoint_request).where(Job.phase.in_(_ACTIVE))


class Requests(NamedTuple):
    """What an agent knows of its job: the newest attempt, which is its own, and the requests in its last answer."""

    attempt: int
    desired: Desired
    checkpoint_request: int


class ControlWatch:
    """The waiting agents of one service process. Used in one event loop. ``is_stopping``: True once the service stops; no agent
    waits then."""

    def __init__(self, database: Database, is_stopping: Callable[[], bool]) -> None:
        self._database, self._is_stopping = database, is_stopping
        self._waiting: dict[asyncio.Future[bool], tuple[str, Requests]] = {}
        self._polling: asyncio.Task[None] | None = None

    async def wait(self, job_id: str, known: Requests, seconds: float) -> bool:
        """Wait at most ``seconds``. Return True once the job's requests differ from ``known``, or the job is not active; False if
        they do not, or are not known."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = job_id, known
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(answer, None)

    async def _poll(self) -> None:
        """Answer waiting agents until none is left."""
        while self._waiting:
            pause = _INTERVAL_SECONDS
            try:
                current = await run_in_threadpool(self._read)
            except SQLAlchemyError as error:  # their reports get the error, and find the requests
                log.warning("requests to running jobs are not read: %s", first_line(error))
                pause = _ERROR_PAUSE_SECONDS
            else:
                for answer, (job_id, known) in list(self._waiting.items()):
                    if current.get(job_id) != known:
                        self._answer(answer, True)
            if self._is_stopping():
                for answer in list(self._waiting):
                    self._answer(answer, False)
            await asyncio.sleep(pause)

    def _answer(self, answer: asyncio.Future[bool], changed: bool) -> None:
        """Answer one agent, unless its time is over."""
        self._waiting.pop(answer, None)
        if not answer.done():
            answer.set_result(changed)

    def _read(self) -> dict[str, Requests]:
        """Return the requests to all active jobs, by job id."""
        with self._database.read() as session:
            return {row[0]: Requests(*row[1:]) for row in session.connection().execute(_SELECT)}
