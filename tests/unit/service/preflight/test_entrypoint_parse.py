"""Sources are read by many threads at once, and none hears of the others."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ratchet_service.preflight import entrypoint

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


def test_entrypoint_parse_is_thread_safe(threads_take_turns: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(lambda _: entrypoint.parse(SOURCE.encode()), range(160)))
    assert [len(tree.body) for tree in trees] == [20] * 160


def test_entrypoint_parse_works_while_other_threads_parse(threads_take_turns: None) -> None:
    """Formatting makes trees, too, of the lines with an error, and takes no part in the lock."""
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            with suppress(SystemError):
                ast.parse(SOURCE)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(others)
        try:
            trees = [_from_a_depth(40) for _ in range(300)]
        finally:
            done.set()
    assert [len(tree.body) for tree in trees] == [20] * 300


def _from_a_depth(calls: int) -> ast.Module:
    """The count goes wrong between threads of different depths."""
    return _from_a_depth(calls - 1) if calls else entrypoint.parse(SOURCE.encode())


def test_source_of_several_mebibytes_is_not_parsed() -> None:
    """The tree takes a thousand times the memory of its source: 2 MiB of short statements give 2 GiB."""
    with pytest.raises(MemoryError):
        entrypoint.parse(b"#" * (3 << 20))
