"""Who may come in: every route declares what it needs, and nothing but these declarations lets a request through.

A route says ``dependencies=[needs(Scope.JOBS_READ)]``, ``[AGENTS]`` or ``[OPEN]``; a test fails on one that says nothing.
"""

# Without postponed annotations: FastAPI reads those of a callable object, and could not look their names up.
import time
from collections import OrderedDict
from typing import Annotated, Any, Final

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.concurrency import run_in_threadpool

from ratchet_contract.access import SCOPES, Role, Scope
from ratchet_contract.errors import RatchetError, Refused
from ratchet_contract.paths import is_job_id
from ratchet_service.database import Database
from ratchet_service.ingest import authorised, hash_token
from ratchet_service.listening import FIRST_TOKEN
from ratchet_service.models import Job
from ratchet_service.rates import Buckets
from ratchet_service.settings import Settings
from ratchet_service.tokens import LOCAL, Principal, authenticate

_ATTEMPTS: Final = 10_000
"""Whose tokens are remembered, so that a report costs no look of its own into the database."""


class Gate:
    """Of one running app: who a request comes from, and whether that caller has asked too often."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._required = settings.tokens
        self._requests = Buckets(settings.request_rate, settings.request_burst)
        self._reports = Buckets(settings.report_rate, settings.report_burst)
        self._refused = Buckets(settings.refused_rate, settings.refused_burst)
        self._agents: OrderedDict[tuple[str, int], tuple[str, int]] = OrderedDict()
        """Of attempts: the hash of the token that was right, and how many nodes there are."""

    async def enter(self, request: Request) -> Principal:
        """Raises ``Refused`` (``token-missing`` and its like, ``too-many-requests``)."""
        token = bearer(request.headers.get("authorization"))
        if token is None and not self._required:
            found = LOCAL
        else:
            found = await self._known(request, token)
        self._requests.take(found.owner, time.monotonic())  # not by token: who makes more of them may ask no more
        return found

    async def _known(self, request: Request, token: str | None) -> Principal:
        try:
            if token is None:
                raise Refused(
                    "this service wants a token: Authorization: Bearer rt_... (an admin makes one by `ratchet token create`, and "
                    f"the first is made where the service's run directory is: {FIRST_TOKEN}; RATCHET_TOKEN or "
                    "`ratchet config set token` has the command line send it)",
                    code="token-missing",
                )
            return await run_in_threadpool(authenticate, self._database, token)
        except Refused:
            self._refused.take(_peer(request), time.monotonic())
            raise

    async def agent(self, request: Request) -> None:
        """An agent, before anything that it sends is read; the use case looks again, in the transaction that it acts in.

        All agents of an attempt together may ask as often as its nodes may (``of_node``): many of them may come from one
        address, through an ingress or a proxy. Raises ``Refused`` (``token-missing``, ``token-wrong``, ``too-many-requests``) and
        ``NotFound`` (``attempt-not-found``).
        """
        token = bearer(request.headers.get("authorization"))
        job_id, number = request.path_params["job_id"], request.path_params["number"]
        attempt = (job_id, int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0)
        digest = hash_token(token or "")
        known, nodes = self._agents.get(attempt, ("", 1))
        try:
            if known != digest:
                nodes = await run_in_threadpool(self._authorise, attempt, token)
        except RatchetError:
            self._refused.take(_peer(request), time.monotonic())
            raise
        self._agents[attempt] = (digest, nodes)
        self._agents.move_to_end(attempt)
        if len(self._agents) > _ATTEMPTS:
            self._agents.popitem(last=False)
        self._reports.take(f"{job_id}/{number}", time.monotonic(), nodes)

    def of_node(self, job_id: str, number: int, node: int) -> None:
        """A report, once it is read: a node may ask as often as its share of the attempt's rate. What is refused here has been
        read, and counts for the attempt all the same: a node that does not obey ``Retry-After`` takes from the others. Raises
        ``Refused`` (``too-many-requests``). A node that does not exist is the use case's to refuse."""
        _, nodes = self._agents.get((job_id, number), ("", 1))
        if nodes > 1 and 0 <= node < nodes:
            self._reports.take(f"{job_id}/{number}/{node}", time.monotonic())

    def _authorise(self, attempt: tuple[str, int], token: str | None) -> int:
        """How many nodes the attempt has. Raises like ``authorised``."""
        with self._database.read() as session:
            return authorised(session, *attempt, token).shape.nodes

    async def require_own(self, caller: Principal, job_id: str) -> None:
        """Raises ``Refused`` (``not-allowed``) for a job of somebody else. A job that is not there is the route's to tell."""
        if caller.role is Role.ADMIN or not is_job_id(job_id):
            return
        owner = await run_in_threadpool(self._owner, job_id)
        if owner not in (None, caller.owner):
            raise Refused(
                f"job {job_id} belongs to {owner}, and you are {caller.owner}: its owner or an admin may do this",
                code="not-allowed",
            )

    def _owner(self, job_id: str) -> str | None:
        with self._database.read() as session:
            job = session.get(Job, job_id)
            return None if job is None else job.owner


def bearer(authorization: str | None) -> str | None:
    """The token in the header; None without one. Raises ``Refused`` (``token-missing``) for a header of another kind."""
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refused("the token goes into Authorization: Bearer ...", code="token-missing")
    return token.strip()


def _peer(request: Request) -> str:
    return request.client.host if request.client is not None else "-"


class Guard:
    """What a route declares. ``security``: the same for OpenAPI."""

    security: list[dict[str, list[str]]]


class Needs(Guard):
    """A caller with ``scope`` (None: any caller); with ``own_job``, whose the job of the path is, or an admin."""

    def __init__(self, scope: Scope | None, *, own_job: bool) -> None:
        self.scope, self.own_job = scope, own_job
        self.security = [{"token": [] if scope is None else [scope.value]}]

    async def __call__(self, request: Request) -> None:
        gate: Gate = request.app.state.service.gate
        caller = await gate.enter(request)
        if self.scope is not None and self.scope not in caller.scopes:
            raise Refused(_lacking(caller, self.scope), code="not-allowed")
        if self.own_job:
            await gate.require_own(caller, request.path_params["job_id"])
        request.state.caller = caller


def _lacking(caller: Principal, scope: Scope) -> str:
    if scope in SCOPES[caller.role]:
        return f"this needs the scope {scope.value}, which the token {caller.token} was made without"
    least = next(role for role in Role if scope in SCOPES[role])
    return f"this needs the role {least.value} (scope {scope.value}), and {caller.owner} comes as {caller.role.value}"


class Agents(Guard):
    """An agent with the token of its attempt."""

    security = [{"attempt": []}]  # noqa: RUF012

    async def __call__(self, request: Request) -> None:
        gate: Gate = request.app.state.service.gate
        await gate.agent(request)


class Open(Guard):
    """Anybody: it tells nothing of jobs."""

    security: list[dict[str, list[str]]] = []  # noqa: RUF012

    async def __call__(self, request: Request) -> None:
        return None


def needs(scope: Scope | None, *, own_job: bool = False) -> Any:
    """For ``dependencies`` of a route."""
    return Depends(Needs(scope, own_job=own_job))


AGENTS: Any = Depends(Agents())
OPEN: Any = Depends(Open())


def guard_of(dependant: Dependant) -> Guard | None:
    """What a route has declared."""
    declared: list[Any] = [child.call for child in dependant.dependencies]
    return next((call for call in declared if isinstance(call, Guard)), None)


async def get_caller(request: Request) -> Principal:
    """Who asks, in a route that ``needs`` something."""
    caller: Principal = request.state.caller
    return caller


Caller = Annotated[Principal, Depends(get_caller)]
