"""Public models with random weights under ``determinism: strict``: killed, resumed in a new process, nothing refused or named,
and at the end the checkpoint of an undisturbed run. ``RATCHET_TEST_CLEAN=all``: every one of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.planted_runs import How, public_model_cases, run_case

FEW = ["clean:GPT2", "clean:ResNet", "clean:TorchMetrics", "clean:Wav2Vec2"]
CASES = public_model_cases() if os.environ.get("RATCHET_TEST_CLEAN") == "all" else FEW


@pytest.mark.parametrize("case", CASES)
def test_public_model_resumes_exactly_under_strict(tmp_path: Path, case: str) -> None:
    (found,) = run_case(tmp_path, case, ["epoch"], How(strict=True)).values()
    assert found.kind == "exact", found


def test_at_least_twenty_public_models_are_covered() -> None:
    assert len(public_model_cases()) >= 20 and {*FEW} <= {*public_model_cases()}
