"""Reads back what an experiment tracker has stored, with the tracker's own software."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Points = dict[str, list[tuple[int, float]]]


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("tensorboard")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def read_tensorboard(directory: Path) -> tuple[Points, dict[str, str]]:
    """Every point by series, and every text, of the run in ``directory``. TensorBoard itself may see nothing out of order."""
    with _quiet():
        found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
        found.Reload()
    points = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    return points, texts
