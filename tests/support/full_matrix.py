"""Marks the tests that ``make exactness`` runs and ``make test`` leaves out."""

from __future__ import annotations

import os
from typing import Final

import pytest

FULL: Final = os.environ.get("RATCHET_TEST_OPTIONS") == "all"
full: Final = pytest.mark.skipif(not FULL, reason="RATCHET_TEST_OPTIONS=all (make exactness) runs it")
