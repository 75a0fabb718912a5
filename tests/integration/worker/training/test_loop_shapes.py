"""Loops over a prepared loader that are not written as ``for batch in loader``: refused, or told what becomes of the steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.fork_server import LIBRARIES

SCRIPT = Path(__file__).parents[3] / "support" / "loop_job" / "shapes.py"
OUTSIDE: Final = "were outside of the first pass over the prepared loader"
ARGUMENTS = (
    "ordinary", "nested", "two_loops", "nested_steps", "not_prepared", "next_of_iter", "evaluated_first", "listed", "zipped",
    "sliced", "zipped-strict", "sliced-strict", "by_next", "by_next-strict", "while_next", "sliced_numbers", "another_loop_later",
    "walked",
)  # fmt: skip


def run(place: Path, *arguments: str, samples: int = 20) -> dict[str, tuple[dict[str, Any], str]]:
    """Of each argument what the script tells, and what Ratchet printed meanwhile."""
    env = {**os.environ, "SAMPLES": str(samples), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    with (place / "said").open("w+") as said_to:
        LIBRARIES.start(command, said_to.fileno(), cwd=place, env=env).wait(120)
        said_to.seek(0)
        printed = said_to.read()
    found, said = dict[str, tuple[dict[str, Any], str]](), ""
    for line in printed.splitlines():
        if line.startswith('{"shape"'):
            found[arguments[len(found)]] = json.loads(line), said
            said = ""
        else:
            said += line + "\n"
    assert len(found) == len(arguments), printed
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    return run(tmp_path_factory.mktemp("shapes"), *ARGUMENTS)


def test_ordinary_loop_causes_no_warning(told: dict[str, tuple[dict[str, Any], str]]) -> None:
    ended, said = told["ordinary"]
    assert (ended["step"], ended["error"]) == (13, None) and "outside" not in said and "through" not in said


@pytest.mark.parametrize(
    ("shape", "error", "done"),
    [
        ("nested", "epochs() was called before", 0),
        ("two_loops", "epochs() was called before", 5),
        ("not_prepared", "trained without a batch of the prepared loader", 5),
        ("nested_steps", "in the middle of a step", 0),
        ("zipped-strict", "reads the loader through zip", 0),
        ("sliced-strict", "reads the loader through islice", 0),
        ("by_next-strict", "takes batches with next()", 0),
    ],
)
def test_loops_that_would_change_the_steps_are_refused(
    told: dict[str, tuple[dict[str, Any], str]], shape: str, error: str, done: int
) -> None:
    ended, _ = told[shape]
    assert error in (ended["error"] or "") and ended["done"] == done, ended


@pytest.mark.parametrize(
    ("shape", "count", "steps"),
    [("next_of_iter", 4, 2), ("evaluated_first", 5, 10), ("listed", 5, 10)],
)
def test_backward_outside_the_epoch_loop_is_warned_of_once(
    told: dict[str, tuple[dict[str, Any], str]], shape: str, count: int, steps: int
) -> None:
    ended, said = told[shape]
    assert (ended["step"], ended["done"], ended["error"]) == (steps, 10, None)
    assert said.count(OUTSIDE) == 1 and f"{count} backward passes of epoch 0" in said, said


@pytest.mark.parametrize(
    ("shape", "name", "steps"),
    [
        ("zipped", "the loop reads the loader through zip", 10),
        ("sliced", "the loop reads the loader through islice", 6),
        ("sliced_numbers", "the loop reads the loader through islice", 6),
        ("another_loop_later", "the loop reads the loader through islice", 16),
        ("by_next", "the loop takes batches with next()", 6),
        ("while_next", "the loop carries count from one pass", 6),
    ],
)
def test_counting_wrapper_around_the_loader_is_named(
    told: dict[str, tuple[dict[str, Any], str]], shape: str, name: str, steps: int
) -> None:
    ended, said = told[shape]
    assert (ended["step"], ended["error"]) == (steps, None) and OUTSIDE not in said
    assert said.count(name) == 1, said


def test_loader_wrappers_are_searched_for_in_the_first_epoch_only(
    told: dict[str, tuple[dict[str, Any], str]],
) -> None:
    assert told["walked"][0]["error"] == "AssertionError: [True, False, False]"


def test_enumerate_of_resumed_epoch_continues_numbering(tmp_path: Path) -> None:
    assert "Stopped" in run(tmp_path, "numbered")["numbered"][0]["error"]
    ended, said = run(tmp_path, "numbered")["numbered"]
    assert ended["error"] == "AssertionError: [2, 3, 4] [0, 1, 2, 3, 4]" and "resumed exactly" in said, (ended, said)


def test_save_after_a_broken_off_epoch_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    assert "ArithmeticError" in run(tmp_path, "broken_off")["broken_off"][0]["error"]
    ended, said = run(tmp_path, "broken_off")["broken_off"]
    later = [(epoch, n) for epoch in (1, 2) for n in range(3)]
    assert ended["error"] == f"AssertionError: {later}" and "resumed exactly from step 3" in said, (ended, said)


def test_stop_caught_by_script_still_stops_and_changed_data_are_named(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "stop_caught")["stop_caught"]
    assert (ended["step"], ended["done"]) == (7, 7) and "Stopped" in ended["error"], ended
    ended, said = run(tmp_path, "stop_caught", samples=24)["stop_caught"]
    assert "an epoch had 5 batches, and now has 6" in said, said
