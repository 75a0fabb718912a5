"""Numpy's arrays and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from training import WIDTH, Piece, Value


class Array(Piece):
    def plant(self) -> None:
        self.scale = np.ones(WIDTH, np.float32)

    def move(self) -> Value:
        self.scale *= 0.9
        return torch.from_numpy(self.scale.copy())


class Number(Piece):
    def plant(self) -> None:
        self.level = np.float32(0.5)

    def move(self) -> Value:
        self.level = np.float32(self.level * 0.9)
        return float(self.level)


class Counter(Piece):
    def plant(self) -> None:
        self.calls = np.int64(0)

    def move(self) -> Value:
        self.calls += 1
        return float(self.calls) / 10


class ZeroDimensional(Piece):
    def plant(self) -> None:
        self.level = np.array(0.5)

    def move(self) -> Value:
        self.level[()] *= 0.9
        return float(self.level)


class Structured(Piece):
    def plant(self) -> None:
        self.rows = np.zeros(3, dtype=[("count", "i4"), ("mean", "f8")])

    def move(self) -> Value:
        self.rows["count"][1] += 1
        self.rows["mean"] = 0.9 * self.rows["mean"] + 0.1
        return float(self.rows["mean"][0] + self.rows["count"][1] / 10)


class Records(Piece):
    def plant(self) -> None:
        self.rows = np.rec.array([(0, 0.0)], dtype=[("count", "i4"), ("mean", "f8")])

    def move(self) -> Value:
        self.rows.count[0] += 1
        return float(self.rows.count[0]) / 10


class Objects(Piece):
    def plant(self) -> None:
        self.cells = np.array([0.0, "text", None], dtype=object)

    def move(self) -> Value:
        self.cells[0] += 0.1
        return float(self.cells[0])


class Booleans(Piece):
    def plant(self) -> None:
        self.mask = np.array([True, False, False, True, False])

    def move(self) -> Value:
        self.mask = np.roll(self.mask, 1) ^ np.array([False, True, False, False, False])
        return float(self.mask.sum()) / 5


class Texts(Piece):
    def plant(self) -> None:
        self.names = np.array(["", "b"], dtype="U8")

    def move(self) -> Value:
        self.names[0] = str(self.names[0])[:6] + "a"
        return len(str(self.names[0])) / 8


class Dates(Piece):
    def plant(self) -> None:
        self.days = np.array(["2026-01-01"], dtype="datetime64[D]")

    def move(self) -> Value:
        self.days += np.timedelta64(3, "D")
        return float((self.days[0] - np.datetime64("2026-01-01")).astype(int)) / 30


class LongDoubles(Piece):
    def plant(self) -> None:
        self.level = np.ones(2, np.longdouble)

    def move(self) -> Value:
        self.level *= np.longdouble("0.9")
        return float(self.level[0])


class ComplexArray(Piece):
    def plant(self) -> None:
        self.turn = np.ones(2, np.complex64)

    def move(self) -> Value:
        self.turn *= 0.8 + 0.6j
        return float(self.turn[0].real)


class FortranOrder(Piece):
    def plant(self) -> None:
        self.table = np.asfortranarray(np.arange(6.0).reshape(2, 3) / 10)

    def move(self) -> Value:
        self.table[1] += 0.1
        return float(self.table.ravel(order="K")[1])


class Sliced(Piece):
    """A part that writes through to the whole."""

    def plant(self) -> None:
        self.table = np.zeros((4, 4))
        self.corner = self.table[1:3, 1:3]

    def move(self) -> Value:
        self.corner += 0.1
        return float(self.table.sum() / 4)


class SharedWithTensor(Piece):
    """``torch.from_numpy``: an array and a tensor of the same memory."""

    def plant(self) -> None:
        self.array = np.zeros(WIDTH, np.float32)
        self.tensor = torch.from_numpy(self.array)

    def move(self) -> Value:
        self.array += 0.1
        return self.tensor.clone()


class Masked(Piece):
    def plant(self) -> None:
        self.values = np.ma.masked_array(np.zeros(4), mask=[0, 1, 0, 0])

    def move(self) -> Value:
        self.values += 0.1
        self.values.mask[2] = not self.values.mask[2]
        return float(self.values.sum() / 4)


class Large(Piece):
    """17 MiB; one number changes."""

    def plant(self) -> None:
        self.bank, self.at = np.zeros(17 << 17), 0

    def move(self) -> Value:
        self.bank[4 * self.at + 1] = 0.1
        self.at += 1
        return float(self.bank.sum())


class LargeByOneNumber(Piece):
    """17 MiB; the same number changes again and again."""

    def plant(self) -> None:
        self.bank = np.zeros(17 << 17)

    def move(self) -> Value:
        self.bank[12345] += 0.1
        return float(self.bank[12345])


class ListOfArrays(Piece):
    def plant(self) -> None:
        self.queue = [np.zeros(2), np.ones(2)]

    def move(self) -> Value:
        self.queue.append(0.9 * self.queue.pop(0) + 0.1)
        return float(self.queue[0][0])


class Mapped(Piece):
    """A file in the job's directory, mapped into memory."""

    def plant(self) -> None:
        path = Path("bank.npy")
        self.bank: Any = np.lib.format.open_memmap(path, "w+", np.float64, (4,))

    def move(self) -> Value:
        self.bank[1] += 0.1
        return float(self.bank[1])


class Polynomial(Piece):
    def plant(self) -> None:
        self.curve = np.polynomial.Polynomial([0.1, 0.2])

    def move(self) -> Value:
        self.curve = self.curve * np.polynomial.Polynomial([1.1]) + 0.1
        return float(self.curve(0.5))


class PolynomialInPlace(Piece):
    def plant(self) -> None:
        self.curve = np.polynomial.Chebyshev([0.1, 0.2])

    def move(self) -> Value:
        self.curve.coef[0] += 0.1
        return float(self.curve(0.5))
