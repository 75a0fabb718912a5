"""Python's own values and containers."""

from __future__ import annotations

import array
import enum
import heapq
import io
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from training import Piece, Value


class Integer(Piece):
    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        return self.calls / 10


class LargeInteger(Piece):
    def plant(self) -> None:
        self.word = 1 << 80

    def move(self) -> Value:
        self.word = self.word * 6364136223846793005 % (1 << 90)
        return float(self.word % 1000) / 1000


class Float(Piece):
    """A running statistic."""

    def plant(self) -> None:
        self.mean = 0.0

    def move(self) -> Value:
        self.mean = 0.9 * self.mean + 0.1
        return self.mean


class Complex(Piece):
    def plant(self) -> None:
        self.turn = 1 + 0j

    def move(self) -> Value:
        self.turn *= 0.8 + 0.6j
        return self.turn.real


class Text(Piece):
    def plant(self) -> None:
        self.text = ""

    def move(self) -> Value:
        self.text += "ab"
        return len(self.text) / 10


class Bytes(Piece):
    def plant(self) -> None:
        self.raw = b"\0"

    def move(self) -> Value:
        self.raw = bytes([(self.raw[0] * 5 + 7) % 256])
        return self.raw[0] / 256


class ByteArray(Piece):
    def plant(self) -> None:
        self.raw = bytearray(8)

    def move(self) -> Value:
        self.raw[3] = (self.raw[3] * 5 + 7) % 256
        return self.raw[3] / 256


class ByteArrayView(Piece):
    def plant(self) -> None:
        self.view = memoryview(bytearray(8))

    def move(self) -> Value:
        self.view[2] = (self.view[2] * 5 + 7) % 256
        return self.view[2] / 256


class ArrayOfPython(Piece):
    def plant(self) -> None:
        self.values = array.array("d", [0.0, 1.0])

    def move(self) -> Value:
        self.values[0] = 0.9 * self.values[0] + 0.1 * self.values[1]
        return self.values[0]


class FractionValue(Piece):
    def plant(self) -> None:
        self.part = Fraction(1, 3)

    def move(self) -> Value:
        self.part = self.part * Fraction(2, 3) + Fraction(1, 7)
        return float(self.part)


class DecimalValue(Piece):
    def plant(self) -> None:
        self.rate = Decimal("0.1")

    def move(self) -> Value:
        self.rate = self.rate * Decimal("0.9") + Decimal("0.01")
        return float(self.rate) * 5


class Time(Piece):
    def plant(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def move(self) -> Value:
        self.now += timedelta(hours=5)
        return self.now.hour / 24


class TimeDelta(Piece):
    def plant(self) -> None:
        self.spent = timedelta(0)

    def move(self) -> Value:
        self.spent += timedelta(milliseconds=100)
        return self.spent.total_seconds()


class Identifier(Piece):
    def plant(self) -> None:
        self.key = uuid.uuid5(uuid.NAMESPACE_DNS, "start")

    def move(self) -> Value:
        self.key = uuid.uuid5(self.key, "next")
        return self.key.int % 1000 / 1000


class Phase(enum.Enum):
    WARM = 0.5
    HOT = 1.5
    COLD = -0.5


class Mode(enum.Flag):
    A = 1
    B = 2
    C = 4


class Enumeration(Piece):
    def plant(self) -> None:
        self.phase = Phase.WARM

    def move(self) -> Value:
        members = [*Phase]
        self.phase = members[(members.index(self.phase) + 1) % 3]
        return self.phase.value


class Flags(Piece):
    """A member that has no name of its own."""

    def plant(self) -> None:
        self.mode, self.calls = Mode.A | Mode.B, 0

    def move(self) -> Value:
        self.calls += 1
        self.mode ^= Mode(self.calls % 8)
        return self.mode.value / 8


class Boolean(Piece):
    def plant(self) -> None:
        self.on = False

    def move(self) -> Value:
        self.on = not self.on
        return 0.5 if self.on else -0.2


class Range(Piece):
    def plant(self) -> None:
        self.left = range(100)

    def move(self) -> Value:
        self.left = self.left[3:]
        return self.left[0] / 50


class Tuple(Piece):
    def plant(self) -> None:
        self.window = (0.0, 0.0, 1.0)

    def move(self) -> Value:
        self.window = (*self.window[1:], 0.5 * self.window[0] + 0.3)
        return sum(self.window) / 3


class NestedTuple(Piece):
    def plant(self) -> None:
        self.window: tuple[Any, ...] = (1.0, ())

    def move(self) -> Value:
        self.window = (0.9 * self.window[0], self.window) if self.window[0] > 0.1 else (1.0, ())
        return self.window[0]


class List(Piece):
    def plant(self) -> None:
        self.losses: list[float] = []

    def move(self) -> Value:
        self.losses.append(len(self.losses) * 0.1)
        return self.losses[-1] - self.losses[len(self.losses) // 2]


class LongList(Piece):
    """An early item of a thousand."""

    def plant(self) -> None:
        self.history = [0.0] * 1000

    def move(self) -> Value:
        self.history[3] += 0.1
        return self.history[3]


class NestedList(Piece):
    def plant(self) -> None:
        self.tree: list[Any] = [[[0.0]]]

    def move(self) -> Value:
        self.tree[0][0][0] += 0.1
        return self.tree[0][0][0]


class RingOfLists(Piece):
    """A list that holds itself."""

    def plant(self) -> None:
        self.ring: list[Any] = [0.0]
        self.ring.append(self.ring)

    def move(self) -> Value:
        self.ring[1][0] += 0.1
        return self.ring[1][1][0]


class Deque(Piece):
    def plant(self) -> None:
        self.window: deque[float] = deque(maxlen=3)

    def move(self) -> Value:
        self.window.append(len(self.window) + sum(self.window) / 5)
        return sum(self.window) / 9


class Heap(Piece):
    def plant(self) -> None:
        self.heap = [(float(n % 5), n) for n in range(20)]
        heapq.heapify(self.heap)

    def move(self) -> Value:
        first, number = heapq.heappop(self.heap)
        heapq.heappush(self.heap, (first + 0.7, number + 1))
        return first / 3


class Dictionary(Piece):
    def plant(self) -> None:
        self.table = {"drift": 0.0}

    def move(self) -> Value:
        self.table["drift"] += 0.1
        self.table[f"step {len(self.table)}"] = 0.1
        return self.table["drift"] + len(self.table) / 20


class OrderOfKeys(Piece):
    """The same keys and values, in another order."""

    def plant(self) -> None:
        self.table = {key: key / 10 for key in range(5)}

    def move(self) -> Value:
        first = next(iter(self.table))
        self.table[first] = self.table.pop(first)
        return next(iter(self.table.values()))


class Ordered(Piece):
    """A cache that drops what was used least recently."""

    def plant(self) -> None:
        self.cache: OrderedDict[int, float] = OrderedDict((n, n / 10) for n in range(5))

    def move(self) -> Value:
        self.cache.move_to_end(next(iter(self.cache)))
        return next(iter(self.cache.values()))


class Counts(Piece):
    def plant(self) -> None:
        self.counts: Counter[str] = Counter()

    def move(self) -> Value:
        self.counts["ab"[sum(self.counts.values()) % 2]] += 1
        return self.counts["a"] / 10


class Defaults(Piece):
    def plant(self) -> None:
        self.seen: defaultdict[int, list[float]] = defaultdict(list)

    def move(self) -> Value:
        self.seen[len(self.seen[0]) % 3].append(0.1)
        self.seen[0].append(0.1)
        return len(self.seen[0]) / 10


class Chained(Piece):
    def plant(self) -> None:
        self.scopes: ChainMap[str, float] = ChainMap({"level": 0.0}, {"base": 1.0})

    def move(self) -> Value:
        self.scopes["level"] += 0.1
        return self.scopes["level"]


class OwnDictionary(Piece):
    """A subclass of dict with an attribute."""

    class Table(dict[str, float]):
        version = 0

    def plant(self) -> None:
        self.table = self.Table(level=0.0)

    def move(self) -> Value:
        self.table["level"] += 0.1
        self.table.version += 1
        return self.table["level"] + self.table.version / 10


class OwnList(Piece):
    class Meter(list[float]):
        total = 0.0

        def add(self, value: float) -> float:
            self.append(value)
            self.total += value
            return self.total / len(self) + self.total / 10

    def plant(self) -> None:
        self.meter = self.Meter()

    def move(self) -> Value:
        return self.meter.add(len(self.meter) / 10)


class OwnFloat(Piece):
    """A subclass of float with an attribute."""

    class Number(float):
        seen: int

    def plant(self) -> None:
        self.number = self.Number(0.5)
        self.number.seen = 0

    def move(self) -> Value:
        self.number.seen += 1
        return self.number * self.number.seen / 5


class UserContainers(Piece):
    def plant(self) -> None:
        self.table: UserDict[str, float] = UserDict(level=0.0)
        self.items: UserList[float] = UserList([0.0])

    def move(self) -> Value:
        self.table["level"] += 0.1
        self.items.append(self.table["level"])
        return len(self.items) / 10


class Sets(Piece):
    def plant(self) -> None:
        self.seen: set[int] = set()
        self.last: frozenset[str] = frozenset()

    def move(self) -> Value:
        self.seen.add(len(self.seen))
        self.last = self.last | {f"{len(self.seen)}"}
        return len(self.seen) / 10 + len(self.last) / 20


class OrderOfSet(Piece):
    """The order in which a set gives its items goes by what was added and removed."""

    def plant(self) -> None:
        self.waiting = {0, 8, 16}

    def move(self) -> Value:
        taken = self.waiting.pop()
        self.waiting.add((taken + 24) % 64)
        return next(iter(self.waiting)) / 64


class Memory(Piece):
    """A file in memory, and where it is read."""

    def plant(self) -> None:
        self.file = io.BytesIO(bytes(range(0, 240, 3)))

    def move(self) -> Value:
        return self.file.read(1)[0] / 240


class TextInMemory(Piece):
    def plant(self) -> None:
        self.file = io.StringIO()

    def move(self) -> Value:
        self.file.write("x")
        return len(self.file.getvalue()) / 10
