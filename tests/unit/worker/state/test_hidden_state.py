"""State outside ``state_dict``: what training changed in attributes is put into objects that are built anew, or named."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import math
import random
import re
import struct
import sys
import threading
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ratchet_contract.errors import StateError
from ratchet_hooks.state.encode import decode, encode
from ratchet_worker.state import object_walk
from ratchet_worker.state.hidden_state import Changes, HiddenState, _Recorder
from ratchet_worker.state.object_walk import Roots
from tests.unit.hooks.state.test_encode import through_disk


class Phase(Enum):
    WARM = 1
    HOT = 2


@dataclass
class Schedule:
    level: float = 0.0
    history: list[float] = field(default_factory=list)
    best: torch.Tensor | None = None


class Slotted:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count, self.last = 0, None


class Bank:
    """A plain object with tensors."""

    def __init__(self) -> None:
        self.keys, self.at, self.owner = torch.zeros(4, 3), 0, None


class Slotless(Bank):
    """Of the same form."""


class Private:
    __slots__ = ("__dict__", "__hidden", "shown")

    def __init__(self) -> None:
        self.__hidden, self.shown, self.other = 0, 0, 0

    def move(self) -> None:
        self.__hidden += 1
        self.shown += 2
        self.other += 3

    def look(self) -> tuple[int, int, int]:
        return self.__hidden, self.shown, self.other


class Slot(SimpleNamespace): ...


class Setting(SimpleNamespace):
    """Of a built-in class that keeps everything in attributes."""


class Failure(Exception):
    """Of a built-in class that keeps its arguments elsewhere, as the next ones keep their contents."""


class Level(int): ...


class Label(str): ...


class Ticks(itertools.count): ...  # type: ignore[type-arg]


class Bits(bytearray): ...


class Codes(array): ...  # type: ignore[type-arg]


class Rate(np.float64): ...


class Pair(NamedTuple):
    first: Any
    second: Any


class Tagged(Pair): ...


def tagged(item: Any) -> Any:
    item.tag = 1
    return item


def tagged_by_iterator(item: Any) -> Any:
    item.tag = iter([1])
    return item


def hooked() -> torch.Tensor:
    found = torch.zeros(2, requires_grad=True)
    found.register_hook(lambda grad: grad * 2)
    return found


class Net(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        for name, value in attributes.items():
            setattr(self, name, value)


class SlottedNet(nn.Linear):
    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 4


class Descent(torch.optim.SGD): ...


def stepped(net: Net) -> Descent:
    found = Descent(net.layer.parameters(), lr=0.5, momentum=0.5)
    net.layer(torch.ones(2, 3)).sum().backward()
    found.step()
    found.zero_grad()
    return found


Build = Callable[[], Net]


def later(net: Net, train: Callable[[Net], Any]) -> tuple[Net, Changes]:
    """``net`` after ``train``, and what a checkpoint has of it."""
    hidden = HiddenState()
    hidden.begin(Roots({"model": net}))
    assert hidden.changes() == Changes({}, []), "nothing has happened yet"
    train(net)
    return net, hidden.changes()


def resumed(build: Build, changes: Changes) -> Net:
    net, hidden = build(), HiddenState()
    hidden.begin(Roots({"model": net}))
    tensors, data = encode(changes.stored, root="attributes")
    stored: Any = through_disk(changes.stored)
    assert decode(tensors, data) is not None
    hidden.restore(stored)
    assert str(hidden.changes().unsaved) == str(changes.unsaved)
    return net


def draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return (
        [generator.random() for _ in range(3)]
        if isinstance(generator, random.Random)
        else generator.normal(size=3).tolist()
    )


def teacher_step(net: Net) -> None:
    with torch.no_grad():
        for p in net.teacher[0].parameters():
            p.add_(1.0)
        net.teacher[0].running.add_(2.0)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls = 0
        self.register_buffer("running", torch.zeros(2), persistent=False)


def shares(net: Net) -> None:
    made = torch.ones(2)
    net.a, net.b, net.both = made, made, [made]


def build_slow() -> Net:
    net = Net()
    net.slow = {id(p): torch.zeros_like(p) for p in net.parameters()}
    return net


class Mode(Flag):
    SLOW = auto()
    LOUD = auto()


CASES: dict[str, tuple[Build, Callable[[Net], Any], Callable[[Net], Any]]] = {
    "numbers": (
        lambda: Net(n=0, x=1.5, s="a", c=1j, t=(1, 2)),
        lambda n: vars(n).update(n=3, x=-0.0, s="b", c=2j, t=(1, (3,))),
        lambda n: repr((n.n, n.x, n.s, n.c, n.t)),
    ),
    "nan": (lambda: Net(x=0.0), lambda n: vars(n).update(x=float("nan")), lambda n: repr(n.x)),
    "numpy numbers": (
        lambda: Net(x=np.float32(1)),
        lambda n: vars(n).update(x=np.float32(0.1)),
        lambda n: (type(n.x), n.x),
    ),
    "a numpy array in place": (lambda: Net(x=np.zeros(5)), lambda n: n.x.__iadd__(2), lambda n: n.x.tolist()),
    "a new numpy array": (
        lambda: Net(x=np.zeros(5)),
        lambda n: vars(n).update(x=np.ones((2, 2), np.int16)),
        lambda n: (n.x.tolist(), n.x.dtype),
    ),
    "a tensor in place": (lambda: Net(x=torch.zeros(5)), lambda n: n.x.add_(2), lambda n: n.x.tolist()),
    "a tensor that repeats elements of a buffer, and of memory that only it has": (
        lambda: (net := Net(y=torch.zeros(2, 1).expand(2, 3)), setattr(net, "x", net.norm.running_mean[:1].expand(4)))[
            0
        ],
        lambda n: (n.norm.running_mean.add_(2), n.y[:, :1].add_(1)),
        lambda n: (n.x.tolist(), n.x.stride(), n.y.tolist(), n.y.stride()),
    ),
    "a read-only numpy array": (
        lambda: (net := Net(c=np.zeros(3)), vars(net).update(x=np.broadcast_to(net.c, (2, 3))))[0],
        lambda n: n.c.__iadd__(2),
        lambda n: (n.x.tolist(), n.x.flags.writeable, np.shares_memory(n.x, n.c)),
    ),
    "a large tensor in place": (lambda: Net(x=torch.zeros(50_000)), lambda n: n.x.add_(2), lambda n: float(n.x.sum())),
    "a small tensor by way of data": (
        lambda: Net(x=torch.zeros(5)),
        lambda n: n.x.data.add_(2),
        lambda n: n.x.tolist(),
    ),
    "a new tensor": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=torch.arange(3)),
        lambda n: (n.x.tolist(), n.x.dtype),
    ),
    "a tensor with a graph": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=n.layer.weight * 0 + 2),
        lambda n: n.x.detach().tolist(),
    ),
    "tensors that are shared": (Net, shares, lambda n: (n.a is n.b, n.both[0] is n.a, n.a.tolist())),
    "a view of a parameter": (
        lambda: Net(row=None),
        lambda n: vars(n).update(row=n.layer.weight[1]),
        lambda n: (n.row.data_ptr() - n.layer.weight.data_ptr(), tuple(n.row.shape)),
    ),
    "a parameter by another name": (
        lambda: Net(alias=None),
        lambda n: vars(n).update(alias=[n.layer.weight]),
        lambda n: n.alias[0] is n.layer.weight,
    ),
    "a torch generator": (lambda: Net(g=torch.Generator().manual_seed(1)), lambda n: draw(n.g), lambda n: draw(n.g)),
    "a numpy generator": (lambda: Net(g=np.random.default_rng(1)), lambda n: draw(n.g), lambda n: draw(n.g)),
    "a RandomState": (lambda: Net(g=[np.random.RandomState(1)]), lambda n: draw(n.g[0]), lambda n: draw(n.g[0])),
    "Python's generator": (lambda: Net(g={"r": random.Random(1)}), lambda n: draw(n.g["r"]), lambda n: draw(n.g["r"])),
    "a new torch generator": (
        lambda: Net(g=None),
        lambda n: vars(n).update(g=torch.Generator().manual_seed(5)),
        lambda n: draw(n.g),
    ),
    "a new numpy generator": (
        lambda: Net(g=None),
        lambda n: vars(n).update(g=np.random.default_rng(5)),
        lambda n: draw(n.g),
    ),
    "a new random.Random": (lambda: Net(g=None), lambda n: vars(n).update(g=random.Random(5)), lambda n: draw(n.g)),
    "an early item of a long list": (lambda: Net(x=[0] * 1000), lambda n: n.x.__setitem__(3, 7), lambda n: n.x),
    "a list that grows": (lambda: Net(x=[]), lambda n: n.x.extend([1, torch.ones(2), {"a": [2]}]), lambda n: str(n.x)),
    "a dictionary": (
        lambda: Net(x={"a": 1, 2: "b"}),
        lambda n: (n.x.pop("a"), n.x.update({(1, 2): 3})),
        lambda n: [*n.x.items()],
    ),
    "a set": (lambda: Net(x={1, 2}), lambda n: (n.x.add(5), n.x.discard(1)), lambda n: n.x),
    "a frozenset": (lambda: Net(x=frozenset()), lambda n: vars(n).update(x=frozenset({1})), lambda n: n.x),
    "a frozenset of parameters and a generator": (
        lambda: (net := Net(g=torch.Generator()), setattr(net, "x", frozenset({net.layer.bias, net.g})))[0],
        lambda n: (n.layer.bias.data.add_(1), draw(n.g)),
        lambda n: (draw(n.g), n.x == {n.layer.bias, n.g}),
    ),
    "a deque": (lambda: Net(x=deque(maxlen=2)), lambda n: n.x.extend([1, 2, 3]), lambda n: (n.x.maxlen, [*n.x])),
    "other dictionaries": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[OrderedDict(a=1), Counter("aa"), defaultdict(list, b=[1])]),
        lambda n: (repr(n.x), n.x[2]["new"]),
    ),
    "attributes of new dictionaries": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[n.layer.state_dict(), tagged(Counter("a"))]),
        lambda n: str((n.x, n.x[0]._metadata, n.x[1].tag)),
    ),
    "an attribute that is new": (Net, lambda n: vars(n).update(x=3), lambda n: n.x),
    "an attribute that is gone": (lambda: Net(x=3), lambda n: delattr(n, "x"), lambda n: hasattr(n, "x")),
    "a dataclass": (
        lambda: Net(x=Schedule()),
        lambda n: (vars(n.x).update(level=0.5, best=torch.ones(1)), n.x.history.append(2.0)),
        lambda n: str(n.x),
    ),
    "a plain object": (
        lambda: Net(x=Bank()),
        lambda n: (n.x.keys.add_(3), vars(n.x).update(at=2)),
        lambda n: (n.x.keys.tolist(), n.x.at),
    ),
    "a slot that training deletes": (
        lambda: Net(x=[Slotted()]),
        lambda n: delattr(n.x[0], "last"),
        lambda n: (n.x[0].count, hasattr(n.x[0], "last")),
    ),
    "a plain object with slots": (
        lambda: Net(x=[Slotted()]),
        lambda n: (setattr(n.x[0], "count", 4), setattr(n.x[0], "last", [1])),
        lambda n: (n.x[0].count, n.x[0].last),
    ),
    "a plain object with private slots and a dictionary": (
        lambda: Net(x=Private()),
        lambda n: n.x.move(),
        lambda n: n.x.look(),
    ),
    "a large array": (
        lambda: Net(x=np.zeros(17 << 17)),
        lambda n: n.x.__setitem__(12345, 0.5),
        lambda n: float(n.x[12345]),
    ),
    "a method of a generator": (lambda: Net(x=random.Random(4).random), lambda n: n.x(), lambda n: n.x()),
    "a queue": (lambda: Net(x=Queue()), lambda n: n.x.put([1]), lambda n: n.x.get_nowait()),
    "a generator in a weak dictionary": (
        lambda: (net := Net(), setattr(net, "x", WeakKeyDictionary({net.layer: random.Random(1)})))[0],
        lambda n: draw(n.x[n.layer]),
        lambda n: draw(n.x[n.layer]),
    ),
    "a namespace": (lambda: Net(x=SimpleNamespace(a=1)), lambda n: vars(n.x).update(b=2), lambda n: vars(n.x)),
    "new objects in a circle": (
        lambda: Net(x=Bank()),
        lambda n: vars(n.x).update(owner=[n.x, Bank()]),
        lambda n: (n.x.owner[0] is n.x, n.x.owner[1].keys.tolist()),
    ),
    "a member of an enumeration": (lambda: Net(x=Phase.WARM), lambda n: vars(n).update(x=Phase.HOT), lambda n: n.x),
    "a dtype": (lambda: Net(x=torch.float32), lambda n: vars(n).update(x=torch.bfloat16), lambda n: n.x),
    "a net hidden in a list": (
        lambda: Net(teacher=[Teacher()]),
        lambda n: (teacher_step(n), vars(n.teacher[0]).update(calls=2)),
        lambda n: (
            n.teacher[0].calls,
            n.teacher[0].running.tolist(),
            (n.teacher[0].inner.weight - weight_of_a_new_teacher(n)).tolist(),
        ),
    ),
    "a net hidden in an object": (
        lambda: Net(x=SimpleNamespace(net=Teacher())),
        lambda n: n.x.net.eval(),
        lambda n: n.x.net.training,
    ),
    "a new namespace": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[SimpleNamespace(count=3), Setting(count=4)]),
        lambda n: [(type(one), one.count) for one in n.x],
    ),
    "a new named tuple, bytes and characters": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[Pair(1, [2]), bytearray(b"ab"), array("h", [3])]),
        lambda n: str([(type(one), one) for one in n.x]),
    ),
    "functions and classes that have names": (
        lambda: Net(x=None, y=draw, z=shares, kind=Net),
        lambda n: vars(n).update(x=draw, y=None, z=later, kind=Bank),
        lambda n: (n.x, n.y, n.z, n.kind),
    ),
    "functions and classes that have names, in new objects": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[SimpleNamespace(f=draw, kind=Bank), {"f": F.relu}, (math.sqrt, [shares])]),
        lambda n: (vars(n.x[0]), n.x[1:]),
    ),
    "a function in a new net": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[nn.TransformerEncoderLayer(4, 2, 8)]),
        lambda n: (n.x[0].activation, len(n.x[0].state_dict())),
    ),
    "a slot of a new net": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[SlottedNet()]),
        lambda n: (n.x[0].count, n.x[0].weight.tolist()),
    ),
    "a new optimizer": (
        lambda: Net(x=None),
        lambda n: vars(n).update(x=[stepped(n)]),
        lambda n: (str(n.x[0].state_dict()), n.x[0].param_groups[0]["params"][0] is n.layer.weight, n.x[0].step()),
    ),
    "a flag of two members": (
        lambda: Net(x=None, y=re.I),
        lambda n: vars(n).update(x=Mode.SLOW | Mode.LOUD, y=re.I | re.M),
        lambda n: (n.x, n.y),
    ),
    "whether a hidden tensor is trained": (
        lambda: Net(x=[torch.zeros(2)], teacher=[Teacher()]),
        lambda n: (n.x[0].requires_grad_(), n.teacher[0].inner.requires_grad_(False)),
        lambda n: (n.x[0].requires_grad, n.teacher[0].inner.weight.requires_grad),
    ),
    "tensors by the addresses of parameters": (
        build_slow,
        lambda n: [slow.add_(number) for number, slow in enumerate(n.slow.values())],
        lambda n: [n.slow[id(p)].flatten().tolist() for p in n.parameters()],
    ),
    "tensors by the addresses of parameters, first made in training": (
        lambda: Net(slow={}),
        lambda n: n.slow.update({id(p): torch.full_like(p, 1.0) for p in n.parameters()}),
        lambda n: [n.slow[id(p)].flatten().tolist() for p in n.parameters()],
    ),
    "the end of a long list": (
        lambda: Net(x=[0.0] * 20_001),
        lambda n: n.x.append(1.0),
        lambda n: (len(n.x), n.x[-1]),
    ),
    "an argument of a partial": (lambda: Net(x=partial(min, [1])), lambda n: n.x.args[0].append(0), lambda n: n.x()),
    "the object of a bound method": (
        lambda: Net(x=Bank().__class__.__init__.__get__(Bank())),
        lambda n: vars(n.x.__self__).update(at=5),
        lambda n: n.x.__self__.at,
    ),
}


def weight_of_a_new_teacher(net: Net) -> torch.Tensor:
    torch.manual_seed(0)
    return build_seeded(lambda: Net(teacher=[Teacher()])).teacher[0].inner.weight


def build_seeded(build: Build) -> Net:
    torch.manual_seed(0)
    return build()


NAN: float = struct.unpack("<d", bytes.fromhex("010000000000f4ff"))[0]
PLAIN: dict[str, list[Any]] = {
    "floats": [NAN, -NAN, -0.0, 0.0, math.inf, 5e-324, 0.1],
    "integers": [-(2**63), 2**63 - 1, 0],
    "large integers": [1, 2**63, -(2**200)],
    "truth values": [True, False, True],
    "of several types": [True, 1, 1.0, 2**60, None, -0.0, NAN, 1j, b"\0", "\u00fc", "a"],
    "strings": ["a", "\u00fc", ""],
    "small integers as floats": [1.0, 2.0],
}


def bits_of(item: Any) -> Any:
    if isinstance(item, (list, tuple, deque)):
        return [*map(bits_of, item)]
    return type(item), struct.pack("<d", item) if type(item) is float else repr(item)


@pytest.mark.parametrize("items", PLAIN.values(), ids=PLAIN.keys())
def test_hidden_state_restores_plain_items_with_types_and_bits(items: list[Any]) -> None:
    """Of a list that is there, of new containers, and of one too long to be looked at item by item."""

    def train(net: Net) -> None:
        net.x.extend(items)
        vars(net).update(long=items * 20_001, new=deque(items), keys={f"{n}": one for n, one in enumerate(items)})
        net.alias = net.long

    _, changes = later(Net(x=[]), train)
    again = resumed(lambda: Net(x=[]), Changes(through_disk(changes.stored), []))  # type: ignore[arg-type]
    assert changes.unsaved == [] and again.alias is again.long
    found = (again.x, again.new, [*again.keys.values()], again.long[-len(items) :])
    assert all(bits_of(one) == bits_of(items) for one in found)
    assert len(again.long) == 20_001 * len(items) and [*again.keys] == [*map(str, range(len(items)))]


def test_hidden_state_names_the_unstorable_string_of_a_list() -> None:
    _, changes = later(Net(x=["a"]), lambda n: n.x.extend(["b", "\ud800", "c"]))
    assert changes.unsaved == ["model.x[2]"]


@pytest.mark.parametrize("case", list(CASES))
def test_hidden_state_changes_are_restored(case: str) -> None:
    build, train, look = CASES[case]
    whole, changes = later(build_seeded(build), train)
    again = resumed(lambda: build_seeded(build), changes)
    assert changes.unsaved == []
    assert look(again) == look(whole)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (list[int], lambda held: held.append(1)),
        (lambda: {"h": {"n": 0}}, lambda held: held["h"].update(n=1)),
        (lambda: torch.zeros(1), lambda held: held.add_(1)),
        (lambda: np.zeros(2), lambda held: held.__iadd__(1)),
        (Bank, lambda held: vars(held).update(at=1)),
        (set[int], lambda held: held.add(1)),
    ],
    ids=["list", "dictionary in a dictionary", "tensor", "array", "object", "set"],
)
def test_hidden_state_sees_changes_within_the_values_of_a_large_dictionary(
    value: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    build = lambda: Net(x={number: value() for number in range(20_001)})  # noqa: E731
    assert later(build(), lambda _: None)[1] == Changes({}, [])
    _, changes = later(build(), lambda n: [change(one) for one in n.x.values()])
    assert changes.unsaved or changes.stored


def test_hidden_state_is_restored_from_checkpoint_of_resumed_run() -> None:
    build = lambda: Net(x=[0], g=torch.Generator().manual_seed(1))  # noqa: E731
    _, changes = later(build(), lambda n: (n.x.append(1), draw(n.g)))
    second, hidden = build(), HiddenState()
    hidden.begin(Roots({"model": second}))
    hidden.restore(through_disk(changes.stored))  # type: ignore[arg-type]
    second.x.append(2)
    expected = draw(copy.copy(second.g.clone_state()))
    third = resumed(build, hidden.changes())
    assert third.x == [0, 1, 2] and draw(third.g) == expected


BYTES = bytearray(2)
READ_ONLY = np.frombuffer(memoryview(BYTES).toreadonly(), np.uint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Failure("boom", 3),
        lambda: tagged(Level(3)),
        lambda: tagged(Label("a")),
        lambda: Ticks(5),
        lambda: Bits(b"ab"),
        lambda: Codes("h", [3]),
        lambda: Rate(0.5),
        lambda: tagged(Tagged(1, [2])),
        lambda: tagged(random.Random(1)),
    ],
    ids=["Exception", "int", "str", "count", "bytearray", "array", "float64", "named tuple", "Random"],
)
def test_hidden_state_names_new_object_whose_contents_are_not_all_stored(make: Callable[[], Any]) -> None:
    """Objects with contents outside of their attributes, and with attributes besides their contents."""
    _, changes = later(Net(x=None, y=None), lambda n: vars(n).update(x=make(), y=[make()]))
    assert changes == Changes({}, ["model.x", "model.y[0]"])


UNSTORABLE_CODE: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda: 1,
    "partial": lambda: partial(max, 1),
    "torch.relu": lambda: torch.relu,  # no module has it under the name that it tells
    "module": lambda: math,
    "logger that no name finds": lambda: logging.Logger("job"),
    "method bound by hand": lambda: stepped.__get__(Bank()),
}


@pytest.mark.parametrize("make", UNSTORABLE_CODE.values(), ids=UNSTORABLE_CODE.keys())
def test_new_object_with_unstorable_code_is_named_and_not_restored(make: Callable[[], Any]) -> None:
    """Without it, the object would fail after the resume, while the script makes a whole one where it finds none."""

    def train(net: Net) -> None:
        vars(net).update(x={"a": Slot(f=make(), n=3), "b": Slot(n=4)}, y={"f": make()}, z=[Net(f=make())])

    build = lambda: Net(x=None, y=None, z=None)  # noqa: E731
    _, changes = later(build(), train)
    assert changes.unsaved == ["model.x['a'].f", "model.y['f']", "model.z[0].f"]
    again = resumed(build, Changes(changes.stored, []))
    assert (again.x, again.y, again.z) == (None, None, None)


def test_state_that_cannot_be_stored_is_not_left_out_of_a_new_object() -> None:
    """An object without its iterator would make the script fail after the resume."""
    _, changes = later(Net(x=None), lambda n: vars(n).update(x=Slot(it=iter([1]), n=3)))
    assert changes == Changes({}, ["model.x.it"])


def test_lazily_made_iterator_with_code_of_an_object_with_a_state_dict_is_left_out_unnamed() -> None:
    one, hidden = SimpleNamespace(it=None), HiddenState()
    hidden.begin(Roots({"data": one}, covered_attributes={"data": frozenset()}))
    one.it = Slot(f=lambda: 1, n=3)
    assert hidden.changes() == Changes({}, [])


class Meter:
    """Holds in its attributes what cannot affect training, and methods."""

    def __init__(self, lock: Any) -> None:
        self.sum, self.lock, self.again = 0.0, lock, threading.RLock()
        self.log, self.root = logging.getLogger("job.meter"), logging.getLogger()
        self.f, self.hidden = self.up, self.__down

    def up(self) -> None:
        self.sum += 1

    def __down(self) -> None:
        self.sum -= 3


def test_loggers_locks_and_methods_in_new_objects_are_restored() -> None:
    def train(net: Net) -> None:
        lock = threading.Lock()
        net.meters = {"a": Meter(lock), "b": Meter(lock)}
        net.meters["a"].f(), net.meters["b"].hidden()
        net.others = [net.layer.forward, net.meters["a"].up, logging.getLogger("job")]

    build = lambda: Net(meters=None, others=None)  # noqa: E731
    _, changes = later(build(), train)
    again = resumed(build, changes)
    assert changes.unsaved == []
    a, b = again.meters.values()
    assert (a.sum, b.sum, a.log, a.root) == (1.0, -3.0, logging.getLogger("job.meter"), logging.getLogger())
    assert a.f.__self__ is a and b.f.__self__ is b and again.others[0].__self__ is again.layer
    a.f(), a.hidden(), again.others[1]()
    assert a.sum == 0.0 and again.others[2] is logging.getLogger("job")
    assert a.lock is b.lock and a.again is not b.again and type(a.again) is type(threading.RLock())
    assert a.lock.acquire(blocking=False)


def test_method_that_the_class_no_longer_has_is_refused() -> None:
    _, hidden = begun_with(x=None)
    content = {"set": {"x": ("bound", ("at", "it"), "up")}, "gone": []}
    with pytest.raises(StateError, match=r"types\.SimpleNamespace has no method up this time"):
        hidden.restore({"changed": {"it": {"kind": "object", "content": content}}, "new": []})


LATE = """
from enum import Enum, Flag
from typing import NamedTuple
def f(): ...
class Made: ...
class Phase(Enum): WARM = 1
class Mode(Flag): LOUD = 1
class Pair(NamedTuple):
    first: object
"""


@pytest.mark.parametrize(
    ("set_to", "name"),
    [
        (lambda m: {"x": [SimpleNamespace(f=m.f)]}, "x[0].f"),
        (lambda m: {"x": [m.f]}, "x[0]"),
        (lambda m: {"x": m.f}, "x"),
        (lambda m: {"y": m.f}, "y"),
        (lambda m: {"y": m.Made}, "y"),
        (lambda m: {"x": m.Made()}, "x"),
        (lambda m: {"x": m.Phase.WARM}, "x"),
        (lambda m: {"x": (1, m.Mode.LOUD)}, "x"),
        (lambda m: {"x": m.Pair([])}, "x"),
        (lambda m: {"x": defaultdict(m.Made)}, "x"),
    ],
)
def test_what_is_of_a_module_that_training_imports_is_named(
    set_to: Callable[[Any], dict[str, Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt has not imported it when it restores."""
    (tmp_path / "imported_late.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_late", raising=False)
    build = lambda: Net(x=None, y=len)  # noqa: E731
    _, changes = later(build(), lambda n: vars(n).update(set_to(importlib.import_module("imported_late"))))
    monkeypatch.delitem(sys.modules, "imported_late")
    assert changes.unsaved == [f"model.{name}"]
    assert resumed(build, Changes(changes.stored, [])).y is len


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
def test_model_with_a_traced_part_is_looked_at_like_any_other() -> None:
    net = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), Net(x=1))
    hidden = HiddenState()
    hidden.begin(Roots({"model": net}))
    net[1].x = 2
    changes = hidden.changes()
    assert changes.unsaved == [] and list(changes.stored["changed"]) == ["model.1"]


def test_ignored_attribute_of_new_object_is_left_out() -> None:
    net, hidden = Net(x=None), HiddenState()
    hidden.ignored = {"model.x.log": "for show", "model.x.count": "for show"}
    hidden.begin(Roots({"model": net}))
    net.x = SimpleNamespace(log=logging.getLogger("job"), count=3, level=2.0)
    again = resumed(lambda: Net(x=None), hidden.changes())
    assert vars(again.x) == {"count": 3, "level": 2.0}, "a number is there, so that code can add to it"


@pytest.mark.parametrize(
    ("attributes", "train", "name"),
    [
        ({"it": iter([1, 2, 3])}, lambda n: next(n.it), "model.it"),
        ({"it": map(abs, iter([1, 2, 3]))}, lambda n: next(n.it), "model.it"),
        ({"it": itertools.count()}, lambda n: next(n.it), "model.it"),
        ({"x": np.random.SeedSequence(1)}, lambda n: n.x.spawn(1), "model.x"),
        ({"it": (i for i in range(3))}, lambda n: next(n.it), "model.it"),
        ({"x": None}, lambda n: vars(n).update(x=iter([1])), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=[object, iter([1])]), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=torch.eye(2).to_sparse()), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=np.array([object()])), "model.x"),
        ({"x": torch.relu}, lambda n: vars(n).update(x=torch.sigmoid), "model.x"),
        ({"x": np.zeros(4), "y": None}, lambda n: vars(n).update(y=n.x[1:3]), "model.y"),
        ({"x": np.zeros(4), "y": None}, lambda n: vars(n).update(y=torch.from_numpy(n.x)), "model.y"),
        ({"x": READ_ONLY}, lambda n: BYTES.__setitem__(0, BYTES[0] + 1), "model.x"),
        ({"x": np.ma.zeros(2)}, lambda n: n.x.__setitem__(0, np.ma.masked), "model.x"),
        ({"x": {Bank(), Bank()}}, lambda n: vars(min(n.x, key=id)).update(at=1), "model.x"),
        ({"x": {Queue(), Queue()}}, lambda n: min(n.x, key=id).put(1), "model.x"),
        ({"x": {Bank(), Bank()}, "y": None}, lambda n: vars(n).update(y=min(n.x, key=id)), "model.y"),
        ({"x": None}, lambda n: vars(n).update(x=torch.empty(2, device="meta")), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=[nn.Parameter(n.layer.weight.data)]), "model.x[0]"),
        ({"x": None}, lambda n: vars(n).update(x=tagged(n.layer.weight[0])), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=n.layer.weight.data.view(torch.int32)), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=hooked()), "model.x"),
        ({"x": None}, lambda n: vars(n).update(x=tagged_by_iterator(Counter())), "model.x.tag"),
        ({"x": [[0]] * 20_001}, lambda n: n.x.append([1]), "model.x"),
    ],
)
def test_hidden_state_names_unstorable_attributes(
    attributes: dict[str, Any], train: Callable[[Net], Any], name: str
) -> None:
    _, changes = later(Net(**attributes), train)
    assert len(changes.unsaved) == 1 and changes.unsaved[0].startswith(name)


class Rude:
    """Raises when it is looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


class Broken:
    """An iterator that raises when it is asked for its position."""

    __slots__ = ()

    def __iter__(self) -> Broken:
        return self

    def __next__(self) -> int:
        raise StopIteration

    def __reduce__(self) -> Any:
        raise NotImplementedError


def too_deep(kind: type) -> Any:
    found: Any = kind()
    for _ in range(1500):
        found = kind((found,))
    return found


def dead_proxy() -> Any:
    return weakref.proxy(Bank())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Rude, True),
        (Broken, True),
        (lambda: [dead_proxy()], True),
        (lambda: too_deep(tuple), None),
        (MagicMock, False),
    ],
    ids=["rude", "broken", "proxy", "deep", "mock"],
)
def test_hidden_state_scan_tolerates_objects_that_raise_on_access(make: Callable[[], Any], named: bool | None) -> None:
    net, hidden = Net(x=make(), n=0), HiddenState()
    hidden.begin(Roots({"model": net}))
    net.n = 1
    changes = hidden.changes()
    assert changes.stored["changed"]["model"]["content"]["set"]["n"] == ("value", 1)
    if named is not None:
        assert [name[:7] for name in changes.unsaved] == (["model.x"] if named else [])


class Pretender:
    """A proxy: an object that says that it is a list, and has the items of one."""

    __class__ = property(lambda self: list)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.held = [1]

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Items(list[int]): ...


ITEMS = Items([1])


@pytest.mark.parametrize("make", [Pretender, lambda: weakref.proxy(ITEMS)], ids=["property", "weak"])
def test_changes_behind_a_proxy_are_found(make: Callable[[], Any]) -> None:
    net, hidden = Net(x=make()), HiddenState()
    hidden.begin(Roots({"model": net}))
    getattr(net.x, "held", ITEMS).append(2)
    assert hidden.changes().unsaved == ["model.x"]


def test_hidden_state_names_each_reference_to_a_shared_unstorable_object() -> None:
    """Also an object that is stored by itself, but refers to it."""

    def train(net: Net) -> None:
        inner = [torch.ones(1)]
        net.x = net.y = [inner, iter([1])]
        inner.append(net.x)
        net.z, net.good = inner, [2]

    build = lambda: Net(x=None, y=None, z=None, good=None)  # noqa: E731
    _, changes = later(build(), train)
    assert changes.unsaved == ["model.x[1]", "model.y[1]", "model.z[1][1]"]
    again = resumed(build, Changes(changes.stored, []))
    assert (again.x, again.y, again.z, again.good) == (None, None, None, [2])


def test_parts_of_unstorable_objects_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for each unstorable object that refers to them. An unstorable object that refers to itself leaves nothing behind
    that refers to it."""
    visits: list[int] = []
    contents = _Recorder._content
    monkeypatch.setattr(
        _Recorder, "_content", lambda self, *args, **more: visits.append(0) or contents(self, *args, **more)
    )

    def train(net: Net) -> None:
        parts, own = [[number] for number in range(50)], Slot(part=Slot())
        own.part.owner, own.it = own, iter([1])
        vars(net).update({f"x{n}": [parts, own] for n in range(20)}, own=own, parts=parts, part=own.part)

    build = lambda: Net(**{f"x{n}": None for n in range(20)}, own=None, parts=None, part=None)  # noqa: E731
    _, changes = later(build(), train)
    assert len(visits) < 200
    assert changes.unsaved == sorted([*(f"model.x{n}[1].it" for n in range(20)), "model.own.it", "model.part.owner.it"])
    again = resumed(build, Changes(changes.stored, []))
    assert (again.parts, again.own, again.part) == ([[n] for n in range(50)], None, None)


def test_hidden_state_restores_shared_dict_of_a_long_list_as_one() -> None:
    _, changes = later(Net(x=None), lambda n: vars(n).update(x=[{"a": 1}] * 20_001))
    again = resumed(lambda: Net(x=None), changes)
    assert changes.unsaved == [] and len({*map(id, again.x)}) == 1


def test_hidden_state_scan_of_large_dataset_is_partial() -> None:
    hidden = HiddenState()
    hidden.begin(Roots({"dataset": SimpleNamespace(samples=[[number, number] for number in range(250_000)], at=0)}))
    assert hidden.changes() == Changes({}, [])


@pytest.mark.parametrize(
    ("samples", "change"),
    [
        ({n: [n] for n in range(20_001)}, lambda found: found.update({0: [0]})),
        ({Bank(): n for n in range(20_001)}, lambda found: found.update({next(iter(found)): 7})),
        ([{"tokens": [n], "label": n} for n in range(20_001)], lambda found: found[0].update(tokens=[0])),
        ([{"x": torch.ones(1)} for _ in range(20_001)], lambda found: found[-1].update(x=torch.ones(1))),
    ],
    ids=["dict of lists", "dict with object keys", "dicts with lists", "dicts with tensors"],
)
def test_hidden_state_names_large_container_of_objects_only_if_it_changed(
    samples: Any, change: Callable[[Any], Any]
) -> None:
    _, changes = later(Net(samples=samples), lambda net: change(net.samples))
    assert changes.unsaved or changes.stored, changes


def test_hidden_state_names_structured_array_with_objects_only_if_it_changed() -> None:
    rows = np.array([(1, [1]), (2, None)], dtype=[("size", "i4"), ("item", object)])
    assert later(Net(x=rows), lambda net: net.x["size"].__setitem__(0, 5))[1].unsaved == ["model.x"]
    assert later(Net(x=rows), lambda net: net.x["item"].__setitem__(0, [1]))[1].unsaved == ["model.x"]


@pytest.mark.parametrize("items", [{1: 1, 2: 2}, {1, 2}], ids=["dict", "set"])
def test_hidden_state_names_iterator_over_dict_or_set_only_if_it_moved(items: Any) -> None:
    moved, ended = iter(items), iter([1])
    assert [*ended] == [1]
    assert later(Net(it=moved, ended=ended), lambda net: next(net.it))[1].unsaved == ["model.it"]


def test_walk_stops_even_if_parameters_pass_the_largest_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        object_walk, "_MAX_OBJECTS", 3
    )  # the model, its layer, and the first of the layer's two parameters
    assert not object_walk.walk(Roots({"model": Net(x=[Bank()])})).complete


def test_hidden_state_ignores_recreated_code_and_module_references() -> None:
    def made() -> Any:
        return lambda: 1

    def train(net: Net) -> None:
        vars(net).update(f=made(), g=made(), module=random)
        net(torch.zeros(2)) if False else net.layer(torch.ones(1, 3)).sum().backward()
        net.eval(), net.train()

    _, changes = later(Net(f=made(), g=None, kind=Net, module=itertools), train)
    assert changes == Changes({}, [])


def test_hidden_state_names_changed_code_objects() -> None:
    def train(net: Net) -> None:
        vars(net).update(f=lambda: 2, kind=Bank)
        net.x.__class__ = Slotless
        net.layer.register_forward_hook(lambda *_: None)
        net.register_module("norm", nn.Identity())
        vars(net).update(part=partial(max, 2))

    _, changes = later(Net(f=lambda: 1, kind=Net, x=Bank(), part=partial(max, 1)), train)
    assert changes.unsaved == [
        "model.f", "model.layer._forward_hooks", "model.part", "model.parts", "model.x.__class__"
    ]  # fmt: skip


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def call(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda net: net.a.call, lambda net: net.b.call),
        (lambda net: net.a.call, lambda net: tagged(Counting()).call),
        (lambda net: net.layer.forward, lambda net: net.norm.forward),
        (lambda net: random.Random(1).random, lambda net: random.Random(2).random),
        (lambda net: F.relu, lambda net: partial(F.leaky_relu, negative_slope=0.1)),
        (lambda net: partial(F.leaky_relu), lambda net: partial(F.leaky_relu, negative_slope=0.1)),
        (lambda net: partial(max, key=len), lambda net: partial(max, key=abs)),
        (lambda net: partial(min, net.a), lambda net: partial(min, net.b)),
        (lambda net: partial(net.a.call), lambda net: partial(net.b.call)),
    ],
)
def test_hidden_state_names_replaced_bound_method_or_partial(
    old: Callable[[Net], Any], new: Callable[[Net], Any]
) -> None:
    def build() -> Net:
        net = Net(a=Counting(), b=Counting())
        vars(net).update(f=old(net))
        return net

    _, changes = later(build(), lambda n: vars(n).update(f=new(n)))
    assert changes == Changes({}, ["model.f"])


def test_hidden_state_does_not_name_a_bound_method_or_partial_that_is_made_again() -> None:
    def made(net: Net) -> dict[str, Any]:
        codes = [
            net.a.call,
            Counting().call,
            partial(max, [1], key=lambda x: -x),
            partial(net.a.call),
            partial(min, net.a),
            iter(net.loader).__next__,
        ]
        return {f"f{number}": code for number, code in enumerate(codes)}

    def build() -> Net:
        net = Net(a=Counting(), loader=DataLoader([1, 2]))  # type: ignore[arg-type]
        vars(net).update(made(net))
        return net

    assert later(build(), lambda n: vars(n).update(made(n)))[1] == Changes({}, [])


def test_hidden_state_restores_function_or_none_in_place_of_a_partial_or_method() -> None:
    def build() -> Net:
        net = Net(f=partial(F.leaky_relu), g=partial(F.leaky_relu))
        vars(net).update(h=net.layer.forward, i=net.layer.forward)
        return net

    _, changes = later(build(), lambda n: vars(n).update(f=F.relu, g=None, h=F.relu, i=None))
    again = resumed(build, changes)
    assert changes.unsaved == [] and (again.f, again.g, again.h, again.i) == (F.relu, None, F.relu, None)


def test_hidden_state_does_not_restore_library_hook_flags() -> None:
    def train(net: Net) -> None:
        net.layer.register_forward_hook(print)
        net._hooks_installed, net.calls = True, 1

    _, changes = later(Net(calls=0), train)
    again = resumed(lambda: Net(calls=0), changes)
    assert changes.unsaved == []
    assert again.calls == 1 and not hasattr(again, "_hooks_installed")


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_hidden_state_does_not_store_torch_compile_marks() -> None:
    net, state = Net(), HiddenState()
    compiled = torch.compile(net.layer, backend="eager")
    state.begin(Roots({"model": net}))
    compiled(torch.ones(2, 3))
    assert any(name.startswith("_dynamo_") for p in net.parameters() for name in vars(p)), (
        "the compiler makes no marks any more"
    )
    net.layer.weight.scale = 2.0
    changes = state.changes()
    assert changes.unsaved == [] and set(changes.stored["changed"]) == {"model.layer.weight"}, changes
    assert "_dynamo_" not in repr(changes.stored)


def test_hidden_state_ignored_paths_are_not_recorded() -> None:
    net, hidden = Net(x=[0], it=iter([1]), n=0), HiddenState()
    hidden.ignored = {"model.it": "for show", "model.x": "a log", "model.n": "for show"}
    hidden.begin(Roots({"model": net}))
    net.x.append(1), next(net.it)
    net.n, net.x = 3, []
    assert hidden.changes() == Changes({}, [])


def begun_with(**attributes: Any) -> tuple[SimpleNamespace, HiddenState]:
    one, hidden = SimpleNamespace(**attributes), HiddenState()
    hidden.begin(Roots({"it": one}))
    return one, hidden


def test_writable_array_whose_flag_cannot_be_set_is_saved_and_restored() -> None:
    """As one over a tensor's memory."""
    one, hidden = begun_with(a=torch.zeros(3).numpy())
    one.a += 1
    again, later = begun_with(a=torch.zeros(3).numpy())
    found = hidden.changes()
    assert found.unsaved == [] and later.restore(found.stored) == {} and again.a.tolist() == [1.0] * 3


def test_expanded_tensor_with_new_memory_is_restored_whole() -> None:
    one, hidden = begun_with(m=torch.zeros(1).expand(4))
    one.m.data = torch.arange(4.0)
    again, later = begun_with(m=torch.zeros(1).expand(4))
    later.restore(hidden.changes().stored)
    assert again.m.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_frozenset_that_an_older_checkpoint_stored_is_left_as_it_is() -> None:
    again, later = begun_with(s=frozenset([1, 2]))
    later.restore({"changed": {"it.s": {"kind": "set", "content": {"type": "frozenset", "items": []}}}, "new": []})
    assert again.s == {1, 2}


def test_object_that_an_older_checkpoint_could_not_store_is_restored_as_none() -> None:
    again, later = begun_with(x=1)
    content = {"set": {"x": ("new", 0)}, "gone": []}
    later.restore({"changed": {"it": {"kind": "object", "content": content}}, "new": [None]})
    assert again.x is None
