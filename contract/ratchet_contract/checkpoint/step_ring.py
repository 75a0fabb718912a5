"""The ring of step fingerprints: a mapped file per rank and attempt, which survives SIGKILL but not a power failure. A later
attempt compares the steps that it redoes. Layout: a header of 16 KiB with JSON and its checksum, then one record per step; step s
has number s modulo the number of records."""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

RING_RECORDS: Final = 4096
"""Number of steps that a ring holds: the newest ones. More than are usually done between two checkpoints, in 176 KiB of disk."""
RING_ATTEMPTS: Final = 64
"""Number of a job's newest attempts whose rings are read and kept."""
RING_VERSION: Final = 2
"""Version of the file's layout, of the fingerprints' content and of their hash: fingerprints of two versions are not compared."""
_MAGIC: Final = b"RATCHETF"
_HEADER_SIZE: Final = 16 * 1024
_HEADER: Final = struct.Struct("<8sIIII")
_RECORD: Final = struct.Struct("=5Q")
_FIRST_WORD: Final = _HEADER_SIZE // 8
_RECORD_WORDS: Final = _RECORD.size // 8
_FACTORS: Final = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63)
"""Large odd numbers. A sum of products takes a microsecond after a step, when the code of ``zlib.crc32`` is in no cache."""
_WORD: Final = (1 << 64) - 1
_FILE_SIZE: Final = _HEADER_SIZE + RING_RECORDS * _RECORD.size

Part = Literal["data", "generators", "parameters"]
PARTS: Final[tuple[Part, ...]] = ("data", "generators", "parameters")
"""In the order of cause and effect: where several differ after a step, the first of these is reported."""


class StepFingerprint(NamedTuple):
    """A rank's state after ``step``: 64-bit digests of sampled parameters, of the generators, and of the position in the data."""

    step: int
    parameters: int
    generators: int
    data: int

    def first_difference(self, other: StepFingerprint) -> Part | None:
        """Return the first part, in the order of ``PARTS``, in which the fingerprints differ; None if they are equal."""
        return next((part for part in PARTS if getattr(self, part) != getattr(other, part)), None)


@dataclass(frozen=True)
class RingHeader:
    """The header of a ring, which decides whether two rings may be compared. ``line``: the name of a series of attempts that
    must do the same steps. All attempts from scratch are in one series, and an exact resume is in the series of its base.
    ``facts``: the facts that the bits of the training depend on."""

    line: str
    facts: dict[str, str | int | float | bool | None] = field(default_factory=dict)


class StepRing:
    """The mapped file with the fingerprints of the newest steps of one rank in one attempt, which only this rank writes."""

    def __init__(self, path: Path, header: RingHeader) -> None:
        """Create or overwrite the file ``path``, with its disk space. Raises ``OSError``, and ``ValueError`` for a header that is
        too long."""
        self._header, text = header, _text(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # A full disk must fail here, not as a SIGBUS in the middle of a step.
            os.posix_fallocate(fd, 0, _FILE_SIZE)
            self._map = mmap.mmap(fd, _FILE_SIZE)
            self._words = memoryview(self._map).cast("Q")
        finally:
            os.close(fd)
        self._write_header(text)

    def set_line(self, line: str) -> None:
        """Write another ``line`` into the header: from now on the attempt belongs to another series. Raises ``ValueError`` for a
        header that is too long."""
        self._header = replace(self._header, line=line)
        self._write_header(_text(self._header))

    def write(self, fingerprint: StepFingerprint) -> None:
        """Store the fingerprint in the place of the one that is ``RING_RECORDS`` steps older. No system call is made."""
        step, parameters, generators, data = fingerprint
        check = _checksum(step, parameters, generators, data)
        words, place = self._words, _FIRST_WORD + step % RING_RECORDS * _RECORD_WORDS
        words[place] = step
        words[place + 1] = parameters
        words[place + 2] = generators
        words[place + 3] = data
        words[place + 4] = check

    def close(self) -> None:
        """Release the mapping; the file stays."""
        self._words.release()
        self._map.close()

    def _write_header(self, text: bytes) -> None:
        self._map[_HEADER.size : _HEADER.size + len(text)] = text
        _HEADER.pack_into(self._map, 0, _MAGIC, RING_VERSION, RING_RECORDS, len(text), zlib.crc32(text))


def read_header(path: Path) -> RingHeader | None:
    """Return the header of a ring file; None if the file is missing, unreadable, damaged or of another version."""
    return _header(_read(path, _HEADER_SIZE))


def read_ring(path: Path) -> dict[int, StepFingerprint]:
    """Return the intact fingerprints in a ring file, by step; empty if the file cannot be used."""
    data = _read(path, _FILE_SIZE + 1)
    if _header(data) is None:
        return {}
    found: dict[int, StepFingerprint] = {}
    for number, (*values, check) in enumerate(_RECORD.iter_unpack(data[_HEADER_SIZE:])):
        step = values[0]
        if step and step % RING_RECORDS == number and _checksum(*values) == check:
            found[step] = StepFingerprint(*values)
    return found


def _checksum(step: int, parameters: int, generators: int, data: int) -> int:
    """Return the 64-bit checksum of a record."""
    a, b, c, d = _FACTORS
    return (step * a + parameters * b + generators * c + data * d) & _WORD


def _text(header: RingHeader) -> bytes:
    """Return the header's JSON text. Raises ``ValueError`` if it is too long."""
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    if len(text) > _HEADER_SIZE - _HEADER.size:
        raise ValueError(f"the header of a ring of fingerprints takes {len(text)} bytes; there is room for 16 KiB")
    return text


def _read(path: Path, size: int) -> bytes:
    """Return up to ``size`` bytes of a file; empty if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # user code may have put anything there
        with os.fdopen(fd, "rb") as file:
            return file.read(size) or b""
    except OSError:
        return b""


def _header(data: bytes) -> RingHeader | None:
    """Return the header in a ring's bytes; None if they are incomplete, damaged or of another version."""
    if len(data) < _HEADER_SIZE or (len(data) > _HEADER_SIZE and len(data) != _FILE_SIZE):
        return None
    magic, version, records, length, check = _HEADER.unpack_from(data)
    text = data[_HEADER.size : _HEADER.size + length]
    if (magic, version, records) != (_MAGIC, RING_VERSION, RING_RECORDS) or zlib.crc32(text) != check:
        return None
    try:
        found: Any = json.loads(text)
        return RingHeader(str(found["line"]), dict(found["facts"]))
    except (ValueError, KeyError, TypeError):
        return None
