"""A job as one HTML file: the web page of the job, with the API's answers that the page shows. Only GETs are sent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from ratchet_client.http.errors import ServiceFault
from ratchet_client.http.transport import Params, Transport
from ratchet_client.resources.export_download import link, temporary_sibling, write_error
from ratchet_contract.errors import Refused
from ratchet_contract.plural import pluralize

_MIB: Final = 1 << 20
_ATTEMPTS, _CHECKPOINTS, _DELETED, _EVENTS, _FILES = 8 * _MIB, 2 * _MIB, _MIB, 4 * _MIB, _MIB
_METRICS, _HISTORY, _LOGS, _MANIFESTS, _TRACKERS = 8 * _MIB, 4 * _MIB, 8 * _MIB, 4 * _MIB, _MIB
"""Bytes of JSON that each part has at most; together with the page about 40 MiB."""
_POINTS, _LARGEST_CURVE = 60_000, 2000
"""Points of all metrics together, and of one metric."""
_SAMPLES, _STEPS = 8000, 500
"""Samples of the hook of all ranks together, and steps that have samples."""
_LINE: Final = 32
"""Bytes of a log for which one line of it is read."""
_READ_ALONE: Final = 50
"""Attempts whose environment is read, and checkpoints whose manifest is read: a request for each."""
_PAGE, _LONG_PAGE = 100, 1000
_PLACE: Final = '<script type="application/json" id="recorded"></script>'
Items = list[dict[str, Any]]


def write_report(transport: Transport, job_path: str, target: Path, *, log_bytes: int, force: bool) -> list[str]:
    """Write the report of the job with the API path ``job_path`` to ``target``, whole or not at all, and return sentences on what
    is left out. ``log_bytes``: of each rank's log in each attempt, its end; 0: no logs. ``force``: replace an existing file.

    Raises ``Refused`` if ``target`` exists (with ``force``: and is no file) or cannot be written, ``ServiceFault`` if the
    service's page is not one for reports, and the errors of ``Transport.request``.
    """
    try:
        if os.path.lexists(target):
            if not force:
                raise _exists_error(target)
            if not target.is_file():
                raise Refused(f"{target} is not a file, and is not replaced: name another", code="output-exists")
        with temporary_sibling(target) as temporary:
            recorded = _Recorder(transport, job_path, log_bytes).read()
            page = transport.request("GET", "/web/report.html").text
            if page.count(_PLACE) != 1:
                raise ServiceFault("the service's page for reports has no place for the data: another version?")
            made = temporary / "whole"
            made.write_text(page.replace(_PLACE, _PLACE.replace("></", f">{_json(recorded)}</")), encoding="utf-8")
            if force:
                made.replace(target)
            else:
                link(made, target)
    except FileExistsError:
        raise _exists_error(target) from None
    except OSError as error:
        raise write_error(target, error) from error
    return list(recorded["left_out"])


def _exists_error(target: Path) -> Refused:
    """Return, and do not raise, the error for a ``target`` that already exists."""
    text = f"{target} already exists: name another, or replace it: --force, in Python force=True"
    return Refused(text, code="output-exists")


class _Recorder:
    """Reads one job. What a part has at most is kept from its newest or first items on; ``_left_out`` says what is missing."""

    def __init__(self, transport: Transport, job_path: str, log_bytes: int) -> None:
        self._transport = transport
        self._job_path = job_path
        self._log_bytes = log_bytes
        self._left_out: list[str] = []

    def read(self) -> dict[str, Any]:
        """Return what the page's element ``recorded`` is to have, as ``app/recorded.js`` describes it."""
        made_at = datetime.now(UTC)
        job, hook, attempts = self._get(), self._get("hook"), self._attempts()
        parts = {
            "job": job, "hook": hook, "attempts": attempts, "checkpoints": self._checkpoints(), "metrics": self._metrics(),
            "trackers": self._fitting(self._get("trackers")["items"], _TRACKERS, "later runs in trackers"),
            "hook_history": self._hook_history(len(hook["ranks"])), "events": self._events(), "files": self._files(job),
            **self._logs([one["number"] for one in attempts]),
        }  # fmt: skip
        self._left_out.append(f"the names of unchanged files of the job's code: ratchet files {job['id']} --all")
        self._left_out.append(f"the contents of the job's files: ratchet cp {job['id']}: DIR")
        return parts | {
            "made_at": f"{made_at:%Y-%m-%dT%H:%M:%SZ}",
            "service": self._transport.target.url(),
            "ratchet": self._transport.request("GET", "/healthz").json()["version"],
            "left_out": self._left_out,
        }

    def _get(self, part: str = "", **params: Any) -> dict[str, Any]:
        """Return the answer for the job, or for the resource ``part`` below it."""
        path = f"{self._job_path}/{part}" if part else self._job_path
        found: dict[str, Any] = self._transport.request("GET", path, params=params).json()
        return found

    def _items(self, part: str, limit: int = _PAGE, **params: Any) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, whose pages are read as they are needed."""
        query: Params = {"limit": limit, **params}
        while True:
            found = self._get(part, **query)
            yield from found["items"]
            if found["next_cursor"] is None:
                return
            query = {**query, "cursor": found["next_cursor"]}

    def _fitting(self, items: Iterable[dict[str, Any]], most: int, what: str) -> Items:
        """Return the first of ``items`` that have at most ``most`` bytes together, and one in any case. ``what``: the others, in
        words, if there are any."""
        kept: Items = []
        for one in items:
            most -= _size(one)
            if kept and most < 0:
                self._left_out.append(f"{what} than the {len(kept)} in this report")
                break
            kept.append(one)
        return kept

    def _attempts(self) -> Items:
        """Return the newest attempts, newest first. Those read alone have ``environment``, which a list does not tell."""
        found = self._fitting(self._items("attempts"), _ATTEMPTS, "earlier attempts")
        for one in found:
            one.pop("environment", None)
        for one in found[:_READ_ALONE]:
            one["environment"] = self._get(f"attempts/{one['number']}")["environment"]
        if len(found) > _READ_ALONE:
            self._left_out.append(f"the environment of all attempts but the newest {_READ_ALONE}")
        return found

    def _checkpoints(self) -> Items:
        """Return checkpoints, newest step first, also deleted ones. The newest stored ones have ``manifest``."""
        stored = self._fitting(self._items("checkpoints"), _CHECKPOINTS, "more stored checkpoints")
        deleted = self._fitting(self._items("checkpoints", state="deleted"), _DELETED, "more deleted checkpoints")
        left = _MANIFESTS
        for n, one in enumerate(stored):
            manifest = self._get(f"checkpoints/{one['id']}")["manifest"] if n < _READ_ALONE else None
            left -= _size(manifest)
            if n == _READ_ALONE or left < 0:
                self._left_out.append(f"the parts of all checkpoints but the newest {n}")
                break
            one["manifest"] = manifest
        for one in deleted:
            one["manifest"] = None  # its files are gone
        return sorted([*stored, *deleted], key=lambda one: (-one["step"], -one["attempt"]))

    def _metrics(self) -> Items:
        """Return all metric series, thinned by the service."""
        number = len(self._get("metrics", max_points=2)["series"])
        points = max(2, min(_LARGEST_CURVE, _POINTS // max(1, number)))
        found = self._fitting(self._get("metrics", max_points=points)["series"], _METRICS, "more metrics")
        if thinned := sum(one["total"] > len(one["points"]) for one in found):
            which = pluralize(thinned, "metric")
            self._left_out.append(f"points of {which}: {points} of each, evenly spaced, are in this report")
        return found

    def _hook_history(self, ranks: int) -> Items:
        """Return the hook's samples over steps, thinned by the service."""
        steps = max(2, min(_STEPS, _SAMPLES // max(1, ranks)))
        found = self._fitting(self._items("hook/history", max_points=steps), _HISTORY, "later samples of the hook")
        if len({one["summary"]["step"] for one in found}) == steps:
            self._left_out.append(
                f"samples of the hook: those of at most {pluralize(steps, 'step')}, evenly spaced, are in this report"
            )
        return found

    def _events(self) -> Items:
        """Return the newest events, oldest first."""
        return self._fitting(self._items("events", sort="-id"), _EVENTS, "earlier events")[::-1]

    def _files(self, job: dict[str, Any]) -> Items:
        """Return the names in the job's working directory without its unchanged code."""
        if job["work_dir"] is None:
            return []
        return self._fitting(self._items("files", _LONG_PAGE), _FILES, "more names of files")

    def _logs(self, attempts: list[int]) -> dict[str, Any]:
        """Return the ends of the ranks' logs by attempt and rank, and the attempts whose logs they are, oldest first.
        ``attempts``: those in this report, newest first."""
        kept: list[Items] = []
        left = _LOGS
        for number in attempts if self._log_bytes else ():
            ends = self._log_ends(number)
            left -= _size(ends)
            if kept and left < 0:
                break
            kept.insert(0, ends)
        read = attempts[: len(kept)][::-1]
        if attempts and not read:
            self._left_out.append("all logs")
        elif read and read[0] > 1:
            self._left_out.append(f"the logs of all attempts before attempt {read[0]}")
        lines = [one for ends in kept for one in ends]
        if any(one["left_out"] is not None for one in lines):
            self._left_out.append("parts of long logs; a line in their place says how many bytes")
        return {"log_attempts": read, "logs": lines}

    def _log_ends(self, attempt: int) -> Items:
        """Return the last lines of each rank's log."""
        ranks = sum(1 for _ in self._items("logs", _LONG_PAGE, attempt=attempt, tail=1))
        most = min(self._log_bytes, _LOGS // 4 // max(1, ranks))  # so that the newest attempt's logs are never too long
        tail = 2 + most // _LINE
        lines = self._items("logs", _LONG_PAGE, attempt=attempt, tail=tail)
        return [one for _, log in groupby(lines, key=lambda one: one["rank"]) for one in _end_of(list(log), tail, most)]


def _end_of(lines: Items, tail: int, most: int) -> Items:
    """Return those of the last ``tail`` lines of one log that have ``most`` bytes, and the last one in any case, after a line
    that says how many bytes are left out before them."""
    # there may be more of them: the log may have grown while it was read; before a gap, the service gives none
    begin, size = int(len(lines) >= tail or lines[0]["left_out"] is not None), 0
    for n in range(len(lines) - 1, begin - 1, -1):
        size += len(lines[n]["text"].encode(errors="surrogatepass")) + 1
        if size > most and n < len(lines) - 1:
            begin = n + 1
            break
    if begin == 0:
        return lines
    before = lines[begin - 1]
    return [{**before, "text": "", "left_out": int(before["id"].rpartition(".")[2])}, *lines[begin:]]


def _json(data: Any) -> str:
    """Return ``data`` as JSON that is inert in HTML, whatever a job wrote: ASCII without "<". (UTF-8 could not have halves of
    surrogate pairs.)"""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _size(data: Any) -> int:
    """Return the number of bytes of ``data`` in the report."""
    return len(_json(data))
