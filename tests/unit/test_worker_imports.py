"""A rank that imports without the collector gives it back to the user's code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ratchet_worker.imports import uncollected


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_within_and_on_again_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        assert not gc.isenabled()
        raise ModuleNotFoundError("torch")
    assert gc.isenabled()


def test_who_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
