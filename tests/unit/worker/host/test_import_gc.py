"""A rank that imports without the collector gives it back to the user's code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ratchet_worker.host.cpu import gc_disabled


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_gc_is_disabled_inside_uncollected_and_restored_on_error() -> None:
    with pytest.raises(ModuleNotFoundError), gc_disabled():
        assert not gc.isenabled()
        raise ModuleNotFoundError("torch")
    assert gc.isenabled()


def test_gc_disabled_by_user_stays_disabled() -> None:
    gc.disable()
    with gc_disabled():
        pass
    assert not gc.isenabled()
