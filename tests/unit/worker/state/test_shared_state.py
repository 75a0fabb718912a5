"""What changes in variables of modules and classes and in functions is named by its path; ordinary code is not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ratchet_worker.checkpoint.rank_state import _functions_of
from ratchet_worker.state.hidden_state import HiddenState
from ratchet_worker.state.object_walk import Roots

HEAD = """
import functools, itertools, logging, random, time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum, Flag
import numpy as np
import torch
from torch import nn
from ratchet_worker.data.loader import TrainLoader

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x)

net = Net()
"""
NAMED: dict[str, tuple[str, str]] = {
    "COUNT": ("COUNT = 0", "def step():\n    global COUNT\n    COUNT += 1"),
    "MADE": ("", "def step():\n    global MADE\n    MADE = 1"),
    "LAZY": ("LAZY = None", "def step():\n    global LAZY\n    LAZY = torch.ones(2)"),
    "rng": ("rng = np.random.default_rng(0)", "def step():\n    rng.normal()"),
    "g": ("g = torch.Generator()", "def step():\n    torch.rand(1, generator=g)"),
    "py": ("py = random.Random(1)", "def step():\n    py.random()"),
    "bank": ("bank = torch.zeros(4)", "def step():\n    bank.add_(1)"),
    "table": ("table = np.zeros(4)", "def step():\n    table[0] += 1"),
    "cache": ("cache = {}", "def step():\n    cache.setdefault(len(cache), 1)\n    return cache[0]"),
    "SEEN": ("SEEN = set()", "def step():\n    SEEN.add(len(SEEN))"),
    "window": ("window = deque(maxlen=3)", "def step():\n    window.append(1)\n    return sum(window)"),
    "log['a']": ("log = {'a': []}", "def step():\n    log['a'].append(1)\n    return log['a'][-1]"),
    "state.count": (
        "@dataclass\nclass State:\n    count: int = 0\nstate = State()",
        "def step():\n    state.count += 1",
    ),
    "Net.calls": ("Net.calls = 0", "def step():\n    Net.calls += 1"),
    "Net.kept": ("Net.kept = []", "def step():\n    Net.kept.append(1)"),
    "Inner.calls": (
        "class Inner(Net):\n    calls = 0\nnet.inner = Inner()",
        "def step():\n    type(net.inner).calls += 1",
    ),
    "step.calls": ("", "def step():\n    step.calls = getattr(step, 'calls', 0) + 1"),
    "step.cache": ("", "def step(cache={}):\n    cache[len(cache)] = 1"),
    "Net.forward.cache": (
        "def forward(self, x, *, cache=[]):\n    cache.append(1)\nNet.forward = forward",
        "def step():\n    net.forward(1)",
    ),
    "it": ("it = itertools.count()", "def step():\n    next(it)"),
    "stream": ("def numbers():\n    yield from range(9)\nstream = numbers()", "def step():\n    next(stream)"),
    "ema._modules['layer']._parameters['bias']": (
        "ema = Net()",
        "@torch.no_grad()\ndef step():\n    ema.layer.bias.add_(1)",
    ),
    "made.n": (
        "def made():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n    return count\nmade = made()",
        "def step():\n    made()",
    ),
}
"""By name, what is there when training begins, and a step that changes it."""
QUIET: dict[str, tuple[str, str]] = {
    "loggers": ("log = logging.getLogger('x')", "def step():\n    log.setLevel(10)\n    log.info('a')"),
    "modules and functions": ("", "def step():\n    global json, f\n    import json\n    f = lambda: 1"),
    "caches of functions": ("@functools.lru_cache\ndef f(x):\n    return [x]", "def step():\n    f(1)"),
    "the model's own": (
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)",
        "def step():\n    net.layer.bias.data.add_(1)",
    ),
    "the same again": ("best = {'loss': [1.0]}", "def step():\n    global best\n    best = {'loss': [1.0]}"),
    "a tensor like it": ("zero = torch.zeros(2)", "def step():\n    global zero\n    zero = torch.zeros(2)"),
    "a log": ("LOSSES = []", "def step():\n    LOSSES.append(1)\n    LOSSES.extend([2])"),
    "a log by key": ("LOG = {}", "def step():\n    LOG[len('a')] = 1"),
    "a log with keys": ("LOG = defaultdict(list)\nLOG['a'] = []", "def step():\n    LOG['a'].append(2)"),
    "a log that is shown at the end": ("LOG = []", "def step():\n    LOG.append(1)\nif len(LOG) > 5:\n    print(LOG)"),
    "flags": ("class F(Flag):\n    A = 1\n    B = 2", "def step():\n    F.A | F.B"),
    "registered data": (
        "data = TrainLoader([1, 2], batch_size=1, seed=0, rank=0, world_size=1)\nbatches = iter(data)",
        "def step():\n    next(batches)",
    ),
    "a generator over registered data": (
        "data = TrainLoader([1, 2], batch_size=1, seed=0, rank=0, world_size=1)\n"
        "def cycle(data):\n    while True:\n        yield from data\nbatches = cycle(data)",
        "def step():\n    next(batches)",
    ),
    "an installed package's object": (
        "from xml.etree.ElementTree import Element\ne = Element('a')\nimport fractions, argparse\np = argparse.ArgumentParser()",
        "def step():\n    p.add_argument('--x')\n    e.set('a', 'b')",
    ),
    "annotations": ("x: int = 1", "def step():\n    Net.__annotations__"),
}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def imported(code: Path, source: str, name: str) -> Any:
    (code / f"{name}.py").write_text(source)
    return importlib.import_module(name)


def main(code: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script whose top-level code has come to its first step."""
    module: Any = ModuleType("__main__")
    module.__file__ = str(code / "train.py")
    (code / "train.py").write_text(source)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module


def changes(code: Path, module: Any, train: Any = None, **roots: Any) -> list[str]:
    hidden = HiddenState(code)
    hidden.begin(Roots({"model": module.net}, **roots))
    assert hidden.changes().unsaved == [], "nothing has happened yet"
    (train or module.step)()
    found = hidden.changes()
    assert found.stored == {}
    return found.unsaved


@pytest.mark.parametrize("name", NAMED)
def test_shared_state_change_in_module_is_named(name: str, code: Path, request: pytest.FixtureRequest) -> None:
    own = f"mine_{abs(hash(request.node.name))}"
    assert changes(code, imported(code, HEAD + "\n".join(NAMED[name]) + "\n", own)) == [f"{own}:{name}"]


@pytest.mark.parametrize("name", NAMED)
def test_shared_state_change_in_main_script_is_named(name: str, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes(code, main(code, HEAD + "\n".join(NAMED[name]) + "\n", monkeypatch)) == [f"__main__:{name}"]


@pytest.mark.parametrize("name", QUIET)
def test_shared_state_of_ordinary_code_is_not_named(name: str, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HEAD + "\n".join(QUIET[name]) + "\n"
    assert changes(code, imported(code, source, f"quiet_{abs(hash(name))}")) == []
    assert changes(code, main(code, source, monkeypatch)) == []


def test_main_script_top_level_assignments_are_not_shared_state(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = main(code, HEAD + "loss, count, batch = None, 0, None\ndef look():\n    return count\n", monkeypatch)
    top_level = compile("count += 1; batch = [1]; loss = net(torch.ones(2))", "train.py", "exec")
    assert changes(code, module, lambda: exec(top_level, vars(module))) == []


def test_shared_state_read_in_other_module_is_named(code: Path) -> None:
    one = imported(code, HEAD + "LOG = []\ndef step():\n    LOG.append(1)\n", "writes")
    imported(code, "import writes\ndef rate():\n    return len(writes.LOG)\n", "reads")
    assert changes(code, one) == ["writes:LOG"]


def test_changed_closures_of_hooks_are_named(code: Path) -> None:
    source = """
def counting():
    calls = 0
    def hook(*_):
        nonlocal calls
        calls += 1
    return hook
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net.layer.register_forward_hook(counting())
net.register_forward_pre_hook(counting())
net.register_full_backward_hook(counting())
net.layer.weight.register_hook(counting())
net.layer.bias.register_post_accumulate_grad_hook(counting())
net.register_state_dict_post_hook(counting())
optimizer.register_step_post_hook(counting())
def step():
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    optimizer.step()
    net.state_dict()
"""
    module = imported(code, HEAD + source, "hooked")
    hidden = HiddenState(code)
    hidden.begin(Roots({"model": module.net, "optimizer": module.optimizer}))
    module.step()
    names = hidden.changes().unsaved
    assert len(names) == 7 and all(name.endswith(".calls") for name in names), names
    assert "model.layer._forward_hooks[0].calls" in names and "model.layer.weight.hooks[0].calls" in names


def test_objects_called_by_hooks_are_restored_like_attributes(code: Path) -> None:
    source = """
class Counter:
    def __init__(self): self.calls, self.other = 0, 0
    def __call__(self, *_): self.calls += 1
    def method(self, *_): self.other += 1
counter = Counter()
net.layer.register_forward_hook(counter)
net.layer.register_forward_hook(counter.method)
def step(): net(torch.ones(1, 2))
"""
    one = imported(code, HEAD + source, "calls_one")
    hidden = HiddenState(code)
    hidden.begin(Roots({"model": one.net}))
    one.step()
    found = hidden.changes()
    assert found.unsaved == []
    two = imported(code, HEAD + source, "calls_two")
    again = HiddenState(code)
    again.begin(Roots({"model": two.net}))
    again.restore(found.stored)
    assert (two.counter.calls, two.counter.other) == (1, 1)


def test_shared_state_scan_skips_contents_of_registered_objects(code: Path) -> None:
    source = """
class Average:
    def __init__(self): self.held, self.n = {'a': torch.zeros(2)}, 0
    def state_dict(self): return {'held': self.held, 'n': self.n}
average = Average()
held = average.held
def step():
    held['a'].add_(1)
    average.n += 1
"""
    module = imported(code, HEAD + source, "registers")
    assert changes(code, module, registered={"user:average": module.average}) == []


def test_changed_state_of_scheduler_functions_is_named(code: Path) -> None:
    source = """
class Rate:
    def __init__(self): self.n = 0
    def at(self, attempt): return attempt
rate = Rate()
def counting():
    n = 0
    def at(attempt):
        nonlocal n
        n += 1
        return n
    return at
optimizer = torch.optim.SGD(net.parameters(), 0.1)
one = torch.optim.lr_scheduler.LambdaLR(optimizer, rate.at)
two = torch.optim.lr_scheduler.LambdaLR(optimizer, counting())
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [one, two], [1])
def step():
    rate.n += 1
    for _ in range(2):
        optimizer.step(); scheduler.step()
"""
    module = imported(code, HEAD + source, "schedules")
    registered = {"scheduler": module.scheduler, "optimizer": module.optimizer}
    named = changes(code, module, registered=registered, shared=_functions_of({"scheduler": module.scheduler}))
    assert named == [
        "scheduler._schedulers[0].lr_lambdas[0].__self__.n",
        "scheduler._schedulers[1].lr_lambdas[0].n",
    ]


def test_module_that_replaces_another_in_place_is_looked_at(code: Path) -> None:
    """As by Python's recipe for importing a file, and by lazy imports."""
    first = imported(code, f"{HEAD}\nRATE = 0.1\ndef step():\n    global RATE\n    RATE = 0.2\n", "replaced")
    hidden = HiddenState(code)
    hidden.note_built(Roots({"model": first.net}), undo=False)
    spec = importlib.util.spec_from_file_location("replaced", code / "replaced.py")
    assert spec is not None and spec.loader is not None
    second: Any = importlib.util.module_from_spec(spec)
    sys.modules["replaced"] = second
    spec.loader.exec_module(second)
    hidden.begin(Roots({"model": first.net}))
    second.step()
    assert hidden.changes().unsaved == ["replaced:RATE"]


def test_module_imported_during_training_is_tracked_from_import(code: Path) -> None:
    (code / "late.py").write_text("N = [0]\ndef count():\n    N[0] += 1\n    return N\n")
    module = imported(code, HEAD + "def step():\n    import late\n    late.count()\n", "imports_late")
    hidden = HiddenState(code)
    hidden.begin(Roots({"model": module.net}))
    module.step()
    assert hidden.changes().unsaved == []
    module.step()
    assert hidden.changes().unsaved == ["late:N"]


def test_ignored_paths_are_not_named_and_unmatched_ones_are_listed(code: Path) -> None:
    source = HEAD + "A, B = [0], [0]\ndef step():\n    A[0] += 1; B[0] += 1\n    return A, B\n"
    module = imported(code, source, "ignores")
    hidden = HiddenState(code)
    hidden.ignored = {"ignores:A": "for show", "ignores:C": "gone", "model.layer.x": "gone"}
    hidden.begin(Roots({"model": module.net}))
    module.step()
    assert hidden.changes().unsaved == ["ignores:B"]
    assert hidden.unmatched == ["ignores:C", "model.layer.x"]


def test_shared_state_scan_skips_installed_packages(code: Path) -> None:
    module = imported(code, HEAD + "import torch as t\ndef step():\n    t.mine = [1]\n", "sets_torchs")
    try:
        assert changes(code, module) == []
    finally:
        del torch.mine  # type: ignore[attr-defined]
