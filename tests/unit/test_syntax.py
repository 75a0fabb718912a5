"""Sources are read by many threads at once, and none hears of the others."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ratchet_service import syntax

SOURCE = "\n".join(
    f"def f{i}(a):\n    return [x + a * (x - {i}) for x in range(a) if x not in (1, {i})]" for i in range(20)
)


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    """Python runs now and then while a tree is made, and others get their turn then."""
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()

    def python(*_: object) -> None:
        for _turn in range(3):
            pass

    gc.callbacks.append(python)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(python)


def test_four_threads_read_sources_at_the_same_time(threads_take_turns: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(lambda _: syntax.parse(SOURCE.encode()), range(160)))
    assert [len(tree.body) for tree in trees] == [20] * 160
