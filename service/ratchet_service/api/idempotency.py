"""Idempotency-Key: a repeated POST gets the first answer again, and its effect happens once.

The answer of a success is stored in the transaction that has the effect, so neither exists without the other. Most errors after
the claim of the key are stored as answers too. Errors of the server or of limits are not stored; after them a repeated request
runs again.

A request first claims its key. While it runs, a second request with the key is refused. If the claim is old, or if the process of
the first request was on this host and is dead, the second request takes over the claim and runs. If the first request still runs
then, its transaction fails, because its token no longer matches.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from ratchet_contract.errors import Conflict, RatchetError, Refused
from ratchet_contract.spec.parse import canonical_json
from ratchet_service.api import problem_json
from ratchet_service.db.api_tokens import TOO_MANY_TOKENS
from ratchet_service.db.clock import clock_of
from ratchet_service.db.engine import Database
from ratchet_service.db.leases import new_owner, owner_is_dead
from ratchet_service.db.models import IdempotencyKey
from ratchet_service.db.principal import Principal
from ratchet_service.scheduling.quotas import EXCEEDED

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """An answer. ``body``: text. ``stored_body``: the body for repeated requests, if ``body`` may be shown only once."""

    status: int
    body: str
    headers: dict[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    stored_body: str | None = None  # body for repeated requests, if ``body`` may be shown only once


@dataclass(frozen=True)
class Call:
    """One POST request of ``caller``. ``scope``: a hash of the caller's owner, method and path. ``body_hash``: a hash of body and
    query. ``instance``: the path."""

    key: str | None
    scope: str
    body_hash: str
    instance: str
    caller: Principal


def make_call(
    key: str | None, caller: Principal, method: str, path: str, query: list[tuple[str, str]], body: Any
) -> Call:
    """Return the ``Call`` for a POST request. Raises ``Refused`` (``invalid-idempotency-key``)."""
    if key is not None and not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise Refused("an Idempotency-Key is 1 to 255 printable ASCII characters", code="invalid-idempotency-key")
    scope = hashlib.sha256(canonical_json([caller.owner, method, path])).hexdigest()
    digest = hashlib.sha256(canonical_json([sorted(query), body])).hexdigest()
    return Call(key, scope, digest, path, caller)


_CLAIMED_BY: Final = "claimed-by"
"""Key among a row's headers until it has an answer: the process that handles the request, so that its death can be detected."""


class Idempotency:
    """Runs a POST request once, even if its caller repeats it with the same key. After a server error or a limit, a repetition
    runs again. ``claim_seconds``: age at which a claim without an answer may be taken over."""

    def __init__(self, database: Database, keep_seconds: float, claim_seconds: float) -> None:
        self._database = database
        self._retention = timedelta(seconds=keep_seconds)
        self._claim_timeout = timedelta(seconds=claim_seconds)
        self._owner = new_owner()

    def run(self, call: Call, prepare: Callable[[], T], effect: Callable[[Session, T], Reply]) -> Reply:
        """Run ``prepare``, then ``effect`` in a write transaction, and return the effect's answer. If the key has a stored
        answer, run nothing and return that answer. Raises the errors of ``prepare`` and ``effect``, ``Conflict`` and ``Refused``.
        A ``RatchetError`` of the two is also stored as the key's answer, unless it is ``_is_retryable``. Without a key, nothing
        is stored."""
        if call.key is None:
            prepared = prepare()
            with self._database.write(call.caller) as session:
                return effect(session, prepared)
        token = secrets.token_hex(16)
        known = self._claim_key(call, token)
        if known is not None:
            return known
        try:
            prepared = prepare()
            with self._database.write(call.caller) as session:
                reply = effect(session, prepared)
                self._record(session, call, token, reply)
                return reply
        except RatchetError as error:
            reply = _reply_of(error, call)
            if _is_retryable(error, reply.status):
                self._release(call, token)
            else:
                with self._database.write() as session:
                    self._record(session, call, token, reply)
            raise
        except BaseException:
            self._release(call, token)
            raise

    def _claim_key(self, call: Call, token: str) -> Reply | None:
        """Claim the key and return None, or return the stored answer. Raises ``Conflict`` while another request's claim is valid,
        ``Refused`` for another body or query."""
        with self._database.write() as session:
            now = clock_of(session).server_now(session)  # several APIs share the keys, and their clocks may differ
            session.execute(sa.delete(IdempotencyKey).where(IdempotencyKey.created_at < now - self._retention))
            insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
            claim = insert(IdempotencyKey).values(
                scope=call.scope,
                key=call.key,
                body_hash=call.body_hash,
                token=token,
                headers={_CLAIMED_BY: self._owner},
                created_at=now,
            )
            if session.scalar(claim.on_conflict_do_nothing().returning(IdempotencyKey.token)) is not None:
                return None
            query = sa.select(IdempotencyKey).where(IdempotencyKey.scope == call.scope, IdempotencyKey.key == call.key)
            row = session.scalars(query.with_for_update()).one_or_none()
            if row is not None and row.body_hash != call.body_hash:
                raise Refused(
                    "this Idempotency-Key was used with another body: use a new key for a new request",
                    code="idempotency-key-reused",
                )
            if row is not None and row.status is not None:
                media_type = row.headers.get("content-type", "application/json")
                headers = {k: v for k, v in row.headers.items() if k != "content-type"}
                return Reply(row.status, row.body or "", headers | {"Idempotency-Replayed": "true"}, media_type)
            # a claim far in the future dates from before the clock was set back
            claimed = row is None or abs(now - row.created_at) < self._claim_timeout
            if row is None or (claimed and not owner_is_dead(row.headers.get(_CLAIMED_BY))):
                raise Conflict(
                    "the first request with this Idempotency-Key is still running: repeat the request in a moment",
                    code="idempotency-in-progress",
                )
            row.token, row.created_at, row.headers = token, now, {_CLAIMED_BY: self._owner}
            return None

    def _record(self, session: Session, call: Call, token: str, reply: Reply) -> None:
        """Store ``reply`` as the answer of the key claimed with ``token``. Raises ``Conflict`` if the claim was taken over."""
        statement = sa.update(IdempotencyKey).where(
            IdempotencyKey.scope == call.scope,
            IdempotencyKey.key == call.key,
            IdempotencyKey.token == token,
            IdempotencyKey.status.is_(None),
        )
        headers = reply.headers | {"content-type": reply.media_type}
        result = session.execute(
            statement.values(
                status=reply.status,
                body=reply.body if reply.stored_body is None else reply.stored_body,
                headers=headers,
            )
        )
        if cast(CursorResult[Any], result).rowcount != 1:
            raise Conflict(
                "another request with the same Idempotency-Key took over: repeat the request to get its response",
                code="idempotency-claim-lost",
            )

    def _release(self, call: Call, token: str) -> None:
        """Delete the claim made with ``token``, so that a repeated request runs again. A stored answer stays."""
        with self._database.write() as session:
            session.execute(
                sa.delete(IdempotencyKey).where(
                    IdempotencyKey.scope == call.scope,
                    IdempotencyKey.key == call.key,
                    IdempotencyKey.token == token,
                    IdempotencyKey.status.is_(None),
                )
            )


def _is_retryable(error: RatchetError, status: int) -> bool:
    """True for an error of the server, a rate limit, a used-up quota, too many tokens or a lost claim; False for others."""
    codes = {error.code, *(problem.code for problem in error.errors)}
    return status >= 500 or status == 429 or bool(codes & {"idempotency-claim-lost", EXCEEDED, TOO_MANY_TOKENS})


def _reply_of(error: RatchetError, call: Call) -> Reply:
    """Return the answer for ``error``: its problem, as JSON, with its status and headers."""
    problem = problem_json.problem_of(error, call.instance)
    headers = problem_json.headers_of(problem.status, problem.code)
    return Reply(problem.status, problem.model_dump_json(), headers, problem_json.MEDIA_TYPE)
