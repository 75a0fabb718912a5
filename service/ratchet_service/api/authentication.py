"""Authentication and authorisation: every route declares what it needs, and only these declarations admit a request.

A route declares ``dependencies=[needs(Scope.JOBS_READ)]``, ``[AGENTS]`` or ``[OPEN]``; a test fails for a route without any.
"""

# No postponed annotations: FastAPI reads those of callable objects, and could not resolve their names.
import time
from collections import OrderedDict
from typing import Annotated, Any, Final

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from starlette.concurrency import run_in_threadpool

from ratchet_contract.api.roles import SCOPES, Role, Scope
from ratchet_contract.errors import RatchetError, Refused
from ratchet_contract.paths import is_job_id
from ratchet_service.agent_reports.ingest import read_authorised_rows
from ratchet_service.api.rate_limit import Buckets
from ratchet_service.config.network import FIRST_TOKEN
from ratchet_service.config.settings import Settings
from ratchet_service.db.api_tokens import LOCAL, Principal, authenticate, hash_token
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job

_MAX_ATTEMPTS: Final = 10_000
"""Number of attempts whose tokens are cached, so that authenticating a report needs no database query."""


class Gate:
    """Authenticates the callers of one running app and limits their request rates."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._token_required = settings.tokens_required
        self._request_buckets = Buckets(settings.request_rate, settings.request_burst)
        self._report_buckets = Buckets(settings.report_rate, settings.report_burst)
        self._refused_buckets = Buckets(settings.refused_rate, settings.refused_burst)
        self._attempts: OrderedDict[tuple[str, int], tuple[str, int]] = OrderedDict()
        """By attempt: the hash of its token and its number of nodes."""

    async def authenticate_caller(self, request: Request) -> Principal:
        """Return the caller. Raises ``Refused`` (``token-missing`` and other token errors, ``too-many-requests``)."""
        token = bearer_token(request.headers.get("authorization"))
        if token is None and not self._token_required:
            found = LOCAL
        else:
            found = await self._authenticate_token(request, token)
        self._request_buckets.take(found.owner, time.monotonic())  # not by token: more tokens must not raise the limit
        return found

    async def _authenticate_token(self, request: Request, token: str | None) -> Principal:
        try:
            if token is None:
                raise Refused(
                    "this service requires a token: Authorization: Bearer rt_... (an admin creates one with `ratchet token "
                    f"create`; the first is created on the machine of the run directory: {FIRST_TOKEN}; for the "
                    "command line, set RATCHET_TOKEN or run `ratchet config set token`)",
                    code="token-missing",
                )
            return await run_in_threadpool(authenticate, self._database, token)
        except Refused:
            self._refused_buckets.take(_client_host(request), time.monotonic())
            raise

    async def authenticate_agent(self, request: Request) -> None:
        """Authenticate an agent before its body is read; the use case checks again, in the transaction that it acts in.

        The rate limit of all agents of an attempt together is the sum of its nodes' limits (``limit_node``). It does not go by
        address: many agents may share one, through an ingress or a proxy. Raises ``Refused`` (``token-missing``,
        ``token-wrong``, ``too-many-requests``) and ``NotFound`` (``attempt-not-found``).
        """
        token = bearer_token(request.headers.get("authorization"))
        job_id, number = request.path_params["job_id"], request.path_params["number"]
        attempt = (job_id, int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0)
        digest = hash_token(token or "")
        known, nodes = self._attempts.get(attempt, ("", 1))
        try:
            if known != digest:
                nodes = await run_in_threadpool(self._check_attempt_token, attempt, token)
        except RatchetError:
            self._refused_buckets.take(_client_host(request), time.monotonic())
            raise
        self._attempts[attempt] = (digest, nodes)
        self._attempts.move_to_end(attempt)
        if len(self._attempts) > _MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._report_buckets.take(f"{job_id}/{number}", time.monotonic(), nodes)

    def limit_node(self, job_id: str, number: int, node: int) -> None:
        """Limit a node, once its report is read, to its share of the attempt's rate. A report refused here has been read and
        still counts for the attempt: a node that ignores ``Retry-After`` takes from the others. Raises ``Refused``
        (``too-many-requests``). The use case refuses nodes that do not exist."""
        _, nodes = self._attempts.get((job_id, number), ("", 1))
        if nodes > 1 and 0 <= node < nodes:
            self._report_buckets.take(f"{job_id}/{number}/{node}", time.monotonic())

    def _check_attempt_token(self, attempt: tuple[str, int], token: str | None) -> int:
        """Return the attempt's number of nodes. Raises like ``read_authorised_rows``."""
        with self._database.read() as session:
            return read_authorised_rows(session, *attempt, token).shape.nodes

    async def require_ownership(self, caller: Principal, job_id: str) -> None:
        """Raises ``Refused`` (``not-allowed``) for a job of another owner. The route itself reports a job that does not exist."""
        if caller.role is Role.ADMIN or not is_job_id(job_id):
            return
        owner = await run_in_threadpool(self._read_owner, job_id)
        if owner not in (None, caller.owner):
            raise Refused(
                f"job {job_id} belongs to {owner}, and you are {caller.owner}: its owner or an admin may do this",
                code="not-allowed",
            )

    def _read_owner(self, job_id: str) -> str | None:
        with self._database.read() as session:
            job = session.get(Job, job_id)
            return None if job is None else job.owner


def bearer_token(authorization: str | None) -> str | None:
    """Return the token in the header; None without a header. Raises ``Refused`` (``token-missing``) for any other header."""
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refused("the token goes into Authorization: Bearer ...", code="token-missing")
    return token.strip()


def _client_host(request: Request) -> str:
    return request.client.host if request.client is not None else "-"


class Guard:
    """What a route declares. ``security`` is its OpenAPI form."""

    security: list[dict[str, list[str]]]


class Needs(Guard):
    """Admits callers with ``scope`` (None: any caller); with ``own_job``, only the owner of the path's job, or an admin."""

    def __init__(self, scope: Scope | None, *, own_job: bool) -> None:
        self.scope, self.own_job = scope, own_job
        self.security = [{"token": [] if scope is None else [scope.value]}]

    async def __call__(self, request: Request) -> None:
        gate: Gate = request.app.state.service.gate
        caller = await gate.authenticate_caller(request)
        if self.scope is not None and self.scope not in caller.scopes:
            raise Refused(_missing_scope_text(caller, self.scope), code="not-allowed")
        if self.own_job:
            await gate.require_ownership(caller, request.path_params["job_id"])
        request.state.caller = caller


def _missing_scope_text(caller: Principal, scope: Scope) -> str:
    if scope in SCOPES[caller.role]:
        return f"this needs the scope {scope.value}, which the token {caller.token} lacks"
    least = next(role for role in Role if scope in SCOPES[role])
    return (
        f"this needs the role {least.value} (scope {scope.value}), and {caller.owner} has the role {caller.role.value}"
    )


class Agents(Guard):
    """Admits agents with the token of their attempt."""

    security = [{"attempt": []}]  # noqa: RUF012

    async def __call__(self, request: Request) -> None:
        gate: Gate = request.app.state.service.gate
        await gate.authenticate_agent(request)


class Open(Guard):
    """Admits anybody: the route reveals nothing about jobs."""

    security: list[dict[str, list[str]]] = []  # noqa: RUF012

    async def __call__(self, request: Request) -> None:
        return None


def needs(scope: Scope | None, *, own_job: bool = False) -> Any:
    """Return an entry for a route's ``dependencies``."""
    return Depends(Needs(scope, own_job=own_job))


AGENTS: Any = Depends(Agents())
OPEN: Any = Depends(Open())


def guard_of(dependant: Dependant) -> Guard | None:
    """Return the guard that a route declares."""
    declared: list[Any] = [child.call for child in dependant.dependencies]
    return next((call for call in declared if isinstance(call, Guard)), None)


async def get_caller(request: Request) -> Principal:
    """Return the caller, in a route declared with ``needs``."""
    caller: Principal = request.state.caller
    return caller


Caller = Annotated[Principal, Depends(get_caller)]
