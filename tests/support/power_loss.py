"""A model of what a disk may hold after the power went, for every instant of a run.

``Recorder`` notes the system calls that change files below a directory while they are really carried out. ``disk_states``
replays the first k of them against a strict reading of POSIX: a file's bytes are only sure after ``fsync`` of the file, a name
only after ``fsync`` of its directory. Whatever is not sure may be there or not: each state is one of the possible outcomes.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Op = tuple[Any, ...]
CALLS = ("open", "close", "write", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir")


class Recorder:
    """Records below ``root``; ``marks`` are (number of operations so far, label) set by the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self.marks: list[tuple[int, Any]] = []
        self._fds: dict[int, str] = {}

    def mark(self, label: Any) -> None:
        self.marks.append((len(self.ops), label))

    def _path(self, path: Any) -> str | None:
        absolute = Path(path)
        return str(absolute.relative_to(self.root)) if absolute.is_relative_to(self.root) else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in CALLS}

        def open_(path: Any, flags: int, *rest: Any) -> int:
            fd: int = real["open"](path, flags, *rest)
            name = self._path(path)
            if name is not None:
                self._fds[fd] = name
                if flags & os.O_CREAT:
                    self.ops.append(("create", name))
            return fd

        def close(fd: int) -> None:
            self._fds.pop(fd, None)
            real["close"](fd)

        def write(fd: int, data: Any) -> int:
            count: int = real["write"](fd, data)
            if fd in self._fds:
                self.ops.append(("write", self._fds[fd], None, bytes(data[:count])))
            return count

        def pwrite(fd: int, data: Any, offset: int) -> int:
            count: int = real["pwrite"](fd, data, offset)
            self.ops.append(("write", self._fds[fd], offset, bytes(data[:count])))
            return count

        def fsync(fd: int) -> None:
            real["fsync"](fd)
            if fd in self._fds:
                self.ops.append(("fsync", self._fds[fd]))

        def on_names(call: str) -> Any:
            def wrapper(*arguments: Any, **keywords: Any) -> None:
                real[call](*arguments, **keywords)
                paths = arguments[:2] if call == "rename" else arguments[:1]
                names = [self._path(path) for path in paths]
                if None not in names:
                    self.ops.append((call, *names))

            return wrapper

        patches = {"open": open_, "close": close, "write": write, "pwrite": pwrite, "fsync": fsync}
        patches |= {call: on_names(call) for call in ("rename", "unlink", "rmdir", "mkdir")}
        with mock.patch.multiple(os, **patches):
            yield


class _Inode:
    """A file (bytes) or a directory (names); ``sure`` is what survives any power loss."""

    def __init__(self, directory: bool) -> None:
        self.now: Any = {} if directory else b""
        self.sure: Any = {} if directory else b""
        self.directory = directory


class _Disk:
    """Directory changes that are not sure are kept in order in ``pending``: lists of (directory, name, inode or None)."""

    def __init__(self) -> None:
        self.root = _Inode(True)
        self.pending: list[list[tuple[_Inode, str, _Inode | None]]] = []

    def find(self, path: str) -> _Inode:
        inode = self.root
        for part in Path(path).parts:
            inode = inode.now[part]
        return inode

    def parent(self, path: str) -> tuple[_Inode, str]:
        return self.find(str(Path(path).parent)), Path(path).name

    def change(self, *changes: tuple[_Inode, str, _Inode | None]) -> None:
        for directory, name, inode in changes:
            _put(directory.now, name, inode)
        self.pending.append(list(changes))

    def apply(self, op: Op) -> None:
        call, path = op[0], op[1]
        if call == "write":
            inode, offset, data = self.find(path), op[2], op[3]
            before = inode.now.ljust(len(inode.now) if offset is None else offset, b"\0")  # None: behind the last
            at = len(before) if offset is None else offset
            inode.now = before[:at] + data + before[at + len(data) :]
        elif call == "fsync":
            self._fsync(self.find(path))
        elif call == "create":
            directory, name = self.parent(path)
            if name in directory.now:
                directory.now[name].now = b""
            else:
                self.change((directory, name, _Inode(False)))
        elif call == "mkdir":
            self.change((*self.parent(path), _Inode(True)))
        elif call == "rename":
            source, name = self.parent(path)
            self.change((source, name, None), (*self.parent(op[2]), source.now[name]))
        else:
            self.change((*self.parent(path), None))

    def _fsync(self, inode: _Inode) -> None:
        if not inode.directory:
            inode.sure = inode.now
            return
        for changes in [c for c in self.pending if any(directory is inode for directory, _, _ in c)]:
            self.settle(changes)
            self.pending.remove(changes)

    def settle(self, changes: list[tuple[_Inode, str, _Inode | None]]) -> None:
        for directory, name, inode in changes:
            _put(directory.sure, name, inode)


def _put(names: dict[str, _Inode], name: str, inode: _Inode | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def _content(inode: _Inode, how: str, source: random.Random) -> bytes:
    now, sure = bytes(inode.now), bytes(inode.sure)
    how = source.choice(["now", "sure", "zeros"]) if how == "random" else how
    return {"now": now, "sure": sure, "zeros": sure + bytes(max(len(now) - len(sure), 0))}[how]


def _write(inode: _Inode, target: Path, how: str, source: random.Random) -> None:
    if not inode.directory:
        target.write_bytes(_content(inode, how, source))
        return
    target.mkdir()
    for name, child in inode.sure.items():
        _write(child, target / name, how, source)


def disk_states(ops: list[Op], count: int, target: Path, seeds: int = 3) -> Iterator[str]:
    """Lay out, one after another under ``target`` (removed by the caller between two), what may be there after the first
    ``count`` operations; yields the name of each outcome."""
    disk = _Disk()
    for op in ops[:count]:
        disk.apply(op)
    outcomes = [("all names", how) for how in ("now", "sure", "zeros")] + [
        ("sure names", how) for how in ("now", "sure")
    ]
    outcomes += [("random names", f"random {seed}") for seed in range(seeds)]
    for names, how in outcomes:
        variant = copy.deepcopy(disk)
        source = random.Random(f"{count}/{how}")
        for changes in variant.pending:
            if names == "all names" or (names == "random names" and source.random() < 0.5):
                variant.settle(changes)
        _write(variant.root, target, how.split()[0], source)
        yield f"after {count} operations, last {ops[count - 1][:2] if count else None}: {names}, {how} bytes"
