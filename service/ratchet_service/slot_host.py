"""Which host's GPUs and cores the slots of a database are. Slot numbers are of one machine: two would lend the same ones twice.

The host keeps one row, with a time at which that ends unless it is renewed, by the server's clock; several reconcilers of the
host share it. A SQLite file is one host's as it is. A time that ends later than any can was written before that clock was set
back: as of a lease, nobody waits for it.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from ratchet_service.database import Database
from ratchet_service.leases import LONGEST, database_now, expired
from ratchet_service.models import SlotHost

_ONE: Final = 1
_PAUSE: Final = 0.5


def own_host() -> str:
    return socket.gethostname()[:255]


def lend(session: Session, seconds: float) -> str | None:
    """Take or renew the slots for this host for so long; the other host's name where that has them."""
    if session.get_bind().dialect.name == "sqlite":
        return None
    now, host = database_now(session), own_host()
    until = now + timedelta(seconds=seconds)
    first = postgresql.insert(SlotHost).values(id=_ONE, host=host, expires_at=until)
    free = (SlotHost.host == host) | (SlotHost.expires_at < now) | (SlotHost.expires_at > now + LONGEST)
    taken = first.on_conflict_do_update(index_elements=["id"], set_={"host": host, "expires_at": until}, where=free)
    if session.scalar(taken.returning(SlotHost.host)) is not None:
        return None
    return session.scalar(sa.select(SlotHost.host).where(SlotHost.id == _ONE)) or None


def elsewhere(session: Session) -> str | None:
    """The host that has the slots as ``lend`` would tell it, without taking them."""
    row = None if session.get_bind().dialect.name == "sqlite" else session.get(SlotHost, _ONE)
    if row is None or row.host == own_host():
        return None
    return None if expired(row.host, row.expires_at, database_now(session)) else row.host


def leave(session: Session, seconds: float) -> None:
    """This host's time ends in so long, unless another reconciler of it renews it until then."""
    until = database_now(session) + timedelta(seconds=seconds)
    ours = (SlotHost.id == _ONE) & (SlotHost.host == own_host()) & (SlotHost.expires_at > until)
    session.execute(sa.update(SlotHost).where(ours).values(expires_at=until))


def other_host(database: Database, seconds: float) -> str | None:
    """Take the slots for this host. The name of another one that lends them, if it is alive: it renews them while we look, at
    the longest for the time that it had. None: they are ours for ``seconds``."""
    seen = None
    while True:
        with database.write() as session:
            other = lend(session, seconds)
            row = session.get(SlotHost, _ONE)
        if other is None or row is None:
            return None
        if seen is not None and row.expires_at != seen:
            return other
        seen = row.expires_at
        time.sleep(_PAUSE)
