"""The delivery of events to webhooks: at least once, and in order per job.

A webhook's cursor runs through the table of events in the order of their ids, up to ``SettledEvents``. The transaction that
records the result of a delivery advances the cursor. A delivery that fails is tried again with growing pauses; meanwhile its
job's later events wait, as rows with the event's id alone, and other jobs' events pass. If a process is killed between sending
and recording, the next one sends the same message again, under the same id.

One process delivers to a webhook at a time: it holds the lease in the webhook's row, and checks it in each of these transactions.
A change of the webhook removes the lease, so that the delivery begins again with the new values.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.errors import NotFound
from ratchet_contract.phases import EventType
from ratchet_service.db import leases
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
_INTERVAL: Final = 1.0
_ERROR_PAUSE: Final = 10.0
_STOP_SECONDS: Final = 3.0
_LEASE_SECONDS: Final = 60.0
_BATCH: Final = 200
"""Events that are read at once."""
_MAX_PENDING: Final = 1000
"""Rows that wait for a try of one webhook: beyond that, no job's later events are looked at."""
_UNREACHABLE: Final = 5
"""Failures in a row after which the receiver counts as down, if they are of at least two jobs: then events that failed are tried,
and every ``_PROBE_PAUSE`` seconds one new event, until one is accepted."""
_PROBE_PAUSE: Final = 60.0
_KEPT: Final = 100
"""Rows of finished deliveries that stay, of one webhook."""


def pause_after(tries: int) -> float:
    """Return the seconds until the next try after ``tries`` failed ones: 1, 4, 16, ..., at most six hours, without the jitter."""
    return min(4.0 ** (tries - 1), _MAX_PAUSE)


class _Found(NamedTuple):
    """An event that may have to be sent. ``matches``: by its job's owner and labels, and not yet by its type."""

    event: Event
    job_name: str
    owner: str
    matches: bool


class Deliverer:
    """Delivers to all webhooks of a database in background threads: one for each webhook with an event to send now."""

    def __init__(self, database: Database, sender: Sender) -> None:
        self._database, self._sender = database, sender
        self._settled = SettledEvents(database)
        self._owner = leases.new_owner()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
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

    def _run(self) -> None:
        """Run rounds until the end of ``running``. Errors are logged."""
        pause = _INTERVAL
        while not self._stopping.wait(pause):
            pause = _INTERVAL if self._log_errors("webhooks", self.run_round) else _ERROR_PAUSE

    def run_round(self) -> None:
        """Start a thread for each webhook with an event to send now. Advance the cursors of the others, so that a later change of
        their filters does not apply to these events."""
        if (settled := self._settled_if_used()) is None:
            return
        self._at_work = {one: thread for one, thread in self._at_work.items() if thread.is_alive()}
        passed: list[tuple[Webhook, int]] = []
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
                    passed.append((webhook, upto))
        if passed:
            with self._database.write() as session:
                for webhook, upto in passed:
                    same_lease = Webhook.lease_token.is_not_distinct_from(webhook.lease_token)
                    unchanged = (Webhook.cursor == webhook.cursor) & same_lease
                    session.execute(sa.update(Webhook).where(Webhook.id == webhook.id, unchanged).values(cursor=upto))

    def _settled_if_used(self) -> int | None:
        """Return the id up to which all events are visible; None if no webhook is enabled."""
        with self._database.read() as session:
            if session.scalar(sa.select(Webhook.id).where(Webhook.disabled_at.is_(None)).limit(1)) is None:
                return None
        return self._settled.newest()

    def _log_errors(self, name: str, work: Callable[[], None]) -> bool:
        """Run ``work``. Errors are logged under ``name``, and the next round tries again. Return True without an error."""
        try:
            work()
        except LeaseLost:
            return True  # changed, deleted, or taken over
        except SQLAlchemyError as error:
            log.warning("%s: trying again: %s", name, first_line(error))
            return False
        except Exception:
            log.exception("%s: trying again", name)
            return False
        return True

    def _deliver_or_pause(self, webhook_id: str, settled: int) -> None:
        """Deliver to one webhook. After an error the thread pauses, so that no round begins this webhook again meanwhile."""
        if not self._log_errors(webhook_id, partial(self.deliver, webhook_id, settled)):
            self._stopping.wait(_ERROR_PAUSE)

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
        """Return the webhook's row, locked. Raise ``LeaseLost`` unless it still has this lease."""
        mine = (Webhook.id == self._id) & (Webhook.lease_token == self._token)
        row = session.scalar(sa.select(Webhook).where(mine).with_for_update())
        if row is None:
            raise LeaseLost(f"webhook {self._id}: it was changed or taken over")
        return row

    def release(self) -> None:
        """Give the lease back. Raise ``LeaseLost`` without one."""
        with self._database.write() as session:
            row = self.lock(session)
            for key, value in NO_LEASE.items():
                setattr(row, key, value)
            _delete_old(session, self._id)

    def run(self, settled: int) -> bool:
        """Try each event that is due, and send a batch of new ones. Return False if there was nothing to do."""
        with self._database.read() as session:
            due = _due(session, self._id)
        for event_id in due:
            self._retry(event_id)
        if self._stopping.is_set():
            return False
        with self._database.read() as session:
            found, held = _new_events(session, self._webhook, settled)
        return self._send_new(found or [], held) or bool(due)

    def _send_new(self, found: Sequence[_Found], held: set[str]) -> bool:
        """Send the events that match, in their order. ``held``: jobs with an event that is still to be delivered, whose further
        events are only recorded. Return True unless there is no event, or none that matches among few."""
        sent = False
        for one in found:
            if self._stopping.is_set():
                return False
            if not _is_wanted(self._webhook, one):
                continue
            sent = True
            answer = None
            if one.event.job_id not in held:
                answer = self._send(one)
            if answer is None or answer.error is not None:
                held.add(one.event.job_id)
            self._record(one.event, answer)
            if answer is not None and answer.error is not None and self._is_down():
                return False
        full = len(found) == _BATCH
        if full:
            with self._database.write() as session:
                webhook = self.lock(session)
                webhook.cursor = max(webhook.cursor, found[-1].event.id)
                _delete_old(session, self._id)
            self._webhook = webhook
        return sent or full

    def _is_down(self) -> bool:
        """True if the receiver counts as down."""
        with self._database.read() as session:
            return _last_failure_if_down(session, self._webhook) is not None

    def _retry(self, event_id: int) -> None:
        """Try a recorded event; one that was deleted with its job is marked as dropped."""
        if self._stopping.is_set():
            return
        query = sa.select(Event, Job.name, Job.owner).join(Job, Job.id == Event.job_id).where(Event.id == event_id)
        with self._database.read() as session:
            row = session.execute(query).one_or_none()
        if row is not None:
            found = _Found(row[0], row[1], row[2], True)
            self._record(found.event, self._send(found))
            return
        with self._database.write() as session:
            self.lock(session)
            delivery = session.get_one(WebhookDelivery, (self._id, event_id))
            delivery.status, delivery.error, delivery.next_try = "dropped", "the job was deleted", None
            delivery.at = leases.database_now(session)

    def _send(self, found: _Found) -> Answer:
        """Send one event, and return the result. Raise ``LeaseLost`` if the lease might end meanwhile."""
        if not leases.is_surely_held(self._held_at, time.monotonic() + 2 * DEADLINE, _LEASE_SECONDS):
            raise LeaseLost(f"webhook {self._id}: its lease is about to end")
        made = message.of_event(self._webhook, found.event, found.job_name, found.owner)
        headers = message.headers(self._webhook, made, self._database.clock.now())
        return self._sender.send(self._webhook.url, headers, made.body)

    def _record(self, event: Event, answer: Answer | None) -> None:
        """Store the result of a delivery with the cursor, and renew the lease. ``answer`` None: not sent, since an earlier event
        of the job is still to be delivered. After the last try, give the event up, or disable the webhook."""
        held_at = time.monotonic()
        with self._database.write() as session:
            webhook = self.lock(session)
            now = leases.database_now(session)
            webhook.cursor = max(webhook.cursor, event.id)
            webhook.lease_expires_at = now + timedelta(seconds=_LEASE_SECONDS)
            if webhook.old_secret_until is not None and webhook.old_secret_until <= now:
                webhook.old_secret = webhook.old_secret_until = None
            row = session.get(WebhookDelivery, (webhook.id, event.id))
            if row is None:
                row = WebhookDelivery(webhook_id=webhook.id, event_id=event.id, job_id=event.job_id, tries=0)
                row.type, row.status = message.type_of(event), "pending"
                session.add(row)
            row.at = now
            if answer is not None:
                row.tries += 1
                row.first_try = now if row.tries == 1 else row.first_try
                row.answer, row.error = answer.status, None if answer.error is None else sanitize_text(answer.error)
                row.status, row.next_try = "delivered" if answer.error is None else "pending", None
                if answer.error is None:
                    webhook.failures, webhook.accepted_at = 0, now
                else:
                    webhook.failures += 1
                    _plan_next_try(session, webhook, row, answer, now)
        self._webhook, self._held_at = webhook, held_at
        if row.status == "failed":
            log.warning("webhook %s (%s): event %d of %s is given up after %d tries: %s", webhook.id,
                        urlsplit(webhook.url).hostname, row.event_id, row.job_id, row.tries, row.error)  # fmt: skip
        if webhook.disabled_at is not None:
            log.warning("webhook %s (%s) is disabled: %s", webhook.id, urlsplit(webhook.url).hostname,
                        webhook.disabled_reason)  # fmt: skip
            raise LeaseLost(f"webhook {webhook.id}: it is disabled")


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


def _add_job_event(session: Session, webhook: Webhook, row: WebhookDelivery, kind: EventType, text: str) -> None:
    """Add an event about the webhook to the history of the delivery's job, unless the job was deleted."""
    with suppress(NotFound):
        lock_job(session, row.job_id)
        # without the error, which may show addresses that only admins may see
        add_event(session, row.job_id, kind, text, data={"webhook": webhook.id})


def _pending(webhook_id: str) -> sa.ColumnElement[bool]:
    """Return the SQL condition for the webhook's rows of events that are still to be delivered."""
    return (WebhookDelivery.webhook_id == webhook_id) & (WebhookDelivery.status == "pending")


def passable(session: Session, webhook: Webhook, settled: int) -> int | None:
    """Return the id up to which the cursor may advance without a delivery; None if there is an event to send now, or a whole
    batch to look at. ``settled``: of ``SettledEvents``."""
    if not _is_free(session, webhook):
        return webhook.cursor
    if _due(session, webhook.id):
        return None
    found, _ = _new_events(session, webhook, settled)
    if found is None:
        return webhook.cursor
    return None if len(found) == _BATCH or any(_is_wanted(webhook, one) for one in found) else settled


def _is_free(session: Session, webhook: Webhook) -> bool:
    """True if the webhook is enabled, and no living process has its lease."""
    if webhook.disabled_at is not None:
        return False
    expired = leases.is_expired(webhook.lease_token, webhook.lease_expires_at, leases.database_now(session))
    return expired or leases.owner_is_dead(webhook.lease_owner)


def _new_events(session: Session, webhook: Webhook, settled: int) -> tuple[list[_Found] | None, set[str]]:
    """Return the next events after the cursor, and the jobs with a recorded event that is still to be delivered. None if the
    receiver is down and was tried less than ``_PROBE_PAUSE`` ago, or if too many events are recorded: then no further event is
    looked at."""
    pending = session.scalars(sa.select(WebhookDelivery.job_id).where(_pending(webhook.id))).all()
    if len(pending) >= _MAX_PENDING:
        return None, set(pending)
    tried, now = _last_failure_if_down(session, webhook), leases.database_now(session)
    if tried is not None and tried <= now < tried + timedelta(seconds=_PROBE_PAUSE):
        return None, set(pending)
    return _after_cursor(session, webhook, settled), set(pending)


def _last_failure_if_down(session: Session, webhook: Webhook) -> datetime | None:
    """Return the time of the last failure if the receiver is down, else None: ``_UNREACHABLE`` failures in a row, of events
    of at least two jobs since the last acceptance."""
    if webhook.failures < _UNREACHABLE:
        return None
    failed = _pending(webhook.id) & (WebhookDelivery.tries > 0)
    if webhook.accepted_at is not None:
        failed &= WebhookDelivery.at > webhook.accepted_at
    count, last = sa.func.count(sa.distinct(WebhookDelivery.job_id)), sa.func.max(WebhookDelivery.at)
    jobs, tried = session.execute(sa.select(count, last).where(failed)).one()
    return tried if jobs > 1 else None


def _due(session: Session, webhook_id: str) -> list[int]:
    """Return the ids of events to try now, in their order: of each job at most the first that is still to be delivered."""
    now = leases.database_now(session)
    first = sa.select(sa.func.min(WebhookDelivery.event_id)).where(_pending(webhook_id))
    query = sa.select(WebhookDelivery.event_id, WebhookDelivery.next_try).where(
        WebhookDelivery.webhook_id == webhook_id,
        WebhookDelivery.event_id.in_(first.group_by(WebhookDelivery.job_id)),
    )
    # a time later than any pause was written before the clock was set back
    last = now + timedelta(seconds=2 * _MAX_PAUSE)
    rows = session.execute(query.order_by(WebhookDelivery.event_id))
    return [event_id for event_id, at in rows if at is None or at <= now or at > last]


def _after_cursor(session: Session, webhook: Webhook, settled: int) -> list[_Found]:
    """Return at most ``_BATCH`` events after the webhook's cursor and up to ``settled``."""
    wanted = [] if webhook.owner is None else [Job.owner == webhook.owner]
    if webhook.label is not None:
        key, _, value = webhook.label.partition("=")
        label = sa.exists().where(JobLabel.job_id == Job.id, JobLabel.key == key, JobLabel.value == value)
        wanted.append(label)
    matches = sa.case((sa.and_(sa.true(), *wanted), 1), else_=0)
    query = sa.select(Event, Job.name, Job.owner, matches).join(Job, Job.id == Event.job_id)
    query = query.where(Event.id > webhook.cursor, Event.id <= settled).order_by(Event.id).limit(_BATCH)
    return [_Found(event, name, owner, bool(fits)) for event, name, owner, fits in session.execute(query)]


def _is_wanted(webhook: Webhook, found: _Found) -> bool:
    """True if the event is to be sent to the webhook."""
    return found.matches and message.matches(webhook.types, message.type_of(found.event))


def _delete_old(session: Session, webhook_id: str) -> None:
    """Delete the webhook's rows of finished deliveries but the newest ``_KEPT``."""
    done = (WebhookDelivery.webhook_id == webhook_id) & (WebhookDelivery.status != "pending")
    newest = sa.select(WebhookDelivery.event_id).where(done).order_by(WebhookDelivery.event_id.desc())
    oldest_kept = session.scalar(newest.offset(_KEPT - 1).limit(1))
    if oldest_kept is not None:
        session.execute(sa.delete(WebhookDelivery).where(done, WebhookDelivery.event_id < oldest_kept))
