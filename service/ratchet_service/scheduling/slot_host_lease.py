"""The lease of a database's slots to one host, shared by the host's reconcilers: slot numbers refer to one machine. A SQLite
file belongs to one host anyway."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from ratchet_service.db.engine import Database
from ratchet_service.db.leases import MAX_LEASE, database_now, is_expired
from ratchet_service.db.models import SlotHost

_ROW_ID: Final = 1
_PAUSE: Final = 0.5


def own_host() -> str:
    """Return this machine's host name, at most 255 characters."""
    return socket.gethostname()[:255]


def acquire(session: Session, seconds: float) -> str | None:
    """Take or renew the lease of the slots for this host, for ``seconds``. Return None if this host now has the lease; otherwise
    the name of the host that has it. On SQLite there is no such lease, and the result is None."""
    if session.get_bind().dialect.name == "sqlite":
        return None
    now, host = database_now(session), own_host()
    until = now + timedelta(seconds=seconds)
    first = postgresql.insert(SlotHost).values(id=_ROW_ID, host=host, expires_at=until)
    # a time later than any lease can have was written before the server's clock was set back
    free = (SlotHost.host == host) | (SlotHost.expires_at < now) | (SlotHost.expires_at > now + MAX_LEASE)
    upsert = first.on_conflict_do_update(index_elements=["id"], set_={"host": host, "expires_at": until}, where=free)
    if session.scalar(upsert.returning(SlotHost.host)) is not None:
        return None
    return session.scalar(sa.select(SlotHost.host).where(SlotHost.id == _ROW_ID)) or None


def find_other_host(session: Session) -> str | None:
    """Return the name of another host that holds an unexpired lease of the slots; None: ``acquire`` would succeed."""
    row = None if session.get_bind().dialect.name == "sqlite" else session.get(SlotHost, _ROW_ID)
    if row is None or row.host == own_host():
        return None
    return None if is_expired(row.host, row.expires_at, database_now(session)) else row.host


def shorten(session: Session, seconds: float) -> None:
    """Shorten this host's lease so that it ends in ``seconds``, if it would end later."""
    until = database_now(session) + timedelta(seconds=seconds)
    own_row = (SlotHost.id == _ROW_ID) & (SlotHost.host == own_host()) & (SlotHost.expires_at > until)
    session.execute(sa.update(SlotHost).where(own_row).values(expires_at=until))


def acquire_or_other_host(database: Database, seconds: float) -> str | None:
    """Take the lease of the slots for this host and return None. May wait for another host's lease to end; return that host's
    name if it is renewed."""
    seen = None
    while True:
        with database.write() as session:
            other = acquire(session, seconds)
            row = session.get(SlotHost, _ROW_ID)
        if other is None or row is None:
            return None
        # only a later time is a sign of life: a clean exit shortens the lease
        if seen is not None and row.expires_at > seen:
            return other
        seen = row.expires_at
        time.sleep(_PAUSE)
