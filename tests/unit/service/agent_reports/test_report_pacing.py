"""How long a service has agents keep their figures back: by how many there are, and by what their reports cost it."""

from __future__ import annotations

import pytest

from ratchet_contract.protocol.timing import MAX_CONTROL_DELAY_SECONDS
from ratchet_service.agent_reports.message_effects import FIGURES
from ratchet_service.agent_reports.report_pacing import SHARE, Pacing
from ratchet_worker.ipc import report_spool


class Told:
    """A service that is told of one report of each of ``agents`` agents in every round."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pacing = Pacing(lambda: self.now)

    def round(self, agents: int, cost: float, seconds: float = 1.0) -> float:
        after = 0.0
        for number in range(agents):
            self.now += seconds / agents
            after = self.pacing.record_report((f"job-{number}", 1, 0), cost)
        return after


@pytest.mark.parametrize("agents", [1, 3])
def test_few_agents_report_without_delay(agents: int) -> None:
    service = Told()
    assert {service.round(agents, 0.004) for _ in range(30)} == {0.0}


@pytest.mark.parametrize(("agents", "cost"), [(60, 0.002), (200, 0.002), (100, 0.004)])
def test_report_interval_keeps_many_agents_within_cpu_share(agents: int, cost: float) -> None:
    service = Told()
    after = 1.0
    for _ in range(30):
        after = service.round(agents, cost, after or 1.0)
    assert agents / after * cost * 2 == pytest.approx(SHARE, rel=0.01)


def test_report_interval_is_capped_at_longest() -> None:
    service = Told()
    assert service.round(5000, 0.01) == MAX_CONTROL_DELAY_SECONDS


def test_departed_agents_do_not_count_for_report_interval() -> None:
    service = Told()
    service.round(200, 0.002)
    assert service.round(200, 0.002) > 1.0
    service.now += 60
    assert service.round(1, 0.002) == 0.0


def test_delayed_message_kinds_match_fast_path_kinds() -> None:
    """An agent keeps back the very kinds of messages that the service has the short way for."""
    assert {message.model_fields["kind"].default for message in FIGURES} == report_spool.LOW_PRIORITY_KINDS
