"""What TensorBoard shows of a directory: (step, value) by series, with TensorBoard's own reader and its default purge."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

Points = list[tuple[int, float]]


def series(directory: Path) -> dict[str, Points]:
    """By run (relative directory) and tag, ``RUN:TAG``, the points in the order in which they are shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found: dict[str, Points] = {}
        for folder in sorted({path.parent for path in directory.rglob("events.out.tfevents.*")}):
            reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # type: ignore[no-untyped-call]
            reader.Reload()  # type: ignore[no-untyped-call]
            for tag in reader.Tags()["scalars"]:  # type: ignore[no-untyped-call]
                points = reader.Scalars(tag)  # type: ignore[no-untyped-call]
                found[f"{folder.relative_to(directory)}:{tag}"] = [(point.step, point.value) for point in points]
    return found


def doubles(points: Points) -> int:
    """How many points are at a step that has one already."""
    return sum(number - 1 for number in Counter(step for step, _ in points).values())
