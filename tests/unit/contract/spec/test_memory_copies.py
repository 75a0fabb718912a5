"""``checkpoint.memory_every_steps``."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet_contract.errors import SpecError
from ratchet_contract.spec.parse import parse_spec


def spec(nodes: int, every: Any) -> dict[str, Any]:
    world = {"nodes": nodes, "ranks_per_node": 2}
    return {"name": "a", "task": {"entrypoint": "a:B"}, "world": world, "checkpoint": {"memory_every_steps": every}}


def test_copies_in_memory_are_refused_for_several_nodes() -> None:
    assert parse_spec(spec(1, 1)).checkpoint.memory_every_steps == 1
    assert parse_spec(spec(2, None)).checkpoint.memory_every_steps is None
    with pytest.raises(
        SpecError, match=r"memory_every_steps is only for jobs of one node, and world\.nodes is 2: remove"
    ):
        parse_spec(spec(2, 1))


@pytest.mark.parametrize("every", [0, -1, "often"])
def test_interval_of_copies_is_a_number_of_steps(every: Any) -> None:
    with pytest.raises(SpecError, match="memory_every_steps"):
        parse_spec(spec(1, every))
