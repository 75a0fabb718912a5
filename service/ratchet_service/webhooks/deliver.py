"""The delivery of events to webhooks: at least once, and in order per job.

A webhook's cursor runs through the table of events in the order of their ids, up to ``SettledEvents``. The transaction that
records the result of a delivery advances the cursor. An event that is not accepted becomes a pending row, is tried again with
growing pauses, and holds its job: the cursor passes the job's later events. Once the event is accepted or given up, the same
transaction makes the job's next matching event up to the cursor the pending row, until none is left. If a process is killed
between sending and recording, the next one sends the same message again, under the same id.

One process delivers to a webhook at a time: it holds the lease in the webhook's row, and checks it in each of these transactions.
A change of the webhook removes the lease, so that the delivery begins again with the new values.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.errors import NotFound
from ratchet_contract.phases import EventType
from ratchet_service.db import leases, rounds
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.leases import NO_LEASE, LeaseLost
from ratchet_service.db.models import Event, Job, JobLabel, Webhook, WebhookDelivery
from ratchet_service.db.sanitize import sanitize_text
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.webhooks import message
from ratchet_service.webhooks.send import DEADLINE, Answer, Sender
from ratchet_service.webhooks.settled import SettledEvents

log = logging.getLogger(__name__)

MAX_TRIES: Final = 20
"""Of one event; then the event is given up, or, if no event was accepted meanwhile, the webhook is disabled. With the pauses of
``pause_after`` that is after about three days."""
_MAX_PAUSE: Final = 6 * 3600.0
_GONE: Final = 410
_STOP_SECONDS: Final = 3.0
_LEASE_SECONDS: Final = 60.0
_BATCH: Final = 200
"""Events that are looked at together."""
_MAX_HELD: Final = 1000
"""Held jobs of one webhook: with that many, no new event is looked at."""
_UNREACHABLE: Final = 5
"""Failures in a row after which the receiver counts as down, if they are of at least two jobs: then events that failed are tried,
and one new event after ``_PROBE_PAUSE`` seconds without a try, until one is accepted."""
_PROBE_PAUSE: Final = 60.0
_OVERLOADED: Final = (429, 503)
"""Answers whose ``Retry-After`` pauses the events of all jobs, for ``_MAX_SHARED_PAUSE`` at most."""
_MAX_SHARED_PAUSE: Final = 3600.0
_KEPT: Final = 100
"""Rows of finished deliveries that stay, of one webhook."""


def pause_after(tries: int) -> float:
    """Return the seconds until the next try after ``tries`` failed ones: 1, 4, 16, ..., at most six hours, without the jitter."""
    return min(4.0 ** (tries - 1), _MAX_PAUSE)


class _Found(NamedTuple):
    event: Event
    job_name: str
    owner: str


class Deliverer:
    """Delivers to all webhooks of a database in background threads: one for each webhook with an event to send now."""

    def __init__(self, database: Database, sender: Sender) -> None:
        self._database, self._sender = database, sender
        self._settled = SettledEvents(database)
        self._owner = leases.new_owner()
        self._stopping = threading.Event()
        work = partial(rounds.run_rounds, "webhooks", self.run_round, self._stopping)
        self._thread = threading.Thread(target=work, name="webhooks", daemon=True)
        self._at_work: dict[str, threading.Thread] = {}  # by the webhook's id

    @contextmanager
    def running(self) -> Iterator[None]:
        """Deliver during the block. At its end wait at most some seconds for the running requests; the next process repeats the
        others."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            until = time.monotonic() + _STOP_SECONDS
            self._thread.join(_STOP_SECONDS)
            for thread in list(self._at_work.values()):
                thread.join(max(0.0, until - time.monotonic()))

    def run_round(self) -> None:
        """Start a thread for each webhook with an event to send now. Advance the cursors of the others, so that a later change of
        their filters does not apply to these events."""
        if (settled := self._settled_if_used()) is None:
            return
        self._at_work = {one: thread for one, thread in self._at_work.items() if thread.is_alive()}
        passed: list[str] = []
        with self._database.read() as session:
            for webhook in session.scalars(sa.select(Webhook).where(Webhook.disabled_at.is_(None))):
                if self._stopping.is_set():
                    return
                if webhook.id in self._at_work:
                    continue
                upto = passable(session, webhook, settled)
                if upto is None:
                    work = partial(self._deliver_or_pause, webhook.id, settled)
                    thread = threading.Thread(target=work, name=webhook.id, daemon=True)
                    thread.start()
                    self._at_work[webhook.id] = thread
                elif upto > webhook.cursor:
                    passed.append(webhook.id)
        for webhook_id in passed:
            with self._database.write() as session:
                row = session.get(Webhook, webhook_id, with_for_update=True)
                # again under the lock: another process may have delivered the event that held a job
                if row is not None and (upto := passable(session, row, settled)) is not None:
                    row.cursor = upto

    def _settled_if_used(self) -> int | None:
        """Return the id up to which all events are visible; None if no webhook is enabled."""
        with self._database.read() as session:
            if session.scalar(sa.select(Webhook.id).where(Webhook.disabled_at.is_(None)).limit(1)) is None:
                return None
        return self._settled.newest()

    def _deliver_or_pause(self, webhook_id: str, settled: int) -> None:
        """Deliver to one webhook. After an error the thread pauses, so that no round begins this webhook again meanwhile."""
        if not rounds.log_errors(webhook_id, partial(self.deliver, webhook_id, settled)):
            self._stopping.wait(rounds.ERROR_PAUSE)

    def deliver(self, webhook_id: str, settled: int) -> None:
        """Deliver to one webhook until nothing is to be sent now, or ``running`` ends. Do nothing if another process has
        its lease. Raise ``LeaseLost`` if the webhook is changed or deleted meanwhile. ``settled``: of
        ``SettledEvents``."""
        held_at = time.monotonic()
        webhook = self._acquire(webhook_id)
        if webhook is None or webhook.lease_token is None:
            return
        work = _Work(self._database, self._sender, webhook, webhook.lease_token, held_at, self._stopping)
        try:
            while work.run(settled):
                pass
        finally:
            try:
                work.release()
            except LeaseLost:
                pass
            except SQLAlchemyError as error:  # the first error, if there is one, is the cause
                log.warning("%s: its lease ends in %.0f s: %s", webhook_id, _LEASE_SECONDS, first_line(error))

    def _acquire(self, webhook_id: str) -> Webhook | None:
        """Take the lease of an enabled webhook, and return its row; None if another living process has it."""
        with self._database.write() as session:
            row = session.get(Webhook, webhook_id, with_for_update=True)
            if row is None or not _is_free(session, row):
                return None
            for key, value in leases.lease_values(session, self._owner, _LEASE_SECONDS).items():
                setattr(row, key, value)
            return row


class _Work:
    """The delivery to one webhook under one lease. ``webhook``: its row, as last read."""

    def __init__(
        self,
        database: Database,
        sender: Sender,
        webhook: Webhook,
        token: str,
        held_at: float,
        stopping: threading.Event,
    ) -> None:
        self._database, self._sender, self._webhook, self._token = database, sender, webhook, token
        self._id, self._held_at, self._stopping = webhook.id, held_at, stopping

    def lock(self, session: Session) -> Webhook:
        """Return the webhook's row, locked, and renew the lease. Raise ``LeaseLost`` unless it still has this lease."""
        held_at = time.monotonic()
        mine = (Webhook.id == self._id) & (Webhook.lease_token == self._token)
        row = session.scalar(sa.select(Webhook).where(mine).with_for_update())
        if row is None:
            raise LeaseLost(f"webhook {self._id}: it was changed or taken over")
        row.lease_expires_at = leases.database_now(session) + timedelta(seconds=_LEASE_SECONDS)
        self._webhook, self._held_at = row, held_at
        return row

    def release(self) -> None:
        """Give the lease back. Raise ``LeaseLost`` without one."""
        with self._database.write() as session:
            row = self.lock(session)
            for key, value in NO_LEASE.items():
                setattr(row, key, value)
            _delete_old(session, self._id)

    def run(self, settled: int) -> bool:
        """Try the pending events that are due and some new ones, until one is not accepted: it may have asked for a pause, and
        its job is held. Return False if there was nothing to do, or at the end of ``running``."""
        with self._database.read() as session:
            due = _due(session, self._id)
        for event_id in due:
            if self._stopping.is_set():
                return False
            if not self._retry(event_id):
                break
        with self._database.read() as session:
            upto, found = _look(session, self._webhook, settled)
        for one in found:
            if self._stopping.is_set():
                return False
            if not self._try(one):
                return True
        passes = upto > self._webhook.cursor
        if passes:
            with self._database.write() as session:
                row = self.lock(session)
                row.cursor = max(row.cursor, upto)
                _delete_old(session, self._id)
        return passes or bool(due or found)

    def _retry(self, event_id: int) -> bool:
        """Try a pending event; one that was deleted with its job is marked as dropped. Return False if it was not accepted."""
        query = sa.select(Event, Job.name, Job.owner).join(Job, Job.id == Event.job_id).where(Event.id == event_id)
        with self._database.read() as session:
            row = session.execute(query).one_or_none()
        if row is not None:
            return self._try(_Found(*row))
        with self._database.write() as session:
            self.lock(session)
            delivery = session.get_one(WebhookDelivery, (self._id, event_id))
            delivery.status, delivery.error, delivery.next_try = "dropped", "the job was deleted", None
            delivery.at = leases.database_now(session)
        return True

    def _try(self, found: _Found) -> bool:
        """Send one event, and store the result with the cursor. Return False if it was not accepted."""
        answer, event = self._send(found), found.event
        with self._database.write() as session:
            webhook = self.lock(session)
            now = leases.database_now(session)
            webhook.cursor = max(webhook.cursor, event.id)
            if webhook.old_secret_until is not None and webhook.old_secret_until <= now:
                webhook.old_secret = webhook.old_secret_until = None
            row = session.get(WebhookDelivery, (webhook.id, event.id)) or _add_pending(session, webhook, event, now)
            row.at, row.tries = now, row.tries + 1
            row.first_try = now if row.tries == 1 else row.first_try
            row.answer, row.error, row.next_try = answer.status, None, None
            if answer.error is None:
                row.status, webhook.failures, webhook.accepted_at, webhook.new_after = "delivered", 0, now, None
            else:
                row.error = sanitize_text(answer.error)
                webhook.failures += 1
                _plan_next_try(session, webhook, row, answer, now)
                _pause_others(session, webhook, row, answer, now)
            if row.status != "pending" and webhook.cursor > event.id:
                later = (Event.job_id == event.job_id, Event.id > event.id, Event.id <= webhook.cursor)
                for following in _matching(session, webhook, 1, *later):
                    _add_pending(session, webhook, following.event, now).next_try = _wait(webhook, now)
        if row.status == "failed":
            log.warning("webhook %s (%s): event %d of %s is given up after %d tries: %s", webhook.id,
                        urlsplit(webhook.url).hostname, row.event_id, row.job_id, row.tries, row.error)  # fmt: skip
        if webhook.disabled_at is not None:
            log.warning("webhook %s (%s) is disabled: %s", webhook.id, urlsplit(webhook.url).hostname,
                        webhook.disabled_reason)  # fmt: skip
            raise LeaseLost(f"webhook {webhook.id}: it is disabled")
        return answer.error is None

    def _send(self, found: _Found) -> Answer:
        """Send one event, and return the result. Raise ``LeaseLost`` if the lease might end meanwhile."""
        if not leases.is_surely_held(self._held_at, time.monotonic() + 2 * DEADLINE, _LEASE_SECONDS):
            raise LeaseLost(f"webhook {self._id}: its lease is about to end")
        made = message.of_event(self._webhook, found.event, found.job_name, found.owner)
        headers = message.headers(self._webhook, made, self._database.clock.now())
        return self._sender.send(self._webhook.url, headers, made.body)


def _add_pending(session: Session, webhook: Webhook, event: Event, now: datetime) -> WebhookDelivery:
    """Return a new row: the event is to be sent, and holds its job until then."""
    row = WebhookDelivery(webhook_id=webhook.id, event_id=event.id, job_id=event.job_id, tries=0)
    row.type, row.status, row.at = message.type_of(event), "pending", now
    session.add(row)
    return row


def _plan_next_try(session: Session, webhook: Webhook, row: WebhookDelivery, answer: Answer, now: datetime) -> None:
    """Store when the event that was not accepted is tried again. After ``MAX_TRIES``, give it up, or disable the webhook if it
    accepted no event since the first try; and add an event to the job's history. The answer 410 disables it at once."""
    if answer.status == _GONE:
        reason = f"event {row.event_id} of {row.job_id} was answered with 410 Gone"
        webhook.disabled_at, webhook.disabled_reason = now, f"{reason}: the receiver wants no more events"
        _add_job_event(session, webhook, row, EventType.WEBHOOK_DISABLED, f"webhook {webhook.id} is disabled: {reason}")
        return
    if row.tries < MAX_TRIES:
        pause = max(pause_after(row.tries) * random.uniform(0.9, 1.1), min(answer.retry_after, _MAX_PAUSE))
        row.next_try = now + timedelta(seconds=pause)
        return
    reason = f"event {row.event_id} of {row.job_id} was not accepted in {row.tries} tries"
    if webhook.accepted_at is not None and (row.first_try is None or webhook.accepted_at >= row.first_try):
        row.status = "failed"
        if row.type == f"job.{EventType.WEBHOOK_GAVE_UP}":
            return  # no event about an event about an event
        kind, text = EventType.WEBHOOK_GAVE_UP, f"webhook {webhook.id}: {reason}, and is given up"
    else:
        webhook.disabled_at, webhook.disabled_reason = now, f"{reason}: {row.error}"
        kind, text = EventType.WEBHOOK_DISABLED, f"webhook {webhook.id} is disabled: {reason}"
    _add_job_event(session, webhook, row, kind, text)


def _pause_others(session: Session, webhook: Webhook, row: WebhookDelivery, answer: Answer, now: datetime) -> None:
    """After an event that was not accepted, let new events wait if the receiver is down, and all if it asks for a pause."""
    others = _pending(webhook.id) & (WebhookDelivery.event_id != row.event_id)
    if answer.status in _OVERLOADED and answer.retry_after > 0:
        until = now + timedelta(seconds=min(answer.retry_after, _MAX_SHARED_PAUSE))
        earlier = others & (WebhookDelivery.next_try.is_(None) | (WebhookDelivery.next_try < until))
        later = sa.update(WebhookDelivery).where(earlier).values(next_try=until)
        session.execute(later.execution_options(synchronize_session=False))
    else:
        failed = others & (WebhookDelivery.tries > 0)
        if webhook.accepted_at is not None:
            failed &= WebhookDelivery.at > webhook.accepted_at
        if webhook.failures < _UNREACHABLE or not session.scalar(sa.select(sa.exists().where(failed))):
            return
        until = now + timedelta(seconds=_PROBE_PAUSE)
    webhook.new_after = max(until, _wait(webhook, now) or until)


def _wait(webhook: Webhook, now: datetime) -> datetime | None:
    """Return until when new events wait; None if they do not. A time later than any pause was written before the clock was set
    back."""
    at = webhook.new_after
    return at if at is not None and now < at <= now + timedelta(seconds=2 * _MAX_SHARED_PAUSE) else None


def _add_job_event(session: Session, webhook: Webhook, row: WebhookDelivery, kind: EventType, text: str) -> None:
    """Add an event about the webhook to the history of the delivery's job, unless the job was deleted."""
    with suppress(NotFound):
        lock_job(session, row.job_id)
        # without the error, which may show addresses that only admins may see
        add_event(session, row.job_id, kind, text, data={"webhook": webhook.id})


def _pending(webhook_id: str) -> sa.ColumnElement[bool]:
    """Return the SQL condition for the webhook's rows of events that are still to be delivered: one for each held job."""
    return (WebhookDelivery.webhook_id == webhook_id) & (WebhookDelivery.status == "pending")


def passable(session: Session, webhook: Webhook, settled: int) -> int | None:
    """Return the id up to which the cursor may advance without a delivery; None if there is an event to send now, or more than
    ``_BATCH`` events to look at. ``settled``: of ``SettledEvents``."""
    if not _is_free(session, webhook):
        return webhook.cursor
    if _due(session, webhook.id):
        return None
    upto, found = _look(session, webhook, settled)
    return None if found or webhook.cursor < upto < settled else upto


def _is_free(session: Session, webhook: Webhook) -> bool:
    """True if the webhook is enabled, and no living process has its lease."""
    if webhook.disabled_at is not None:
        return False
    expired = leases.is_expired(webhook.lease_token, webhook.lease_expires_at, leases.database_now(session))
    return expired or leases.owner_is_dead(webhook.lease_owner)


def _look(session: Session, webhook: Webhook, settled: int) -> tuple[int, list[_Found]]:
    """Return the id up to which the next events after the cursor are looked at, and those to send: they match, and their jobs are
    not held. While new events wait, that is the cursor, and none."""
    if webhook.cursor >= settled:
        return webhook.cursor, []
    held = sa.select(WebhookDelivery.job_id).where(_pending(webhook.id))
    jobs = session.scalar(sa.select(sa.func.count()).select_from(held.subquery())) or 0
    if jobs >= _MAX_HELD or _wait(webhook, leases.database_now(session)):
        return webhook.cursor, []
    ids = sa.select(Event.id).where(Event.id > webhook.cursor, Event.id <= settled).order_by(Event.id)
    upto = session.scalar(ids.offset(_BATCH - 1).limit(1)) or settled
    new = (Event.id > webhook.cursor, Event.id <= upto, Event.job_id.not_in(held))
    return upto, _matching(session, webhook, _BATCH, *new)


def _due(session: Session, webhook_id: str) -> list[int]:
    """Return the ids of the pending events to try now, in their order."""
    now, at = leases.database_now(session), WebhookDelivery.next_try
    # a time later than any pause was written before the clock was set back
    is_due = at.is_(None) | (at <= now) | (at > now + timedelta(seconds=2 * _MAX_PAUSE))
    query = sa.select(WebhookDelivery.event_id).where(_pending(webhook_id), is_due)
    return list(session.scalars(query.order_by(WebhookDelivery.event_id)))


def _matching(session: Session, webhook: Webhook, most: int, *where: sa.ColumnElement[bool]) -> list[_Found]:
    """Return the first events under these conditions that match the webhook's filters, ``most`` at most, in their order."""
    query = sa.select(Event, Job.name, Job.owner).join(Job, Job.id == Event.job_id).where(*where).order_by(Event.id)
    if webhook.owner is not None:
        query = query.where(Job.owner == webhook.owner)
    if webhook.label is not None:
        key, _, value = webhook.label.partition("=")
        query = query.where(sa.exists().where(JobLabel.job_id == Job.id, JobLabel.key == key, JobLabel.value == value))
    # a few rows at a time: there may be thousands, and the first may match
    with session.execute(query.execution_options(yield_per=20)) as rows:
        found = (_Found(*row) for row in rows if message.matches(webhook.types, message.type_of(row[0])))
        return list(islice(found, most))


def _delete_old(session: Session, webhook_id: str) -> None:
    """Delete the webhook's rows of finished deliveries but the newest ``_KEPT``."""
    done = (WebhookDelivery.webhook_id == webhook_id) & (WebhookDelivery.status != "pending")
    newest = sa.select(WebhookDelivery.event_id).where(done).order_by(WebhookDelivery.event_id.desc())
    oldest_kept = session.scalar(newest.offset(_KEPT - 1).limit(1))
    if oldest_kept is not None:
        session.execute(sa.delete(WebhookDelivery).where(done, WebhookDelivery.event_id < oldest_kept))
