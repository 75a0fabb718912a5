"""The bytes of the Python standard library's sources, as training and held-back data. A hash of a file's path determines its part
and its place, so that a cap gives a mixed sample."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ratchet_contract.errors import UserError

_NOT_IN: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_BUILD_PREFIX: Final = "_sysconfigdata"
_HELD_BACK_BELOW: Final = 26
# So that no single file makes up most of the sample (the help texts have 700 KB).
_PER_FILE: Final = 32 * 1024


@dataclass(frozen=True)
class ByteCorpus:
    """Training and held-back bytes, uint8 of shape (n,), and their files. ``digest``: hex SHA-256 over the caps and files
    used."""

    train: npt.NDArray[np.uint8]
    held_back: npt.NDArray[np.uint8]
    train_files: tuple[str, ...]
    held_back_files: tuple[str, ...]
    digest: str


def load_corpus(train_bytes: int, held_back_bytes: int, root: Path | None = None) -> ByteCorpus:
    """Return the corpus, with at most ``train_bytes`` and ``held_back_bytes``. ``root``: the sources; None: the standard library.
    Raises ``UserError`` if either part is empty."""
    base = root or Path(sysconfig.get_path("stdlib"))
    ranked = sorted((hashlib.sha256(name.encode()).digest(), name) for name in _source_files(base))
    record: list[tuple[str, int, str]] = []
    train = _join(base, [n for key, n in ranked if key[0] >= _HELD_BACK_BELOW], train_bytes, record)
    count = len(record)
    held_back = _join(base, [n for key, n in ranked if key[0] < _HELD_BACK_BELOW], held_back_bytes, record)
    if not len(train) or not len(held_back):
        raise UserError(
            f"there are no Python source files below {base}; bytelm needs an interpreter with its library's sources"
        )
    text = json.dumps([train_bytes, held_back_bytes, record], separators=(",", ":"))
    names = tuple(name for name, _, _ in record)
    return ByteCorpus(train, held_back, names[:count], names[count:], hashlib.sha256(text.encode()).hexdigest())


def _source_files(base: Path) -> list[str]:
    """The paths of the source files below ``base``, relative and with ``/``, without tests, installed packages and
    ``_sysconfigdata``."""
    names: list[str] = []
    for folder, below, files in os.walk(base):
        below[:] = [name for name in below if name not in _NOT_IN]  # skip these directories entirely
        names += (
            (Path(folder) / name).relative_to(base).as_posix()
            for name in files
            if name.endswith(".py") and not name.startswith(_BUILD_PREFIX)
        )
    return names


def _join(base: Path, names: list[str], limit: int, record: list[tuple[str, int, str]]) -> npt.NDArray[np.uint8]:
    """Return the first 32 KiB of each file and a NUL byte, joined and cut to ``limit`` bytes. Appends name, length and SHA-256 of
    each file that was read to ``record``."""
    parts: list[bytes] = []
    size = 0
    for name in names:
        if size >= limit:
            break
        content = (base / name).read_bytes()
        record.append((name, len(content), hashlib.sha256(content).hexdigest()))
        parts.append(content[:_PER_FILE] + b"\0")
        size += len(parts[-1])
    return np.frombuffer(b"".join(parts)[:limit], dtype=np.uint8)
