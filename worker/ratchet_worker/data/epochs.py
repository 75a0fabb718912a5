"""Epoch after epoch without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ratchet_contract.errors import UserError

Item = TypeVar("Item")


def endless(data: Iterable[Item], on_batch: Callable[[], None]) -> Iterator[Item]:
    """Batches of ``data``, epoch after epoch. Raises ``UserError`` for an epoch without batches."""
    while True:
        empty = True
        for batch in data:
            empty = False
            on_batch()
            yield batch
        if empty:
            raise UserError("the data gave no batch in a whole epoch: fewer samples than one global batch needs?")
