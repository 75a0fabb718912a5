"""Files that Lightning's callbacks and loggers write in training, as of the step that an attempt begins with.

Steps that a kill has cost are done again, and write their checkpoint files again: under the same names, with the same files
beside them. So what lost steps wrote is moved aside before the training begins, and what they removed is put back. Both is
possible because a file that a callback removes is only hidden until a checkpoint of the job has that step.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loggers import CSVLogger, Logger

from ratchet_worker.files import write_atomic

WRITTEN, REMOVED, LOST, LOGS, ENDED = "written", "removed", "lost", "logs", "ended"
_UNKNOWN: Final = object()
_BELOW: Final = "{workdir}"


class CheckpointFiles:
    """On the rank that writes them. ``journal``: in the job's directory, a line per file with the step that wrote or removed it;
    ``step``: the one that is open. Files of other file systems than local ones are not looked after."""

    def __init__(self, journal: Path, step: Callable[[], int]) -> None:
        self._journal, self._step = journal, step
        self._entries: list[dict[str, Any]] = []
        self._versions: list[Any] | None = None

    def rewind(self, base: int) -> None:
        """Leave the files as they were behind step ``base``. Those of later steps are kept aside until these are done again; not
        those of a training that had ended, and whose checkpoints somebody has deleted to begin another one."""
        entries = self._read()
        if not base and any(entry["kind"] == ENDED for entry in entries):
            entries = []
        left = []
        for entry in reversed(entries):
            kind, path, aside = entry["kind"], Path(entry["path"]), _aside(entry)
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
                path.rename(aside)
                left.append({**entry, "kind": LOST})
        self._entries = left[::-1]
        if left or self._journal.exists():
            write_atomic(self._journal, "".join(map(_line, self._entries)).encode(), durable=True)

    def versions(self, found: list[Any]) -> list[Any]:
        """Of the loggers' directories: those of the job's first attempt, which has ``found`` these."""
        if self._versions is None:
            self._versions = found
            self._add({"kind": LOGS, "step": 0, "path": "", "versions": found})
        return self._versions

    def writes(self, path: Any) -> None:
        """``path`` is about to be written."""
        if _is_local_file_protocol(path) and not os.path.lexists(path):
            self._add({"kind": WRITTEN, "step": self._step(), "path": str(Path(path).absolute())})

    def removes(self, path: Any) -> bool:
        """Hide ``path``. False: it is to be removed by whoever wrote it."""
        if not _is_local_file_protocol(path) or not Path(path).exists():
            return False
        entry = {"kind": REMOVED, "step": self._step(), "path": str(Path(path).absolute())}
        self._add(entry)
        _delete(_aside(entry))
        Path(path).rename(_aside(entry))
        return True

    def settle(self, step: int) -> None:
        """A checkpoint of ``step`` is there: what was hidden up to it is deleted."""
        done = [entry for entry in self._entries if entry["kind"] in (REMOVED, LOST) and entry["step"] <= step]
        for entry in done:
            _delete(_aside(entry))
            self._entries.remove(entry)

    def ended(self) -> None:
        """The final checkpoint is there, and with it all files."""
        self._add({"kind": ENDED, "step": self._step(), "path": ""})

    def _read(self) -> list[dict[str, Any]]:
        """A line that a kill has cut off is of a file that was not touched yet."""
        text = self._journal.read_text() if self._journal.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _add(self, entry: dict[str, Any]) -> None:
        self._entries.append(entry)
        with self._journal.open("a") as journal:
            journal.write(_line(entry))
            journal.flush()
            os.fsync(journal.fileno())


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _aside(entry: dict[str, Any]) -> Path:
    path = Path(entry["path"])
    return path.with_name(f".{path.name}.step-{entry['step']}") if path.name else path


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- paths in what callbacks keep ------------------------------------------------------------------------------------------


def relative_paths(value: Any, workdir: Path) -> Any:
    """``value`` with paths below the job's working directory as any job has them: two that train alike have the same."""
    root = str(workdir.resolve())
    return _replaced(value, lambda text: _BELOW + text[len(root) :] if f"{text}/".startswith(f"{root}/") else text)


def absolute_paths(value: Any, workdir: Path) -> Any:
    """What ``relative_paths`` has made, in this ``workdir``."""
    root = str(workdir.resolve())
    return _replaced(value, lambda text: root + text[len(_BELOW) :] if text.startswith(_BELOW) else text)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """In the containers of a state: their keys, too."""
    if type(value) is str:
        return replace(value)
    if type(value) is dict:
        return {_replaced(key, replace): _replaced(one, replace) for key, one in value.items()}
    if type(value) is list:
        return [_replaced(one, replace) for one in value]
    return value


# --- loggers -----------------------------------------------------------------------------------------------------------


def open_versions(loggers: Iterable[Logger]) -> list[Any]:
    """By logger the version that it would number its directory with; None where the script gives one, or it has none."""
    return [logger.version if vars(logger).get("_version", _UNKNOWN) is None else None for logger in loggers]


def put_versions(loggers: Iterable[Logger], versions: list[Any]) -> None:
    for logger, version in zip(loggers, versions, strict=False):
        if version is not None:
            vars(logger)["_version"] = version


def mute(loggers: Iterable[Logger]) -> None:
    for logger in loggers:
        vars(logger)["log_metrics"] = lambda *_, **__: None


def unmute(loggers: Iterable[Logger]) -> None:
    for logger in loggers:
        vars(logger).pop("log_metrics", None)


def csv_rows(loggers: Iterable[Logger]) -> list[int]:
    """By logger the number of rows in its file, to which those that wait are written; 0 where it has none."""
    return [_rows(logger) for logger in loggers]


def _rows(logger: Logger) -> int:
    experiment = logger._experiment if isinstance(logger, CSVLogger) else None
    if experiment is None:
        return 0
    experiment.save()
    file = Path(experiment.metrics_file_path)
    if not file.exists():
        return 0
    with file.open(newline="") as lines:
        return sum(1 for _ in csv.reader(lines)) - 1


def rewind_csv(loggers: Iterable[Logger], rows: list[int]) -> None:
    """Leave as many rows in the loggers' files: Lightning begins a file anew, and rows of lost steps come again."""
    for logger, number in zip(loggers, rows, strict=False):
        if isinstance(logger, CSVLogger) and number:
            _rewind_csv(logger, number)


def _rewind_csv(logger: CSVLogger, rows: int) -> None:
    file = Path(logger.log_dir, "metrics.csv")
    before = file.with_name(".metrics.csv.before")  # while the logger begins its file, which deletes what is there
    if not before.exists():
        if not file.exists():
            return
        file.rename(before)
    with before.open(newline="") as lines:
        found = list(csv.reader(lines))[: rows + 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experiment: Any = logger.experiment
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows(found)
    experiment.metrics_keys = [*found[0]]
    before.unlink()
