"""The sizes of a rank's log over time: an index file, from which the log's lines get their times.

A record has 16 bytes, unsigned and little-endian: the log's size in bytes, and the time in microseconds since 1970. Neither ever
decreases. A line gets the time of the first record that reaches its end.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime
from typing import Final

RECORD: Final = struct.Struct("<QQ")
SPACING_BYTES: Final = 64 * 1024
SPACING_SECONDS: Final = 5.0
_MICRO: Final = 1_000_000
_LAST: Final = 253_402_300_799 * _MICRO  # the end of the year 9999


class LogTimes:
    """The times of the lines in a log of ``size`` bytes, from its index ``data``."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        count = range(len(data) // RECORD.size)  # a torn record at the end does not count
        # Records beyond the size do not count: the log was cut.
        self._records = count[: bisect_right(count, size, key=self._offset)]
        self._cached: tuple[int, int, datetime | None] = (0, 0, None)

    def time_of(self, end: int) -> datetime | None:
        """Return the time by which the line that ends at byte ``end`` had been written; None if unknown."""
        first, last, when = self._cached
        if not first < end <= last:
            place = bisect_left(self._records, end, key=self._offset)
            if place == len(self._records):
                return None
            when = _time(self._field(place, 1))
            self._cached = (self._offset(place - 1) if place else 0), self._offset(place), when
        return when

    def size_before(self, when: datetime) -> int:
        """Return the number of bytes that the log certainly had before ``when``; 0 if no record is older."""
        place = bisect_left(self._records, int(when.timestamp() * _MICRO), key=lambda record: self._field(record, 1))
        return self._offset(place - 1) if place else 0

    def _offset(self, record: int) -> int:
        """Return the size of the log that a record states. ``record``: its number, from 0."""
        return self._field(record, 0)

    def _field(self, record: int, index: int) -> int:
        """Return the size (index 0) or the time (index 1) that a record states. ``record``: its number, from 0."""
        number: int = RECORD.unpack_from(self._data, record * RECORD.size)[index]
        return number


def _time(micros: int) -> datetime | None:
    """Return microseconds since 1970 as a time; None after the year 9999."""
    return datetime.fromtimestamp(micros / _MICRO, UTC) if micros <= _LAST else None
