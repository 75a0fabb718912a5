"""Iterable training data with an exact position: the public import path of ``ratchet_worker.data.streams``."""

from ratchet_worker.data.streams import TrainStream

__all__ = [
    "TrainStream",
]
