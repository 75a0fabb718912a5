"""Reads back what W&B's own package has written offline."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Offline(NamedTuple):
    """What a ``.wandb`` file says. ``rows``: step and values of each row, in their order."""

    run: Any
    rows: list[tuple[int, dict[str, float]]]
    summary: dict[str, Any]
    exit_code: int

    @property
    def config(self) -> dict[str, Any]:
        return {one.key: json.loads(one.value_json) for one in self.run.config.update}


def read(directory: Path) -> Offline:
    run: Any = None
    rows, summary, exit_code = [], {}, -1
    (path,) = directory.glob("*.wandb")
    for record in records(path):
        if record.HasField("run"):
            run = record.run
        for one in record.summary.update:
            summary[one.key or one.nested_key[0]] = json.loads(one.value_json)
        if record.HasField("history"):
            row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
            assert row.pop("_step") == record.history.step.num
            rows.append((record.history.step.num, row))
        if record.HasField("exit"):
            exit_code = record.exit.exit_code
    return Offline(run, rows, summary, exit_code)


def records(path: Path) -> Iterator[Any]:
    """The records of a file in the format of LevelDB's log: blocks of 32 KiB with parts of records, each with its checksum, its
    length, and whether it is the whole of a record (1), its first part, a middle one, or its last (4)."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""  # seven bytes of W&B's own come first
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + 7 : at + 7 + length]
        assert zlib.crc32(data[at + 6 : at + 7] + part) == int.from_bytes(data[at : at + 4], "little")
        record += part
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
