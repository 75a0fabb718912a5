"""Decides what in a report is new, compared with the stored rows and with this process's earlier answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from ratchet_contract.phases import AttemptPhase
from ratchet_contract.protocol.messages import AgentReport
from ratchet_service.agent_reports.fast_rows import AttemptRow, NodeRow
from ratchet_service.agent_reports.message_effects import FIGURES

_ORDER: Final = [AttemptPhase.LAUNCHING, AttemptPhase.RUNNING, AttemptPhase.STOPPING, AttemptPhase.ENDED]
_MAX_AGENTS: Final = 10_000
"""Number of agents whose last answer is remembered."""


class AcknowledgedReports:
    """The sequence numbers in this process's last answers to agents, in memory. Thread-safe."""

    def __init__(self) -> None:
        self._acked: OrderedDict[tuple[str, int, int], Mapping[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def is_behind(self, report: AgentReport) -> bool:
        """True if the report has messages with higher numbers than this process has acknowledged to its agent; False if it
        remembers no answer to that agent."""
        acked = self._acked.get((report.job_id, report.attempt, report.node))
        return acked is not None and _has_unacked_messages(report, acked)

    def record(self, report: AgentReport, acked: Mapping[int, int]) -> None:
        """Remember ``acked``, the sequence numbers (rank -> number) in the answer to ``report``."""
        key = report.job_id, report.attempt, report.node
        with self._lock:
            self._acked[key] = acked
            self._acked.move_to_end(key)
            if len(self._acked) > _MAX_AGENTS:
                self._acked.popitem(last=False)


def has_news(report: AgentReport, attempt: AttemptRow, node: NodeRow) -> bool:
    """True if the report contains messages, a result, a later phase or an address that the rows do not contain yet."""
    fresh = _has_unacked_messages(report, {int(rank): number for rank, number in node.acked.items()})
    result = report.result is not None and str(report.node) not in attempt.results
    return fresh or result or is_later_phase(report.phase, node.phase) or report.address not in (None, node.address)


def has_only_figures(report: AgentReport) -> bool:
    """True if all messages of the report are ``FIGURES`` (metrics, progress, hook summaries), or if it has no messages."""
    return all(isinstance(message, FIGURES) for batch in report.batches for message in batch.messages)


def changes_only_figures(report: AgentReport, attempt: AttemptRow, node: NodeRow) -> bool:
    """True only if the report changes no columns of job, attempt and node except those that ``fast_rows`` covers."""
    return (
        has_only_figures(report)
        and report.result is None
        and not is_later_phase(report.phase, node.phase)
        and not is_later_phase(report.phase, attempt.phase)
        and report.address in (None, node.address)
    )


def is_later_phase(new: AttemptPhase, old: AttemptPhase) -> bool:
    """True if ``new`` comes after ``old`` in the order of an attempt's phases."""
    return _ORDER.index(new) > _ORDER.index(old)


def _has_unacked_messages(report: AgentReport, acked: Mapping[int, int]) -> bool:
    """True if the report has messages with numbers beyond those in ``acked`` (rank -> number)."""
    return any(batch.from_seq + len(batch.messages) - 1 > acked.get(batch.rank, 0) for batch in report.batches)
