"""How long a service has agents keep their figures back: by how many there are, and by what their reports cost it."""

from __future__ import annotations

import pytest

from ratchet_contract.hearing import LONGEST
from ratchet_service.ingest_effects import FIGURES
from ratchet_service.pacing import SHARE, Pacing
from ratchet_worker import spool


class Told:
    """A service that is told of one report of each of ``agents`` agents in every round."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pacing = Pacing(lambda: self.now)

    def round(self, agents: int, cost: float, seconds: float = 1.0) -> float:
        after = 0.0
        for number in range(agents):
            self.now += seconds / agents
            after = self.pacing.reported((f"job-{number}", 1, 0), cost)
        return after


@pytest.mark.parametrize("agents", [1, 3])
def test_a_few_agents_report_as_they_like(agents: int) -> None:
    service = Told()
    assert {service.round(agents, 0.004) for _ in range(30)} == {0.0}


@pytest.mark.parametrize(("agents", "cost"), [(60, 0.002), (200, 0.002), (100, 0.004)])
def test_all_of_many_agents_reports_take_their_share_of_a_core_and_no_more(agents: int, cost: float) -> None:
    service = Told()
    after = 1.0
    for _ in range(30):
        after = service.round(agents, cost, after or 1.0)
    assert agents / after * cost * 2 == pytest.approx(SHARE, rel=0.01)


def test_no_agent_is_asked_to_wait_longer_than_a_wish_may_take() -> None:
    service = Told()
    assert service.round(5000, 0.01) == LONGEST


def test_who_has_gone_keeps_nobody_back() -> None:
    service = Told()
    service.round(200, 0.002)
    assert service.round(200, 0.002) > 1.0
    service.now += 60
    assert service.round(1, 0.002) == 0.0


def test_what_may_wait_is_what_is_taken_in_quickly() -> None:
    """An agent keeps back the very kinds of messages that the service has the short way for."""
    assert {message.model_fields["kind"].default for message in FIGURES} == spool.FIGURES
