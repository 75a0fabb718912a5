"""Authentication and authorisation: every route declares what it needs, such as ``dependencies=[needs(Scope.JOBS_READ)]``,
``[AGENTS]`` or ``[OPEN]``."""

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
from ratchet_service.db.api_tokens import authenticate, hash_token
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.db.principal import LOCAL, Principal

_MAX_ATTEMPTS: Final = 10_000
"""Number of attempts whose token hashes are cached, so that authenticating a report needs no database query."""


class Gate:
    """Authenticates the callers of one running app, and limits their request rates. The rates are counted in this process
    only."""

    def __init__(self, settings: Settings, database: Database) -> None:
        """``settings`` has the rates and whether callers need tokens; tokens are looked up in ``database``."""
        self._database = database
        self._token_required = settings.tokens_required
        self._request_buckets = Buckets(settings.request_rate, settings.request_burst)
        self._report_buckets = Buckets(settings.report_rate, settings.report_burst)
        self._refused_buckets = Buckets(settings.refused_rate, settings.refused_burst)
        self._attempts: OrderedDict[tuple[str, int], tuple[str, int]] = OrderedDict()
        """By attempt: the hash of its token and its number of nodes."""

    async def authenticate_caller(self, request: Request) -> Principal:
        """Return the caller of ``request``, and count the request for the rate limit of the caller's owner. The caller is
        ``LOCAL`` without a token, if none is required. Raises ``Refused``."""
        if "authorization" not in request.headers and not self._token_required:
            found = LOCAL
        else:
            found = await self._authenticate_token(request)
        self._request_buckets.take(found.owner, time.monotonic())  # not by token: more tokens must not raise the limit
        return found

    async def _authenticate_token(self, request: Request) -> Principal:
        """Return the caller whose token the request has. Raises ``Refused``; each refusal counts for a limit of the client's
        address."""
        try:
            token = bearer_token(request.headers.get("authorization"))
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
        """Authenticate an agent by the attempt's token, and count the request for the attempt's rate limit. Raises ``Refused``
        and ``NotFound``."""
        job_id, number = request.path_params["job_id"], request.path_params["number"]
        attempt = (job_id, int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0)
        known, nodes = self._attempts.get(attempt, ("", 1))
        try:
            token = bearer_token(request.headers.get("authorization"))
            digest = hash_token(token or "")
            if known != digest:
                nodes = await run_in_threadpool(self._check_attempt_token, attempt, token)
        except RatchetError:
            self._refused_buckets.take(_client_host(request), time.monotonic())
            raise
        self._attempts[attempt] = (digest, nodes)
        self._attempts.move_to_end(attempt)
        if len(self._attempts) > _MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        # not by address: many agents may share one, behind an ingress or a proxy
        self._report_buckets.take(f"{job_id}/{attempt[1]}", time.monotonic(), nodes)

    def limit_node(self, job_id: str, number: int, node: int) -> None:
        """Count a report for the rate limit of one node, if the attempt has several. Call it after
        ``authenticate_agent``. Raises ``Refused`` (``too-many-requests``)."""
        _, nodes = self._attempts.get((job_id, number), ("", 1))
        if nodes > 1 and 0 <= node < nodes:
            self._report_buckets.take(f"{job_id}/{number}/{node}", time.monotonic())

    def _check_attempt_token(self, attempt: tuple[str, int], token: str | None) -> int:
        """Return the number of nodes of ``attempt`` (job id, number). Raises ``Refused`` if ``token`` is not its token, and
        ``NotFound``."""
        with self._database.read() as session:
            return read_authorised_rows(session, *attempt, token).shape.nodes

    async def require_ownership(self, caller: Principal, job_id: str) -> None:
        """Raise ``Refused`` (``not-allowed``) if the job belongs to another owner and the caller is not an admin. A job that
        does not exist is accepted."""
        if caller.role is Role.ADMIN or not is_job_id(job_id):
            return
        owner = await run_in_threadpool(self._read_owner, job_id)
        if owner not in (None, caller.owner):
            raise Refused(
                f"job {job_id} belongs to {owner}, and you are {caller.owner}: its owner or an admin may do this",
                code="not-allowed",
            )

    def _read_owner(self, job_id: str) -> str | None:
        """Return the owner of the job; None if the job does not exist."""
        with self._database.read() as session:
            job = session.get(Job, job_id)
            return None if job is None else job.owner


def bearer_token(authorization: str | None) -> str | None:
    """Return the token in an Authorization header; None if there is no header. Raises ``Refused`` for a header without a
    Bearer token."""
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refused("the token goes into Authorization: Bearer ...", code="token-missing")
    return token.strip()


def _client_host(request: Request) -> str:
    """Return the address of the connection's other end, which may be a proxy; "-" if it is unknown."""
    return request.client.host if request.client is not None else "-"


class Guard:
    """Base class of the dependencies by which a route declares who may call it. ``security``: the declaration in OpenAPI's
    form."""

    security: list[dict[str, list[str]]]


class Needs(Guard):
    """Admits callers with ``scope``; None: any authenticated caller. ``own_job`` True: if the job in the path belongs to another
    owner, only an admin is admitted. If that job does not exist, the route decides."""

    def __init__(self, scope: Scope | None, *, own_job: bool) -> None:
        self.scope, self.own_job = scope, own_job
        self.security = [{"token": [] if scope is None else [scope.value]}]

    async def __call__(self, request: Request) -> None:
        """Authenticate the caller of ``request``, check scope and ownership, and store the caller. Raises ``Refused``."""
        gate: Gate = request.app.state.service.gate
        caller = await gate.authenticate_caller(request)
        if self.scope is not None and self.scope not in caller.scopes:
            raise Refused(_missing_scope_text(caller, self.scope), code="not-allowed")
        if self.own_job:
            await gate.require_ownership(caller, request.path_params["job_id"])
        request.state.caller = caller


def _missing_scope_text(caller: Principal, scope: Scope) -> str:
    """Return the error text for a caller who lacks ``scope``: the token or the role lacks it."""
    if scope in SCOPES[caller.role]:
        return f"this needs the scope {scope.value}, which the token {caller.token} lacks"
    least = next(role for role in Role if scope in SCOPES[role])
    return (
        f"this needs the role {least.value} (scope {scope.value}), and {caller.owner} has the role {caller.role.value}"
    )


class Agents(Guard):
    """Admits an agent with the token of the attempt in the path. Raises as ``Gate.authenticate_agent`` does."""

    security = [{"attempt": []}]  # noqa: RUF012

    async def __call__(self, request: Request) -> None:
        """Authenticate the agent that sent ``request``. FastAPI calls it before the route."""
        gate: Gate = request.app.state.service.gate
        await gate.authenticate_agent(request)


class Open(Guard):
    """Admits every request, with or without a token, and applies no rate limit: the route reveals nothing about jobs."""

    security: list[dict[str, list[str]]] = []  # noqa: RUF012

    async def __call__(self, request: Request) -> None:
        return None


def needs(scope: Scope | None, *, own_job: bool = False) -> Any:
    """Return an entry for a route's ``dependencies`` that admits callers with ``scope``; the arguments are those of ``Needs``."""
    return Depends(Needs(scope, own_job=own_job))


AGENTS: Any = Depends(Agents())
OPEN: Any = Depends(Open())


def guard_of(dependant: Dependant) -> Guard | None:
    """Return the guard among the dependencies that a route declares; None if it declares none."""
    declared: list[Any] = [child.call for child in dependant.dependencies]
    return next((call for call in declared if isinstance(call, Guard)), None)


async def get_caller(request: Request) -> Principal:
    """Return the authenticated caller. The route must be declared with ``needs``, which has stored the caller in the request."""
    caller: Principal = request.state.caller
    return caller


Caller = Annotated[Principal, Depends(get_caller)]
