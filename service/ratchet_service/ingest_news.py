"""What of a report is new: to the rows, and to this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from ratchet_contract.messages import AgentReport
from ratchet_contract.phases import AttemptPhase
from ratchet_service.ingest_effects import FIGURES
from ratchet_service.ingest_rows import AttemptRow, NodeRow

_ORDER: Final = [AttemptPhase.LAUNCHING, AttemptPhase.RUNNING, AttemptPhase.STOPPING, AttemptPhase.ENDED]
_AGENTS: Final = 10_000
"""Whose last answers are remembered."""


class Told:
    """What this process has told agents to be stored. Numbers that are stored only grow, so a report that goes beyond them has
    news, and need not be looked at before the transaction that takes it in. Thread-safe."""

    def __init__(self) -> None:
        self._acked: OrderedDict[tuple[str, int, int], Mapping[int, int]] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def less_than(self, report: AgentReport) -> bool:
        """Does it go beyond what its agent was told? False where that is not known."""
        acked = self._acked.get((report.job_id, report.epoch, report.node))
        return acked is not None and _beyond(report, acked)

    def keep(self, report: AgentReport, acked: Mapping[int, int]) -> None:
        """``acked``: the answer to it."""
        key = report.job_id, report.epoch, report.node
        with self._one_at_a_time:
            self._acked[key] = acked
            self._acked.move_to_end(key)
            if len(self._acked) > _AGENTS:
                self._acked.popitem(last=False)


def has_news(report: AgentReport, attempt: AttemptRow, node: NodeRow) -> bool:
    """Is there anything in it that is not in the rows?"""
    fresh = _beyond(report, {int(rank): number for rank, number in node.acked.items()})
    result = report.result is not None and str(report.node) not in attempt.results
    return fresh or result or later(report.phase, node.phase) or report.address not in (None, node.address)


def figures(report: AgentReport) -> bool:
    """Has it messages of no other kind?"""
    return all(isinstance(message, FIGURES) for batch in report.batches for message in batch.messages)


def figures_alone(report: AgentReport, attempt: AttemptRow, node: NodeRow) -> bool:
    """Is there nothing in it but what ``ingest_rows`` has the columns of?"""
    return (
        figures(report)
        and report.result is None
        and not later(report.phase, node.phase)
        and not later(report.phase, attempt.phase)
        and report.address in (None, node.address)
    )


def later(new: AttemptPhase, old: AttemptPhase) -> bool:
    return _ORDER.index(new) > _ORDER.index(old)


def _beyond(report: AgentReport, acked: Mapping[int, int]) -> bool:
    return any(batch.from_seq + len(batch.messages) - 1 > acked.get(batch.rank, 0) for batch in report.batches)
