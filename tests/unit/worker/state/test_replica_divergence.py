"""The likely cause of a difference between replicas, from the facts of the ranks."""

from __future__ import annotations

import pytest

from ratchet_worker.state.replica_divergence import cause


@pytest.mark.parametrize(
    "name", ["model/down/up.weight", "optimizer/down/up.weight/exp_avg"], ids=["parameter", "optimizer"]
)
def test_likely_cause_names_a_parameter_whose_module_has_a_slash_in_its_name(name: str) -> None:
    fact = {"renormed": None, "groups": {}, "steps": 1, "backwards": 1, "trained": True}
    text = cause(name, [fact | {"changes": 1}, fact | {"changes": 2}])
    assert text.startswith("Likely cause: down/up.weight was changed in place by rank 0 1 times, rank 1 2 times")
