"""Rewinds files that Lightning's callbacks and loggers write to the step that an attempt begins with."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loggers import CSVLogger, Logger

from ratchet_contract.atomic_write import write_atomic

WRITTEN, REMOVED, LOST, LOGS, ENDED = "written", "removed", "lost", "logs", "ended"
_UNKNOWN: Final = object()
_SPARE_LINES: Final = 100
_WORKDIR_PLACEHOLDER: Final = "{workdir}"


class CheckpointFiles:
    """Records the checkpoint files that Lightning's callbacks write and remove, and rewinds them. ``journal``: a file in the
    job's directory; ``step``: returns the open step."""

    def __init__(self, journal: Path, step: Callable[[], int]) -> None:
        self._journal, self._step = journal, step
        self._entries: list[dict[str, Any]] = []
        self._lines = 0  # of the journal, which keeps entries that are done until it is rewritten
        self._versions: list[Any] | None = None

    def rewind(self, base: int) -> None:
        """Restore the set of local checkpoint files that existed after step ``base``; files that later steps created are moved
        aside. If ``base`` is 0 and a training has ended, leave all files."""
        entries = self._read()
        if not base and any(entry["kind"] == ENDED for entry in entries):
            # The ended training's checkpoints were deleted to begin another one: its files are left alone.
            entries = []
        left = []
        for entry in reversed(entries):
            kind, path, aside = entry["kind"], Path(entry["path"]), _aside_path(entry)
            if kind == LOGS:
                self._versions = entry["versions"]
                left.append(entry)
            elif kind == ENDED:
                left.append(entry)
            elif entry["step"] <= base and kind != WRITTEN:
                _delete(aside)
            elif entry["step"] <= base or kind == LOST:
                left.append(entry)
            elif kind == REMOVED and aside.exists() and not path.exists():
                aside.rename(path)
            elif kind == WRITTEN and os.path.lexists(path):
                _delete(aside)
                # Not left in place: names of new files depend on the files that exist.
                path.rename(aside)
                left.append({**entry, "kind": LOST})
        self._entries = left[::-1]
        if left or self._journal.exists():
            self._write()

    def versions(self, found: list[Any]) -> list[Any]:
        """Return the versions in the loggers' directory names: the recorded ones, if any. Otherwise, record ``found`` and return
        it. Call it after ``rewind``."""
        if self._versions is None:
            self._versions = found
            self._add({"kind": LOGS, "step": 0, "path": "", "versions": found})
        return self._versions

    def record_write(self, path: Any) -> None:
        """Record that ``path`` is about to be written, unless it exists already or is not local."""
        if _is_local_file_protocol(path) and not os.path.lexists(path):
            self._add({"kind": WRITTEN, "step": self._step(), "path": str(Path(path).absolute())})

    def hide(self, path: Any) -> bool:
        """Rename ``path``, so that ``rewind`` can put it back. Returns False if it is not local or does not exist."""
        if not _is_local_file_protocol(path) or not Path(path).exists():
            return False
        entry = {"kind": REMOVED, "step": self._step(), "path": str(Path(path).absolute())}
        self._add(entry)
        _delete(_aside_path(entry))
        Path(path).rename(_aside_path(entry))
        return True

    def finalize(self, step: int) -> None:
        """Delete the files that steps up to ``step`` have hidden, and the files that such steps had created and ``rewind`` has
        moved aside."""
        left, deleted = [], set[str]()
        for entry in reversed(self._entries):
            if entry["kind"] in (REMOVED, LOST) and entry["step"] <= step:
                _delete(_aside_path(entry))
                if entry["kind"] == REMOVED:
                    deleted.add(entry["path"])
            elif entry["kind"] != WRITTEN or entry["path"] not in deleted:
                left.append(entry)
        self._entries = left[::-1]
        if self._lines > 2 * len(left) + _SPARE_LINES:
            with suppress(OSError):  # the long journal says the same; the disk may be full
                self._write()

    def record_end(self) -> None:
        """Record that the training has ended: the final checkpoint, and all files, exist."""
        self._add({"kind": ENDED, "step": self._step(), "path": ""})

    def _read(self) -> list[dict[str, Any]]:
        """Return the journal's entries, oldest first, without a last line that a kill has cut off."""
        text = self._journal.read_text() if self._journal.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _write(self) -> None:
        """Replace the journal by one that has only the present entries, durably and atomically."""
        write_atomic(self._journal, "".join(map(_line, self._entries)).encode(), durable=True)
        self._lines = len(self._entries)

    def _add(self, entry: dict[str, Any]) -> None:
        """Append an entry to the journal, durably."""
        self._entries.append(entry)
        with self._journal.open("a") as journal:
            journal.write(_line(entry))
            journal.flush()
            os.fsync(journal.fileno())
        self._lines += 1


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _aside_path(entry: dict[str, Any]) -> Path:
    """The path, in the same directory, under which the file of an entry is hidden."""
    path = Path(entry["path"])
    return path.with_name(f".{path.name}.step-{entry['step']}") if path.name else path


def _delete(path: Path) -> None:
    """Delete a file, link or whole directory; nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- paths in what callbacks keep ------------------------------------------------------------------------------------------


def relative_paths(value: Any, workdir: Path) -> Any:
    """Return ``value`` with paths in ``workdir`` made relative: a placeholder replaces the resolved ``workdir``. Jobs that train
    alike then have the same state, although their directories differ."""
    root = str(workdir.resolve())
    return _replace_strings(
        value, lambda text: _WORKDIR_PLACEHOLDER + text[len(root) :] if f"{text}/".startswith(f"{root}/") else text
    )


def absolute_paths(value: Any, workdir: Path) -> Any:
    """Return ``value`` with the paths that ``relative_paths`` made relative, now below ``workdir``."""
    root = str(workdir.resolve())
    return _replace_strings(
        value, lambda text: root + text[len(_WORKDIR_PLACEHOLDER) :] if text.startswith(_WORKDIR_PLACEHOLDER) else text
    )


def _replace_strings(value: Any, replace: Callable[[str], str]) -> Any:
    """Return ``value`` with ``replace`` applied to all strings in its dicts and lists, including keys."""
    if type(value) is str:
        return replace(value)
    if type(value) is dict:
        return {_replace_strings(key, replace): _replace_strings(one, replace) for key, one in value.items()}
    if type(value) is list:
        return [_replace_strings(one, replace) for one in value]
    return value


# --- loggers -----------------------------------------------------------------------------------------------------------


def open_versions(loggers: Iterable[Logger]) -> list[Any]:
    """Return, for each logger, the version that it chooses for its directory's name; None if it chooses none."""
    return [logger.version if vars(logger).get("_version", _UNKNOWN) is None else None for logger in loggers]


def set_versions(loggers: Iterable[Logger], versions: list[Any]) -> None:
    """Set the loggers' versions; None leaves a logger's own."""
    for logger, version in zip(loggers, versions, strict=False):
        if version is not None:
            vars(logger)["_version"] = version


def mute(loggers: Iterable[Logger]) -> None:
    """Make the loggers drop metrics until ``unmute``."""
    for logger in loggers:
        vars(logger)["log_metrics"] = lambda *_, **__: None


def unmute(loggers: Iterable[Logger]) -> None:
    """Undo ``mute``."""
    for logger in loggers:
        vars(logger).pop("log_metrics", None)


def csv_rows(loggers: Iterable[Logger]) -> list[int]:
    """Return the number of rows in each logger's CSV file, without the header; 0 if this process has opened none. Writes buffered
    rows."""
    return [_rows(logger) for logger in loggers]


def _rows(logger: Logger) -> int:
    """Return the number of rows in the logger's CSV file, without the header; 0 if this process has opened none. Writes buffered
    rows."""
    experiment = logger._experiment if isinstance(logger, CSVLogger) else None
    if experiment is None:
        return 0
    experiment.save()
    file = Path(experiment.metrics_file_path)
    if not file.exists():
        return 0
    with file.open(newline="") as lines:
        return max(0, sum(1 for _ in csv.reader(lines)) - 1)


def rewind_csv(loggers: Iterable[Logger], rows: list[int], *, own: bool) -> list[str]:
    """Cut each logger's CSV file to its number of rows in ``rows``; a 0 leaves the file as it is. ``own``: this job has written
    the rows. Empty rows then replace missing ones, and the result has a message for each such file."""
    found = [
        _rewind_csv(logger, number, own)
        for logger, number in zip(loggers, rows, strict=False)
        if isinstance(logger, CSVLogger) and number > 0
    ]
    return [message for message in found if message is not None]


def _rewind_csv(logger: CSVLogger, rows: int, own: bool) -> str | None:
    """Keep the first ``rows`` rows of the logger's CSV file. ``own``: empty rows replace missing ones, even if the file was
    deleted. Returns a message about rows that were replaced. Returns None if there are none, or the directory is new."""
    file = Path(logger.log_dir, "metrics.csv")
    before = file.with_name(
        ".metrics.csv.before"
    )  # kept while the logger begins its file, which deletes the existing one
    if not before.exists():
        if file.exists():
            # A kill after this loses no rows: the next call continues from this file.
            file.rename(before)
        elif own and (file.parent.exists() or (isinstance(logger.version, int) and Path(logger.save_dir).exists())):
            file.parent.mkdir(parents=True, exist_ok=True)
            before.touch()
        else:  # a fork, or a script that gives each start a directory of its own
            return None
    found = _complete_rows(before)[: rows + 1]
    lost = rows + 1 - max(1, len(found)) if own else 0
    if lost:
        header = found[0] if found else ["step"]
        found = [header, *found[1:], *[[""] * len(header)] * lost]
    if found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            experiment: Any = logger.experiment
        with file.open("w", newline="", errors="surrogateescape") as lines:
            csv.writer(lines).writerows(found)
        experiment.metrics_keys = [*found[0]]
    before.unlink()
    if not lost:
        return None
    return f"{file}: {lost} of {rows} rows are lost, since the file was cut off or deleted; they are left empty"


def _complete_rows(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file, header first, without a last one that was cut off."""
    with file.open(newline="", errors="surrogateescape") as lines:
        text = lines.read()
    return list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
