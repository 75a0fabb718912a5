"""When a rank's log had which size: the index beside it that gives lines their times.

16 bytes per record, both numbers unsigned and little-endian: the log's size in bytes, and when the agent saw it, in microseconds
since 1970. Neither ever decreases. The agent looks once a second and adds a record when the log has grown by ``SPACING`` bytes,
or has grown at all and the last record is ``SECONDS`` old. A line is given the time of the first record that reaches its end: it
was written by then, and at most ``SECONDS`` and one look earlier. What lies behind the last record has no time (yet).

No line numbers: a line's place is its offset, which stays true when the middle of a log is left out.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime
from typing import Final

RECORD: Final = struct.Struct("<QQ")
SPACING: Final = 64 * 1024
SECONDS: Final = 5.0
_MICRO: Final = 1_000_000
_LAST: Final = 253_402_300_799 * _MICRO  # the year 9999


class LogTimes:
    """What the index of a log of ``size`` bytes says; records beyond that size (the log was cut) do not count."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        count = range(len(data) // RECORD.size)  # a torn record at the end is none
        self._records = count[: bisect_right(count, size, key=self._offset)]
        self._found: tuple[int, int, datetime | None] = (0, 0, None)

    def at(self, end: int) -> datetime | None:
        """When the line that ends at byte ``end`` (at least 1) was there."""
        first, last, when = self._found
        if not first < end <= last:
            place = bisect_left(self._records, end, key=self._offset)
            if place == len(self._records):
                return None
            when = _time(self._number(place, 1))
            self._found = (self._offset(place - 1) if place else 0), self._offset(place), when
        return when

    def before(self, when: datetime) -> int:
        """Bytes of the log that were there before ``when``."""
        place = bisect_left(self._records, int(when.timestamp() * _MICRO), key=lambda record: self._number(record, 1))
        return self._offset(place - 1) if place else 0

    def _offset(self, record: int) -> int:
        return self._number(record, 0)

    def _number(self, record: int, which: int) -> int:
        number: int = RECORD.unpack_from(self._data, record * RECORD.size)[which]
        return number


def _time(micros: int) -> datetime | None:
    return datetime.fromtimestamp(micros / _MICRO, UTC) if micros <= _LAST else None
