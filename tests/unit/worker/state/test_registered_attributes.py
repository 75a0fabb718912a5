"""Registered objects: what their ``state_dict`` does not speak of is saved and put back, or named; the rest is left to it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler, swa_utils
from typing_extensions import override

from ratchet_worker.state.hidden_state import Changes, HiddenState
from ratchet_worker.state.object_walk import Roots
from ratchet_worker.state.state_dict_names import buffer_tables, covered_attributes, stateful_parts
from tests.unit.hooks.state.test_encode import through_disk

Objects = dict[str, Any]


class Meter:
    """Tells half of its state."""

    def __init__(self) -> None:
        self.calls, self.level, self.history = 0, 1.0, list[float]()

    def next(self, *_: Any) -> None:
        self.calls += 1
        self.level *= 0.9
        self.history.append(self.level)

    def look(self) -> Any:
        return self.calls, self.level, self.history

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Curve:
    def __init__(self) -> None:
        self.level, self.t = 1.0, 0

    def next(self) -> None:
        self.level /= 2
        self.t += 1

    def look(self) -> Any:
        return self.level, self.t


class Warm:
    """A scheduler that is no torch's, and tells nothing."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer, self.calls = optimizer, 0

    def next(self, *_: Any) -> None:
        self.calls += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * self.calls

    def look(self) -> Any:
        return self.calls

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Bumpy(lr_scheduler.LRScheduler):
    """Tells less than torch's own."""

    def __init__(self, optimizer: SGD) -> None:
        self.bumps = [1.0]
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | torch.Tensor]:
        self.bumps.append(self.bumps[-1] * 0.9)
        return [base * self.bumps[-1] for base in self.base_lrs]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Scaling(torch.amp.GradScaler):  # type: ignore[misc]
    seen = 0

    def next(self, optimizer: SGD) -> None:
        self.seen += 1
        self.scale(torch.ones(1))
        self.step(optimizer)
        self.update()

    def look(self) -> Any:
        return self.seen, self.get_scale()


class Average(nn.Module):
    """A module with a counter, and a buffer that ``state_dict`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.inner = nn.Linear(2, 2), 0, Curve()
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    @torch.no_grad()
    def next(self, *_: Any) -> None:
        self.calls += 1
        self.inner.next()
        self.layer.weight.mul_(0.5)
        self.seen = self.seen + 1

    def look(self) -> Any:
        return self.calls, self.inner.look(), self.seen.tolist(), self.layer.weight.tolist()


class Wrapper:
    """Slow weights around an optimizer, which is no optimizer itself."""

    def __init__(self, optimizer: SGD) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups
        self.slow = [torch.zeros(2)]

    def next(self, *_: Any) -> None:
        self.slow[0] += 1

    def look(self) -> Any:
        return self.slow[0].tolist()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def _stepped(scheduler: Any, *_: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer need not step for it
        scheduler.step()


def _in_sequence(optimizer: SGD) -> Any:
    parts = [lr_scheduler.StepLR(optimizer, 2), Bumpy(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _bumps(scheduler: Any) -> Any:
    inner = scheduler if isinstance(scheduler, Bumpy) else scheduler._schedulers[1]
    return inner.bumps, inner.last_epoch, [group["lr"] for group in scheduler.optimizer.param_groups]


def _averaged(optimizer: SGD) -> Any:
    return swa_utils.AveragedModel(Average())


def _look(item: Any) -> Any:
    return item.look()


def _next(item: Any, optimizer: SGD) -> None:
    item.next(optimizer)


Case = tuple[Callable[[SGD], Any], Callable[[Any, SGD], Any], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "half": (lambda _: Meter(), _next, _look),
    "own scheduler": (Warm, _next, _look),
    "subclass of a scheduler": (Bumpy, _stepped, _bumps),
    "within SequentialLR": (_in_sequence, _stepped, _bumps),
    "scaler": (lambda _: Scaling("cpu", init_scale=4.0), _next, _look),
    "module": (lambda _: Average(), _next, _look),
    "within AveragedModel": (_averaged, lambda a, _: a.module.next(), lambda a: a.module.look()),
    "around an optimizer": (Wrapper, _next, _look),
}


def _optimizer() -> tuple[nn.Module, SGD]:
    torch.manual_seed(3)
    net = nn.Linear(2, 2)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return net, SGD(net.parameters(), lr=0.1)


def _begun(item: Any, own: Objects | None = None) -> HiddenState:
    hidden = HiddenState()
    parts = stateful_parts({"user:it": item})
    spoken = {path: covered_attributes(part) for path, part in parts.items()}
    hidden.begin(Roots({**(own or {}), **parts, **buffer_tables({"user:it": item})}, covered_attributes=spoken))
    return hidden


def _saved(hidden: HiddenState, item: Any) -> tuple[Any, Changes]:
    state = item.state_dict()
    return through_disk(state), hidden.changes()


@pytest.mark.parametrize("case", CASES)
def test_registered_object_attributes_outside_state_dict_are_restored(case: str) -> None:
    build, move, look = CASES[case]
    net, optimizer = _optimizer()
    item = build(optimizer)
    own = {"model": net, "optimizer": optimizer}
    hidden = _begun(item, own)
    assert _saved(hidden, item)[1] == Changes({}, []), "nothing has happened yet"
    for _ in range(3):
        move(item, optimizer)
    state, changes = _saved(hidden, item)
    assert changes.unsaved == []
    expected, groups = look(item), optimizer.state_dict()

    net, optimizer = _optimizer()
    again = build(optimizer)
    hidden = _begun(again, {"model": net, "optimizer": optimizer})
    optimizer.load_state_dict(groups)
    again.load_state_dict(state)
    hidden.restore(through_disk(changes.stored))
    assert look(again) == expected
    repeated = _saved(hidden, again)
    assert str(repeated[1].stored) == str(changes.stored), "the checkpoints of both are the same"
    for _ in range(3):
        move(item, optimizer)
        move(again, optimizer)
    assert look(again) == look(item)


class Timer:
    """Whose clock begins anew, and whose iterator is built anew, as its ``load_state_dict`` says."""

    def __init__(self) -> None:
        self.before, self.started = 0.0, time.monotonic()
        self.source = iter(range(100))
        self.taken = 0

    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.started = state["elapsed"], time.monotonic()
        self._reach(state["taken"])

    def _reach(self, taken: int) -> None:
        self.source, self.taken = iter(range(taken, 100)), taken


@dataclass
class Levels:
    level: float = 1.0
    hidden: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def update(self) -> None:
        self.level *= 0.5
        self.hidden += 1


def test_attributes_covered_by_state_dict_are_not_recorded() -> None:
    timer = Timer()
    hidden = _begun(timer)
    next(timer.source)
    timer.taken += 1
    timer.started += 5
    assert _saved(hidden, timer)[1] == Changes({}, [])
    levels = Levels()
    hidden = _begun(levels)
    levels.update()
    assert _saved(hidden, levels)[1] == Changes({}, [])


class Excluding(Levels):
    """All but one."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "hidden"}


def test_attribute_excluded_from_state_dict_is_saved() -> None:
    item = Excluding()
    hidden = _begun(item)
    item.update()
    changes = _saved(hidden, item)[1]
    assert changes.stored["changed"]["user:it"]["content"]["set"] == {"hidden": ("value", 1)}


def test_attribute_scan_ignores_unrelated_method_with_same_name() -> None:
    item = Levels()
    item.hidden = 2
    vars(item)["more"] = 1
    assert "more" not in covered_attributes(item)


class Moving:
    """An iterator of which ``state_dict`` does not speak."""

    def __init__(self) -> None:
        self.source = iter(range(100))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_unsavable_attribute_of_registered_object_is_named() -> None:
    item = Moving()
    hidden = _begun(item)
    next(item.source)
    assert _saved(hidden, item)[1].unsaved == ["user:it.source"]
    hidden.ignored["user:it.source"] = "a log"
    assert _saved(hidden, item)[1].unsaved == []


class Lazy:
    """Makes its iterator when it is asked for the first time."""

    def __init__(self) -> None:
        self.at, self.source, self.started = 0, None, False

    def next(self) -> int:
        if self.source is None:
            self.source, self.started = iter(range(self.at, 100)), True
        self.at += 1
        return next(self.source)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_lazily_created_iterator_is_left_to_state_dict() -> None:
    item = Lazy()
    hidden = _begun(item)
    item.next()
    state, changes = _saved(hidden, item)
    assert changes == Changes({}, [])
    again = Lazy()
    again.load_state_dict(state)
    assert again.next() == item.next()


def test_lazily_created_object_that_a_task_shares_is_named_there() -> None:
    """An object of a package's class, which cannot be saved."""
    item, task = Lazy(), SimpleNamespace(it=None)
    hidden = HiddenState()
    hidden.begin(Roots({"user:it": item, "task": task}, covered_attributes={"user:it": covered_attributes(item)}))
    item.source = task.it = Queue()
    assert _saved(hidden, item)[1] == Changes({}, ["task.it"])


def test_changes_beside_a_lazily_created_iterator_are_saved() -> None:
    item = Lazy()
    item.counts = [0]  # type: ignore[attr-defined]
    hidden = _begun(item)
    item.next()
    item.counts = [7]  # type: ignore[attr-defined]
    content = _saved(hidden, item)[1].stored["changed"]["user:it"]["content"]
    assert content == {"set": {"counts": ("new", 0)}, "gone": []}


class Switching(lr_scheduler.LRScheduler):
    """Calls another function from some step on."""

    def __init__(self, optimizer: SGD) -> None:
        self.rule = rising
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * self.rule(self.last_epoch) for base in self.base_lrs]


def rising(step: int) -> float:
    return 1.0 + step


def falling(step: int) -> float:
    return 1.0 / (1 + step)


def test_replaced_scheduler_function_is_restored_or_named() -> None:
    _, optimizer = _optimizer()
    item = Switching(optimizer)
    hidden = _begun(item, {"optimizer": optimizer})
    item.rule = falling
    changes = hidden.changes()
    again = Switching(_optimizer()[1])
    restored = _begun(again)
    restored.restore(through_disk(changes.stored))
    assert again.rule is falling and changes.unsaved == []
    item.rule = lambda step: 1.0
    assert hidden.changes().unsaved == ["user:it.rule"]


def test_object_shared_by_task_and_registered_object_is_saved_once() -> None:
    class Task:
        def __init__(self, meter: Meter, bank: list[float]) -> None:
            self.parts, self.bank = {"stateful": [meter]}, bank

    def build() -> tuple[Task, Meter]:
        meter = Meter()
        return Task(meter, meter.history), meter

    task, meter = build()
    hidden = HiddenState()
    hidden.begin(Roots({"task": task, "user:it": meter}, covered_attributes={"user:it": covered_attributes(meter)}))
    meter.next()
    state, changes = _saved(hidden, meter)
    assert {*changes.stored["changed"]} == {"task.bank", "user:it"} and changes.unsaved == []
    task, meter = build()
    hidden = HiddenState()
    hidden.begin(Roots({"task": task, "user:it": meter}, covered_attributes={"user:it": covered_attributes(meter)}))
    meter.load_state_dict(state)
    hidden.restore(through_disk(changes.stored))
    assert meter.look() == (1, 0.9, [0.9]) and task.bank is meter.history


def _schedulers(optimizer: SGD) -> Iterator[Any]:
    yield lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    yield lr_scheduler.MultiStepLR(optimizer, [1, 2])
    yield lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    yield lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    yield lr_scheduler.CyclicLR(optimizer, 0.01, 0.1)

    class Own(lr_scheduler.StepLR):
        """Of the user's, with a number that torch's state_dict has."""

        seen = 0

        @override
        def step(self, *args: Any) -> None:
            self.seen += 1
            super().step(*args)

    yield Own(optimizer, 2)


def test_torch_schedulers_and_grad_scaler_record_no_extra_state() -> None:
    net, optimizer = _optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for item in (*_schedulers(optimizer), scaler):
        hidden = _begun(item, {"model": net, "optimizer": optimizer})
        scaler.scale(torch.ones(1))
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
            _stepped(item) if item is not scaler else None
        changes = _saved(hidden, item)[1]
        ours = {path for path in changes.stored.get("changed", {}) if path.startswith("user:it")}
        assert not ours and not changes.unsaved, type(item)
