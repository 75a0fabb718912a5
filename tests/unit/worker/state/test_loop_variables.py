"""Variables that a loop carries from step to step, by its source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from ratchet_contract.script.loop_variables import carried_variables, only_displayed
from ratchet_worker.state import loop_variables

CARRIED = {
    "best = max(best, found(x))": ["best"],
    "count += 1": ["count"],
    "use(batch); batch = draw()": ["batch"],
    "for y in x:\n  use(batch); batch = draw()": ["batch"],
    "if x > best:\n  best = x": ["best"],
    "if x:\n  last = x\nuse(last)": ["last"],
    "try:\n  a = f(x)\nexcept ValueError:\n  pass\nuse(a)": ["a"],
    "a, b = b, a": ["a", "b"],
    "f = [a + y for y in x]; a = f": ["a"],
    "del a; use(a); a = x; a += b; b = 1": ["b"],
    "if (wait := wait + 1) > 5:\n  stop()": ["wait"],
    "while (left := left - 1) > 0:\n  use(x)": ["left"],
    "with timed(n := n + 1):\n  use(x)": ["n"],
}
NOT = [
    "total = 0\nfor y in x:\n  total += y\nprint(total)",
    "for y in x:\n  loss = f(y)\nprint(loss)",
    "if x:\n  a = 1\nelse:\n  a = 2\nuse(a)",
    "try:\n  a = f(x)\nexcept ValueError:\n  continue\nuse(a)",
    "with open(x) as file:\n  a = file.read()\nuse(a)",
    "use(time.time() - end); end = time.time()",
    "now = time.perf_counter(); use(now - last); last = now",
    "now = time.time(); dt = now - last; last = now; rate = f(x, dt); mean = 0.9 * mean + rate; use(mean)",
    "state['a'] = state.get('a', 0) + 1; model.step += 1",
    "a = [y for y in x]; b = (lambda y: y)(a)",
    "if (found := f(x)) > 1:\n  use(found)",
    "match x:\n  case [a, *b]:\n    use(a, b)",
    "i, n = x\nuse(i)",
]


SHOWN = {
    "total += x; n += 1\nif i % 10 == 0:\n  print(f'{total / n:.3f}'); total = n = 0": ["n", "total"],
    "seen += 1; bar.set_postfix(seen=seen)": ["seen"],
    "mean = 0.9 * mean + x; log.info('%s', mean)": ["mean"],
    "seen += 1; print(seen, file=out)": [],
    "seen += 1\nif seen > 3:\n  stop()": [],
    "seen += 1; lr = f(seen); print(lr)": [],
    "seen += 1; kept.append(seen)": [],
    "best = max(best, x); print(best)": ["best"],
    "best = save_if_better(model, best); print(best)": [],
    "lr *= 0.95; print(f'{train(model, lr):.4f}')": [],
    "best = max(best, x); bar.set_postfix(lr=scheduler.step(best))": [],
    "total += x; print(total.item(), '{}'.format(total), max(total, 1))": ["total"],
    "global best\nbest = max(best, x); print(best)": [],
}


def loop_of(body: str) -> ast.For:
    lines = "\n".join(f"  {line}" for line in body.splitlines())
    loop = ast.parse(f"for i, x in steps:\n{lines}").body[0]
    assert isinstance(loop, ast.For)
    return loop


def carried(body: str) -> list[str]:
    return sorted(carried_variables(loop_of(body)))


@pytest.mark.parametrize("body", SHOWN)
def test_loop_variables_only_printed_are_distinguished(body: str) -> None:
    loop = loop_of(body)
    names = carried_variables(loop)
    assert sorted(only_displayed(ast.Module([loop], []), names)) == SHOWN[body]
    after = ast.parse("save(total, n, seen, mean, best)").body
    assert only_displayed(ast.Module([loop, *after], []), names) == set(), "what comes after the loop depends on them"


@pytest.mark.parametrize("body", CARRIED)
def test_loop_variable_read_before_assignment_is_carried(body: str) -> None:
    assert carried(body) == CARRIED[body]


@pytest.mark.parametrize("body", NOT)
def test_loop_variable_assigned_before_reading_is_not_carried(body: str) -> None:
    assert carried(body) == []


AFTER = {
    "if x > 3:\n  kept = copy(x)": ["kept"],
    "if x > best:\n  best, at = x, i": ["at", "best"],
    "history.append(x)": ["history"],
    "table[i] = x": ["table"],
    "kept = copy(x)": [],
    "made.append(x)": [],
    "scaler.unscale_(x)": [],
    "table['a'].append(x)": ["table"],
    "history.pop()": ["history"],
    "table['a'].mul_(0.9).add_(x)": ["table"],
    "if x > 3:\n  unused = x": [],
}


@pytest.mark.parametrize("body", AFTER)
def test_loop_variable_set_in_some_passes_and_read_after_loop_is_carried(body: str) -> None:
    lines = "\n".join(f"  {line}" for line in body.splitlines())
    text = "best = at = kept = scaler = 0\nhistory, table = [], {}\nhistory = []\ntable = dict()\nmade = session.prepare([])\n"
    tree = ast.parse(f"{text}for i, x in steps:\n{lines}\nsave(kept, at, history, table, made, scaler)\n")
    loop = next(node for node in tree.body if isinstance(node, ast.For))
    assert sorted(carried_variables(loop, tree)) == AFTER[body]


READ_LATER = [
    "best = best * 2",
    "best += 1",
    "if (best := best * 2) > 1:\n  use(x)",
    "ys = [best for best in best]",
    "ys = [best for x in xs]",
    "for best in best:\n  use(best)",
    "with opened(best) as best:\n  use(best)",
    "try:\n  best = f()\nexcept ValueError:\n  pass\nuse(best)",
    "try:\n  best = f()\nexcept* ValueError:\n  pass\nuse(best)",
    "if x:\n  best = 0\nuse(best)",
    "del best[0]",
    "best: int = best + 1",
    "def show(best=best):\n  use(best)",
    "def show():\n  global best\n  best = best + 1",
    "def show():\n  global best\n  best += 1",
    "show = lambda: best",
    "class Shown(best):\n  pass",
    "best, x = x, best",
]
STORED_LATER = [
    "best = 0\nuse(best)",
    "del best",
    "if x:\n  best = 0\nelse:\n  best = 1\nuse(best)",
    "ys = [best for best in xs]",
    "if (best := f()) > 1:\n  use(best)",
    "def show():\n  best = 0\n  use(best)",
    "show = lambda best: best",
    "try:\n  best = f()\nexcept ValueError:\n  raise\nuse(best)",
]


def carried_with_code_around(before: str, after: str) -> list[str]:
    tree = ast.parse(f"best = 0\n{before}    for x in steps:\n      if x > 3:\n        best = x\n{after}")
    loop = next(node for node in ast.walk(tree) if isinstance(node, ast.For) and ast.unparse(node.iter) == "steps")
    return sorted(carried_variables(loop, tree))


@pytest.mark.parametrize("after", READ_LATER)
def test_loop_variable_is_carried_if_code_after_the_loop_reads_it_before_assigning_it(after: str) -> None:
    assert carried_with_code_around("if True:\n  if True:\n", after) == ["best"]


@pytest.mark.parametrize("after", STORED_LATER)
def test_loop_variable_that_code_after_the_loop_assigns_first_is_not_carried(after: str) -> None:
    assert carried_with_code_around("if True:\n  if True:\n", after) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("try:\n  if True:\n", "except KeyboardInterrupt:\n  use(best)"),
        ("for epoch in epochs:\n  if True:\n", "  best = best * 2"),
        ("while f():\n  if True:\n", "use(best)"),
        ("with opened():\n  if True:\n", "use(best)"),
        ("with suppress(OSError):\n  raise OSError\nif True:\n  if True:\n", "use(best)"),
        ("match f():\n  case 1:\n", "use(best)"),
        ("if True:\n  if True:\n", "    else:\n      use(best)"),
    ],
)
def test_reads_after_the_loop_are_found_in_all_blocks_around_it(before: str, after: str) -> None:
    assert carried_with_code_around(before, after) == ["best"]


def steps(found: list[tuple[str, list[str]]]) -> Iterator[int]:
    for number in range(3):
        found.append(loop_variables.find_carried(inspect.currentframe().f_back))  # type: ignore[union-attr]
        yield number


def bar(items: Any) -> Iterator[Any]:
    yield from items


def test_calling_loop_is_found_through_generators() -> None:
    found: list[tuple[str, list[str]]] = []
    best = 0
    for number in bar(steps(found)):
        best = max(best, number)
    assert [names for _, names in found] == [["best"]] * 3
    assert all(place.startswith("test_loop_variables.py, line") for place, _ in found)
    assert list(steps(found)) == [0, 1, 2] and found[-1] == ("", [])


def test_counter_of_while_loop_using_next_is_found() -> None:
    found: list[tuple[str, list[str]]] = []
    source, count = iter(bar(steps(found))), 0
    while count < 3:
        next(source)
        count += 1
    assert [names for _, names in found] == [["count"]] * 3
