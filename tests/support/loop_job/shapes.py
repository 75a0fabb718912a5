"""Loops of many shapes over a prepared loader, one run of a Session after the other: ``python shapes.py SHAPE[-strict] ...``.

For each a line of JSON: the steps and backward passes that it did, and the error that ended it."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ratchet import Session

SAMPLES = int(os.environ.get("SAMPLES", "20"))
Work = Callable[[Any], None]


def ordinary(session: Any, loader: Any, raw: Any, work: Work) -> None:
    """With an early end of an epoch, an evaluation behind the training, and one backward pass for what is left."""
    for epoch in session.epochs(3):
        for n, (x,) in enumerate(loader):
            work(x)
            if (epoch, n) == (0, 2):
                break
        with torch.no_grad():
            assert len(list(loader)) == len(loader)
        work(torch.ones(2, 4))


def nested(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for _ in session.epochs(2):
            for (x,) in loader:
                work(x)


def two_loops(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for total in (2, 4):
        for epoch in session.epochs(total):
            for (x,) in loader:
                work(x)
            if epoch == 0:
                break


def nested_steps(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.steps(6):
        for _ in session.steps(3):
            work(torch.ones(2, 4))


def not_prepared(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for (x,) in raw:
            work(x)


def next_of_iter(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for _ in range(len(loader)):
            work(next(iter(loader))[0])


def evaluated_first(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        assert len(list(loader)) == len(loader)
        for (x,) in loader:
            work(x)


def listed(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for (x,) in [*loader]:
            work(x)


def zipped(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for (x,), _ in zip(loader, range(100), strict=False):
            work(x)


def sliced(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for (x,) in itertools.islice(loader, 3):
            work(x)


def by_next(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        batches = iter(loader)
        for _ in range(3):
            work(next(batches)[0])


def while_next(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        batches, count = iter(loader), 0
        while count < 3:
            work(next(batches)[0])
            count += 1


def sliced_numbers(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for _ in session.epochs(2):
        for _, (x,) in itertools.islice(enumerate(loader), 3):
            work(x)


def another_loop_later(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for epoch in session.epochs(4):
        if epoch % 2 == 0:
            for (x,) in loader:
                work(x)
        else:
            for (x,) in itertools.islice(loader, 3):
                work(x)


def walked(session: Any, loader: Any, raw: Any, work: Work) -> None:
    """How often all objects are gone over to find what reads the loader, by epoch."""
    counts, walk = [0, 0, 0], gc.get_referrers

    def counting(*items: Any) -> list[Any]:
        counts[epoch] += 1
        return walk(*items)

    gc.get_referrers = counting
    for epoch in session.epochs(3):  # noqa: B007  (counting reads it)
        for (x,) in loader:
            work(x)
    gc.get_referrers = walk
    raise AssertionError([count > 0 for count in counts])


def numbered(session: Any, loader: Any, raw: Any, work: Work) -> None:
    """The first run is stopped in its first epoch, after the third batch; the second goes on."""
    for _ in session.epochs(1):
        numbers = []
        for n, (x,) in session.enumerate(loader):
            work(x)
            numbers.append(n)
            if n == 1 and not session.resumed:
                os.kill(os.getpid(), signal.SIGTERM)
                while not session.should_stop:
                    threading.Event().wait(0.01)
        again = [n for n, _ in session.enumerate(loader)]
        raise AssertionError(f"{numbers} {again}")


def broken_off(session: Any, loader: Any, raw: Any, work: Work) -> None:
    """Saves behind passes that are left by ``break``. The first run fails in its second epoch; the second goes on."""
    done = []
    for epoch in session.epochs(3):
        for n, (x,) in enumerate(loader):
            work(x)
            done.append((epoch, n))
            if not session.resumed and epoch == 1:
                raise ArithmeticError
            if n == 2:
                break
        assert session.checkpoint()
    raise AssertionError(done)


def stop_caught(session: Any, loader: Any, raw: Any, work: Work) -> None:
    for epoch in session.epochs(3):
        try:
            for n, (x,) in enumerate(loader):
                work(x)
                if (epoch, n) == (1, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                    while not session.should_stop:
                        threading.Event().wait(0.01)
        except BaseException:
            continue


def run(shape: str, directory: str) -> dict[str, Any]:
    done, error = 0, None
    determinism = "strict" if directory.endswith("strict") else "warn"
    try:
        with Session(directory, checkpoint={"every_steps": 2, "first": "off"}, determinism=determinism) as session:
            torch.manual_seed(1)
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            raw = DataLoader(TensorDataset(torch.randn(SAMPLES, 4)), 4)
            model, optimizer, loader = session.prepare(net, optimizer, raw)

            def work(x: torch.Tensor) -> None:
                nonlocal done
                done += 1
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            globals()[shape](session, loader, raw, work)
    except BaseException as found:
        error = f"{type(found).__name__}: {found}"
    return {"shape": shape, "step": session.step, "done": done, "error": error}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(run(argument.partition("-")[0], argument)), flush=True)
