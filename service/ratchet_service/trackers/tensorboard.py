"""TensorBoard: one event file for a run, ``DIRECTORY/EXPERIMENT/RUN/events.out.tfevents...``. The state has the file's length
after the last batch. Each call first cuts the file to that length: a repeated batch replaces what a killed process wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from ratchet_service.trackers.sink import Batch, Run, State, TrackerError


class TensorBoardSink:
    """Writes event files below ``directory``."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def export(self, run: Run, state: State, batch: Batch) -> State:
        """Append the batch to the run's file, synced to the disk. Raise ``TrackerError``."""
        file = (
            self._directory
            / run.experiment
            / run.name
            / f"events.out.tfevents.{int(run.created_at.timestamp())}.{run.name}"
        )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("r+b" if state else "wb") as out:
                length = _append(out, int(state.get("length", 0)), run, batch)
            if not state:
                _sync_directories(file.parent, self._directory.parent)
        except OSError as error:
            raise TrackerError(f"tensorboard: {file} cannot be written: {error}") from error
        return {"path": str(file.parent), "length": length}


def _append(out: BinaryIO, start: int, run: Run, batch: Batch) -> int:
    """Write the batch at ``start``, and return the file's new length. Raise ``TrackerError`` if the file is shorter."""
    size = out.seek(0, os.SEEK_END)
    if size < start:
        raise TrackerError(
            f"tensorboard: {out.name} has {size} bytes and had {start}: put the file back from a backup, and the export continues"
        )
    out.truncate(start)
    out.seek(start)
    records = RecordWriter(out)
    for event in _events(run, batch, first=start == 0):
        records.write(event.SerializeToString(deterministic=True))
    out.flush()
    os.fsync(out.fileno())
    return out.tell()


def _events(run: Run, batch: Batch, *, first: bool) -> Iterator[Event]:
    """Yield the batch as TensorBoard's events; with ``first``, before them the file's version and the run's parameters."""
    if first:
        yield Event(wall_time=run.created_at.timestamp(), file_version="brain.Event:2")
        facts = {"job": run.job_name, "owner": run.owner} | ({} if run.parent is None else {"parent": run.parent})
        facts |= {f"label.{key}": value for key, value in run.labels.items()}
        yield _text("ratchet/parameters", 0, run.created_at, _table(facts | dict(run.parameters)))
    for (step, at), points in groupby(batch.points, lambda point: (point.step, point.at)):
        values = [Summary.Value(tag=point.name, simple_value=point.value) for point in points]
        yield Event(wall_time=at.timestamp(), step=step, summary=Summary(value=values))
    for note in batch.notes:
        yield _text(f"ratchet/notes/{note.id}", note.step, note.at, note.text)
    if batch.end is not None:
        end = {"status": batch.end.status} | {key: f"{value:g}" for key, value in batch.end.summary.items()}
        end |= {} if batch.end.checkpoint is None else {"checkpoint": batch.end.checkpoint}
        step = max((point.step for point in batch.points), default=0)
        yield _text("ratchet/end", step, batch.end.at, _table(end))


def _text(tag: str, step: int, at: datetime, text: str) -> Event:
    """Return the event of a text, which TensorBoard shows under "Text"."""
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    value = Summary.Value(tag=tag, metadata=kind, tensor=tensor)
    return Event(wall_time=at.timestamp(), step=step, summary=Summary(value=[value]))


def _table(facts: Mapping[str, Any]) -> str:
    """Return the facts as a table in Markdown."""
    rows = [f"| {key} | {str(value).replace('|', '&#124;').replace(chr(10), ' ')} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _sync_directories(directory: Path, until: Path) -> None:
    """Sync ``directory`` and those above it up to ``until``, in which entries were made."""
    for folder in (directory, *directory.parents):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
        if folder == until:
            break
