"""Stores the step times that ranks report, and adds an event for each rank that the others wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import EventType
from ratchet_contract.protocol.messages import HookState, RankMessage
from ratchet_service.agent_reports.fast_rows import Shape
from ratchet_service.db.models import Attempt, AttemptNode
from ratchet_service.db.transitions import add_event
from ratchet_service.lifecycle.stragglers import WINDOWS, find_stragglers


def store_times(node: AttemptNode, rank: int, messages: Iterable[RankMessage]) -> None:
    """Store the newest step times of ``messages``, which are of ``rank``."""
    new = [[m.times.ready, m.times.step] for m in messages if isinstance(m, HookState) and m.times is not None]
    if new and rank >= 0:
        times = node.times or {}
        node.times = {**times, str(rank): [*times.get(str(rank), ()), *new][-WINDOWS:]}


def add_straggler_events(session: Session, attempt: Attempt, node: AttemptNode, shape: Shape) -> None:
    """Compare the ranks of all nodes. A rank that the others wait for is stored in the attempt and adds an event, once."""
    known, times, world = attempt.stragglers or {}, dict(node.times or {}), shape.nodes * shape.ranks_per_node
    on_nodes = (AttemptNode.job_id == attempt.job_id) & (AttemptNode.attempt == attempt.number)
    if shape.nodes > 1:
        others = sa.select(AttemptNode.times).where(on_nodes, AttemptNode.node != node.node)
        for of_node in session.scalars(others):
            times |= of_node or {}
    for one in find_stragglers(times, world):
        if str(one.rank) in known:
            continue
        number = one.rank // shape.ranks_per_node
        host = session.scalar(sa.select(AttemptNode.host).where(on_nodes, AttemptNode.node == number))
        data: dict[str, Any] = {"rank": one.rank, "node": number, "host": host}
        data |= {"ready_seconds": one.ready, "others_seconds": one.others, "share": round(one.share, 4)}
        attempt.stragglers = known = known | {str(one.rank): data}
        text = one.sentence(host)
        add_event(session, attempt.job_id, EventType.STRAGGLER, text, attempt=attempt.number, data=data)
