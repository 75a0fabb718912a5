"""Objects of the user's classes and of Python's library."""

from __future__ import annotations

import configparser
import contextlib
import copy
import logging
import queue
import random
import sqlite3
import statistics
import threading
from argparse import Namespace
from contextvars import ContextVar
from dataclasses import dataclass, field
from string import Template
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from training import WIDTH, Piece, Value


class Plain(Piece):
    class Bank:
        def __init__(self) -> None:
            self.keys, self.at, self.seen = torch.zeros(4, WIDTH), 0, set()

        def push(self, row: torch.Tensor) -> torch.Tensor:
            self.keys[self.at % 4] = row
            self.at += 1
            self.seen.add(self.at)
            return self.keys.mean(0) + len(self.seen) / 100

    def plant(self) -> None:
        self.bank = self.Bank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + self.bank.push(out.detach().mean(0))


class Slots(Piece):
    class Meter:
        __slots__ = ("count", "total")

        def __init__(self) -> None:
            self.total, self.count = 0.0, 0

    def plant(self) -> None:
        self.meter = self.Meter()

    def move(self) -> Value:
        self.meter.count += 1
        self.meter.total += 0.3
        return self.meter.total / self.meter.count + self.meter.count / 10


class PrivateSlots(Piece):
    """Names with two underscores, which Python renames."""

    class Meter:
        __slots__ = ("__count",)

        def __init__(self) -> None:
            self.__count = 0

        def next(self) -> int:
            self.__count += 1
            return self.__count

    def plant(self) -> None:
        self.meter = self.Meter()

    def move(self) -> Value:
        return self.meter.next() / 10


class SlotsAndDictionary(Piece):
    class Base:
        __slots__ = ("count",)

    class Meter(Base):
        pass

    def plant(self) -> None:
        self.meter = self.Meter()
        self.meter.count, self.meter.more = 0, 0

    def move(self) -> Value:
        self.meter.count += 1
        self.meter.more += 1
        return (self.meter.count + self.meter.more) / 20


@dataclass
class State:
    calls: int = 0
    window: list[float] = field(default_factory=list)
    inner: State | None = None


class Dataclass(Piece):
    def plant(self) -> None:
        self.state = State(inner=State())

    def move(self) -> Value:
        assert self.state.inner is not None
        self.state.calls += 1
        self.state.inner.window.append(self.state.calls / 10)
        return self.state.inner.window[-1]


class ReplacedDataclass(Piece):
    """A new frozen one at every call."""

    @dataclass(frozen=True)
    class Rate:
        value: float
        calls: int

    def plant(self) -> None:
        self.rate = self.Rate(0.5, 0)

    def move(self) -> Value:
        self.rate = self.Rate(self.rate.value * 0.9, self.rate.calls + 1)
        return self.rate.value


class Point(NamedTuple):
    value: float
    calls: int


class ReplacedNamedTuple(Piece):
    def plant(self) -> None:
        self.point = Point(0.5, 0)

    def move(self) -> Value:
        self.point = Point(self.point.value * 0.9, self.point.calls + 1)
        return self.point.value


class TupleWithList(Piece):
    """A tuple that is replaced, whose list stays."""

    def plant(self) -> None:
        self.pair: tuple[int, list[float]] = (0, [])

    def move(self) -> Value:
        self.pair[1].append(0.1)
        self.pair = (self.pair[0] + 1, self.pair[1])
        return len(self.pair[1]) / 10 + self.pair[0] / 20


class Namespaces(Piece):
    def plant(self) -> None:
        self.config, self.arguments = SimpleNamespace(rate=1.0), Namespace(warm=0)

    def move(self) -> Value:
        self.config.rate *= 0.95
        self.arguments.warm += 1
        return self.config.rate + self.arguments.warm / 20


class OwnAttributeAccess(Piece):
    """A class that keeps its attributes elsewhere."""

    class Config:
        def __init__(self) -> None:
            object.__setattr__(self, "values", {"rate": 1.0})

        def __getattr__(self, name: str) -> Any:
            return self.values[name]

        def __setattr__(self, name: str, value: Any) -> None:
            self.values[name] = value

    def plant(self) -> None:
        self.config = self.Config()

    def move(self) -> Value:
        self.config.rate *= 0.9
        return float(self.config.rate)


class CheckedAttributes(Piece):
    """A class that refuses to be changed but by its method."""

    class Rate:
        value: float

        def __init__(self) -> None:
            object.__setattr__(self, "value", 1.0)

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError("read only")

        def fall(self) -> None:
            object.__setattr__(self, "value", self.value * 0.9)

    def plant(self) -> None:
        self.rate = self.Rate()

    def move(self) -> Value:
        self.rate.fall()
        return self.rate.value


class Linked(Piece):
    """A list of objects that lead to each other, both ways."""

    class Link:
        def __init__(self, value: float) -> None:
            self.value = value
            self.left = self.right = self

    def plant(self) -> None:
        self.head = self.Link(0.1)

    def move(self) -> Value:
        new = self.Link(self.head.value * 0.8 + 0.1)
        new.right, new.left = self.head, self.head.left
        self.head.left.right = new
        self.head.left = new
        self.head = new
        return self.head.value + self.head.left.value / 3


class MadeInTraining(Piece):
    """Objects of a class, by key, as they appear."""

    class Cell:
        def __init__(self, key: int) -> None:
            self.key, self.visits = key, 0

    def plant(self) -> None:
        self.cells: dict[int, MadeInTraining.Cell] = {}
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        cell = self.cells.setdefault(self.calls % 3, self.Cell(self.calls % 3))
        cell.visits += 1
        return cell.visits / 10


class LocalClass(Piece):
    """Objects of a class that only a function knows."""

    def plant(self) -> None:
        class Cell:
            def __init__(self) -> None:
                self.visits = 0

        self.make, self.cells = Cell, [Cell()]

    def move(self) -> Value:
        if len(self.cells) < 4:
            self.cells.append(self.make())
        self.cells[-1].visits += 1
        return sum(cell.visits for cell in self.cells) / 10


class StateOfModule(Piece):
    """``get_extra_state`` is asked for, and tells it all."""

    def plant(self) -> None:
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def move(self) -> Value:
        self.calls += 1
        return self.calls / 10


class OwnStateDict(Piece):
    """An attribute with ``state_dict`` that tells half of it."""

    class Schedule:
        def __init__(self) -> None:
            self.calls, self.level = 0, 1.0

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    def plant(self) -> None:
        self.schedule = self.Schedule()

    def move(self) -> Value:
        self.schedule.calls += 1
        self.schedule.level *= 0.9
        return self.schedule.level + self.schedule.calls / 20


class Singleton(Piece):
    """One object for all, kept by its class."""

    class Clock:
        instance: Any = None

        def __new__(cls) -> Any:
            if cls.instance is None:
                cls.instance = super().__new__(cls)
                cls.instance.ticks = 0
            return cls.instance

    def plant(self) -> None:
        self.Clock()

    def move(self) -> Value:
        self.Clock().ticks += 1
        return float(self.Clock().ticks) / 10


class ClassVariable(Piece):
    calls = 0

    def move(self) -> Value:
        type(self).calls += 1
        return self.calls / 10


class ClassVariableList(Piece):
    window: list[float] = []  # noqa: RUF012

    def move(self) -> Value:
        self.window.append(0.1)
        return len(self.window) / 10


class ClassOfAttribute(Piece):
    """The class of an object that an attribute holds."""

    class Meter:
        total = 0.0

        def add(self) -> float:
            type(self).total += 0.1
            return self.total

    def plant(self) -> None:
        self.meter = self.Meter()

    def move(self) -> Value:
        return self.meter.add()


class ChangedClass(Piece):
    """An object that becomes one of another class."""

    class Warm:
        level = 0.5

    class Hot:
        level = 1.5

    def plant(self) -> None:
        self.phase, self.calls = self.Warm(), 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            self.phase.__class__ = self.Hot  # type: ignore[assignment]
        return self.phase.level


class ReplacedFunction(Piece):
    """A strategy: which function an attribute holds."""

    @staticmethod
    def warm() -> float:
        return 0.5

    @staticmethod
    def hot() -> float:
        return 1.5

    def plant(self) -> None:
        self.level, self.calls = self.warm, 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            self.level = self.hot
        return self.level()


class ReplacedMethod(ReplacedFunction):
    def warm(self) -> float:  # type: ignore[override]
        return 0.5

    def hot(self) -> float:  # type: ignore[override]
        return 1.5


class ReplacedLambda(Piece):
    """A function that training makes, over a number of its own."""

    def plant(self) -> None:
        self.level = lambda: 0.5
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls % 7 == 0:
            now = self.calls / 10
            self.level = lambda: now
        return self.level()


class HeldClass(Piece):
    """Which class an attribute names."""

    class Warm:
        level = 0.5

    class Hot:
        level = 1.5

    def plant(self) -> None:
        self.phase: type[Any] = self.Warm
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            self.phase = self.Hot
        return float(self.phase.level)


class Locked(Piece):
    """A lock beside what it guards."""

    class Meter:
        def __init__(self) -> None:
            self.lock, self.total = threading.Lock(), 0.0

        def add(self) -> float:
            with self.lock:
                self.total += 0.1
                return self.total

    def plant(self) -> None:
        self.meter = self.Meter()

    def move(self) -> Value:
        return self.meter.add()


class ThreadLocal(Piece):
    def plant(self) -> None:
        self.local = threading.local()
        self.local.calls = 0

    def move(self) -> Value:
        self.local.calls += 1
        return self.local.calls / 10


class OwnThreadLocal(Piece):
    class Local(threading.local):
        calls = 0

    def plant(self) -> None:
        self.local = self.Local()

    def move(self) -> Value:
        self.local.calls += 1
        return self.local.calls / 10


class ContextVariable(Piece):
    def plant(self) -> None:
        self.level: ContextVar[float] = ContextVar("level", default=1.0)

    def move(self) -> Value:
        self.level.set(self.level.get() * 0.9)
        return self.level.get()


class Queued(Piece):
    def plant(self) -> None:
        self.queue: queue.Queue[float] = queue.Queue()
        self.queue.put(0.1)

    def move(self) -> Value:
        value = self.queue.get()
        self.queue.put(0.9 * value + 0.1)
        return value


class SimpleQueued(Piece):
    def plant(self) -> None:
        self.queue: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.queue.put(0.1)

    def move(self) -> Value:
        value = self.queue.get()
        self.queue.put(0.9 * value + 0.1)
        return value


class Parser(Piece):
    """An object of Python's library."""

    def plant(self) -> None:
        self.config = configparser.ConfigParser()
        self.config["rate"] = {"value": "1.0"}

    def move(self) -> Value:
        now = float(self.config["rate"]["value"]) * 0.9
        self.config["rate"]["value"] = repr(now)
        return now


class Normal(Piece):
    def plant(self) -> None:
        self.belief = statistics.NormalDist(0.0, 1.0)

    def move(self) -> Value:
        self.belief = self.belief * 0.9 + 0.1
        return self.belief.mean


class Database(Piece):
    def plant(self) -> None:
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table seen (n int)")

    def move(self) -> Value:
        self.base.execute("insert into seen values (1)")
        return float(self.base.execute("select count(*) from seen").fetchone()[0]) / 10


class Texts(Piece):
    def plant(self) -> None:
        self.template = Template("$x")

    def move(self) -> Value:
        self.template.template += "x"
        return len(self.template.template) / 10


class Logger(Piece):
    """A number in a logger of the user's class."""

    class Counting(logging.Handler):
        seen = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.seen += 1

    def plant(self) -> None:
        self.logger, self.handler = logging.Logger("planted"), self.Counting()
        self.logger.addHandler(self.handler)

    def move(self) -> Value:
        self.logger.warning("again")
        return self.handler.seen / 10


class Stack(Piece):
    """Objects that are kept until a context ends."""

    def plant(self) -> None:
        self.stack, self.values = contextlib.ExitStack(), [0.1]

    def move(self) -> Value:
        self.stack.callback(self.values.append, 0.1)
        if len(self.values) % 2:
            self.stack.pop_all().close()
        return len(self.values) / 10


class CopiedSelf(Piece):
    """A copy of a part of the model, made in training."""

    def plant(self) -> None:
        self.old: list[nn.Module] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 4 == 0:
            self.old = [copy.deepcopy(self.layer).requires_grad_(False)]
        out = super().forward(x)
        return out + self.old[0](x) if self.old else out


class Strategy(Piece):
    """An object that is replaced by one of another class."""

    class Explore:
        def __init__(self) -> None:
            self.dice = random.Random(5)

        def level(self) -> float:
            return self.dice.random()

    class Exploit:
        def __init__(self, level: float) -> None:
            self.best = level

        def level(self) -> float:
            self.best *= 0.9
            return self.best

    def plant(self) -> None:
        self.policy: Any = self.Explore()

    def move(self) -> Value:
        level = float(self.policy.level())
        if level < 0.3:
            self.policy = self.Exploit(1.0) if isinstance(self.policy, self.Explore) else self.Explore()
        return level


class FromContainersOfObjects(Piece):
    """Two objects in two containers that are one."""

    class Cell:
        value = 0.0

    def plant(self) -> None:
        cell = self.Cell()
        self.row, self.table = [cell], {"cell": cell}

    def move(self) -> Value:
        self.row[0].value += 0.1
        if self.row[0].value > 0.35:
            self.row[0] = self.table["cell"] = self.Cell()
        return self.table["cell"].value + self.row[0].value
