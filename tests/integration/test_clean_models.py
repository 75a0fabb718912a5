"""Public models with random weights under ``determinism: strict``: killed, resumed in a new process, nothing refused or named,
and at the end the checkpoint of an undisturbed run. ``RATCHET_TEST_CLEAN=all``: every one of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.planted_runs import How, clean, outcomes

FEW = ["clean:GPT2", "clean:ResNet", "clean:TorchMetrics", "clean:Wav2Vec2"]
CASES = clean() if os.environ.get("RATCHET_TEST_CLEAN") == "all" else FEW


@pytest.mark.parametrize("case", CASES)
def test_a_clean_model_is_exact_under_strict(tmp_path: Path, case: str) -> None:
    (found,) = outcomes(tmp_path, case, ["epoch"], How(strict=True)).values()
    assert found.kind == "exact", found


def test_there_are_enough_of_them() -> None:
    assert len(clean()) >= 20 and {*FEW} <= {*clean()}
