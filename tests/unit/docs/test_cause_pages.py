"""Causes of an attempt's end, as their page explains them and as the code gives them."""

from __future__ import annotations

import pytest
import torch

from ratchet_contract.phases import Cause
from ratchet_worker.host.exit import cause_of
from tests.support.docs import ROOT

SECTIONS = (ROOT / "docs" / "troubleshooting.md").read_text().split("\n### ")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (MemoryError(), "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory."), "torch.OutOfMemoryError"),
        (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator"),
    ],
)
def test_every_error_for_which_a_rank_ends_with_oom_is_in_its_section(error: Exception, name: str) -> None:
    (section,) = (text for text in SECTIONS if text.startswith("`oom`\n"))
    assert cause_of(error)[0] is Cause.OOM and f"`{name}`" in section
    assert "`exception`" not in section
