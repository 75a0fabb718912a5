"""Verify checkpoints without a service. ``python -m ratchet_store.verify PATH...`` takes checkpoint directories, or directories
of them. Exit status: 1 a finding is ``damaged``; 2 none is, but one is ``unreadable``, or the usage is wrong; 0 otherwise."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

from ratchet_contract.checkpoint.manifest import TensorEntry
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, parse_checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING, UNREADABLE
from ratchet_store.format.manifest_file import checkpoint_dirs, read_manifest
from ratchet_store.read.checkpoint_reader import damaged_blocks

_REPORT_INTERVAL_SECONDS: Final = 5.0  # seconds between two lines of progress
Status = Literal["ok", "damaged", "unreadable", "uncommitted"]
ProgressCallback = Callable[[int, int], None]
"""Progress callback: bytes done, and total bytes."""


@dataclass(frozen=True)
class Flaw:
    """One damaged place. ``block``: number of the damaged block. ``begin`` and ``end``: its first byte, and the byte after its
    last. All three are None if a whole file is damaged."""

    file: str
    error: str
    block: int | None = None
    begin: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class Finding:
    """The result for one checkpoint. ``status``: ``uncommitted`` means that there is no manifest, which is not damage.
    ``size``: bytes of its rank files according to the manifest. ``flaws``: all damage found. ``error``: why the checkpoint is
    uncommitted, or why it or one of its files is unreadable."""

    path: str
    status: Status
    size: int | None = None
    files: int = 0
    format_version: int | None = None
    flaws: list[Flaw] = field(default_factory=list)
    error: str | None = None

    def __str__(self) -> str:
        if self.status == "ok":
            return (
                f"{self.path}: ok, {_format_bytes(self.size or 0)} in {self.files} files, format {self.format_version}"
            )
        if self.status == "damaged":
            found = [f"{flaw.file}: {flaw.error}" for flaw in self.flaws] + ([self.error] if self.error else [])
            return "\n  ".join([f"{self.path}: DAMAGED", *found])
        return f"{self.path}: {self.status}: {self.error}"


def check(directory: Path, progress: ProgressCallback | None = None) -> Finding:
    """Read and verify one checkpoint. Damage and read errors are in the finding. ``progress`` gets the bytes done and the
    total."""
    path = str(directory)
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        if error.code == DAMAGED:
            return Finding(path, "damaged", flaws=[Flaw(MANIFEST_NAME, error.detail)])
        return Finding(path, "unreadable", error=error.detail)
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        by_file[entry.file].append(entry)
    flaws: list[Flaw] = []
    unreadable: str | None = None
    done = 0

    def count(nbytes: int) -> None:
        """Add ``nbytes`` to the bytes read, and report the sum to ``progress``."""
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, manifest.size)

    for file in manifest.files:
        try:
            for block in damaged_blocks(directory, file, by_file[file.name], count):
                flaws.append(Flaw(file.name, str(block), block.number, block.begin, block.end))
        except CheckpointError as error:
            if error.code == DAMAGED:
                flaws.append(Flaw(file.name, error.detail.removeprefix(f"{directory / file.name}: ")))
            else:  # other files may have damage, which is worse
                unreadable = unreadable or error.detail
    status: Status = "damaged" if flaws else "ok" if unreadable is None else "unreadable"
    return Finding(path, status, manifest.size, len(manifest.files), manifest.format_version, flaws, unreadable)


def verifiers(target: str) -> Iterator[Callable[[ProgressCallback | None], Finding]]:
    """Yield a function for each checkpoint at ``target``, oldest first, that verifies it. ``target``: a checkpoint, or a
    directory of them. Raises ``CheckpointError`` if ``target`` cannot be used."""
    if "://" in target:
        raise CheckpointError(
            f"{target}: only directories can be verified here: fetch the checkpoint first", code=UNREADABLE
        )
    path = Path(os.path.abspath(target))  # noqa: PTH100 (its name counts: resolve "..", but keep the name of a link)
    if parse_checkpoint_dir_name(path.name) is not None:
        yield partial(check, path)
        return
    if not path.is_dir():
        raise CheckpointError(f"{target} is no directory", code=MISSING)
    found = [directory for _, _, directory in checkpoint_dirs(path)][::-1]
    if not found:
        raise CheckpointError(f"{target} is no checkpoint, and holds none", code=MISSING)
    for directory in found:
        yield partial(_check_committed, directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a finding for each checkpoint at the paths. Returns the exit status that the module describes."""
    parser = argparse.ArgumentParser(
        prog="python -m ratchet_store.verify", description="Verify every byte of checkpoints."
    )
    parser.add_argument("path", nargs="+", help="a checkpoint's directory, or a directory of checkpoints")
    parser.add_argument("--json", action="store_true", help="a JSON object per line")
    arguments = parser.parse_args(argv)
    seen: set[Status] = set()
    for target in arguments.path:
        try:
            for verify in verifiers(target):
                finding = verify(_ProgressReporter())
                seen.add(finding.status)
                print(json.dumps(asdict(finding)) if arguments.json else finding, flush=True)
        except CheckpointError as error:
            finding = Finding(target, "unreadable", error=error.detail)
            seen.add(finding.status)
            print(json.dumps(asdict(finding)) if arguments.json else finding, flush=True)
    return 1 if "damaged" in seen else 2 if "unreadable" in seen else 0


class _ProgressReporter:
    """Progress callback for one checkpoint: prints a line on standard error at most every ``_REPORT_INTERVAL_SECONDS``."""

    def __init__(self) -> None:
        self._reported_at = time.monotonic()

    def __call__(self, done: int, size: int) -> None:
        if time.monotonic() - self._reported_at >= _REPORT_INTERVAL_SECONDS:
            self._reported_at = time.monotonic()
            print(
                f"{_format_bytes(done)} of {_format_bytes(size)} ({100 * done // max(size, 1)} %)",
                file=sys.stderr,
                flush=True,
            )


def _check_committed(directory: Path, progress: ProgressCallback | None) -> Finding:
    """Check one entry of a directory of checkpoints. Without a manifest the finding is ``uncommitted``."""
    if not os.path.lexists(directory / MANIFEST_NAME):
        return Finding(
            str(directory), "uncommitted", error=f"it has no {MANIFEST_NAME} and does not count as a checkpoint"
        )
    return check(directory, progress)


def _format_bytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
