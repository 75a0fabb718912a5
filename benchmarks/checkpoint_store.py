"""What a checkpoint costs beyond the bytes themselves: save and load against the plain system calls.

One rank, tensors like those of a small transformer with AdamW. Every operation runs once per round, rounds are interleaved,
medians with their 95 % intervals are shown. The first column to read is the ratio: seconds depend on the machine and on who
else uses it.
``RATCHET_BENCH_MB`` (default 200) and ``RATCHET_BENCH_ROUNDS`` (default 7) set the size.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.checkpoint_tables import target
from benchmarks.stats import Estimate, estimate, machine
from ratchet_contract.checkpoint.manifest import FileEntry, HookRecord, Manifest, TensorEntry
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import checkpoint_dir_name
from ratchet_store.format.manifest_file import ManifestWriter
from ratchet_store.read.checkpoint_reader import load
from ratchet_store.write.rank_file import Piece, RankWriter
from ratchet_worker.state.live_memory import SafeReader

CHUNK = 4 << 20
TENSORS = 396
WRITE, SAVE = "raw write + fsync", "Ratchet save (XXH3, fsync, manifest)"
READ, LOAD = "raw read", "Ratchet load + verify"


def main() -> None:
    megabytes = int(os.environ.get("RATCHET_BENCH_MB", "200"))
    rounds = int(os.environ.get("RATCHET_BENCH_ROUNDS", "7"))
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-", dir=os.environ.get("RATCHET_BENCH_DIR")) as folder:
        bench = _Bench(Path(folder), megabytes * 1_000_000)
        times: dict[str, list[float]] = {name: [] for name in bench.operations}
        for _ in range(rounds):
            for name, operation in bench.operations.items():
                times[name].append(operation())
        _print(bench, {name: estimate(found) for name, found in times.items()}, rounds)
        for what, limit, ours, plain in (
            ("store alone: save, x write + fsync", 1.15, SAVE, WRITE),
            ("store alone: load and verify, x raw read", 1.40, LOAD, READ),
        ):
            target(what, limit, estimate([a / b for a, b in zip(times[ours], times[plain], strict=True)]))


class _Bench:
    """The data, and one timed operation per row of the table; each returns its seconds."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.reader = folder, SafeReader()
        self.numbers = _sizes(nbytes)
        self.nbytes = sum(self.numbers)
        memory = mmap.mmap(-1, self.nbytes)  # from a page's beginning on, as a training's copies lie
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.source = memoryview(memory)
        some = os.urandom(1 << 20)
        for offset in range(0, self.nbytes, len(some)):
            self.source[offset : offset + len(some)] = some[: self.nbytes - offset]
        self.target = memoryview(bytearray(b"\1" * self.nbytes))
        self.raw = folder / "raw.bin"
        self.manifest: Manifest | None = None
        self.operations: dict[str, Callable[[], float]] = {
            "memory copy": self.copy,
            "memory copy beside a training": self.copy_beside_a_training,
            WRITE: self.raw_write,
            SAVE: self.save,
            **self._safetensors(),
            READ: self.raw_read,
            LOAD: self.load,
        }

    def copy(self) -> float:
        begin = time.perf_counter()
        self.target[:] = self.source
        return time.perf_counter() - begin

    def copy_beside_a_training(self) -> float:
        """Tensor by tensor, as a saving thread reads memory that user code may free meanwhile."""
        target, source = (np.frombuffer(memory, np.uint8) for memory in (self.target, self.source))
        begin, offset = time.perf_counter(), 0
        for number in self.numbers:
            self.reader.copy(source[offset : offset + number], target[offset : offset + number])
            offset += number
        return time.perf_counter() - begin

    def raw_write(self) -> float:
        self.raw.unlink(missing_ok=True)
        begin = time.perf_counter()
        fd = os.open(self.raw, os.O_WRONLY | os.O_CREAT)
        for offset in range(0, self.nbytes, CHUNK):
            os.write(fd, self.source[offset : offset + CHUNK])
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - begin

    def save(self) -> float:
        directory = self.folder / "checkpoints" / checkpoint_dir_name(1, 1)
        shutil.rmtree(directory, ignore_errors=True)
        begin = time.perf_counter()
        pieces = [Piece(f"shared/model/{i}", "F32", (size // 4,), 0, size) for i, size in enumerate(self.numbers)]
        writer, written = RankWriter(0, 1), threading.Event()
        helper = threading.Thread(target=_help, args=(writer, written))  # as a rank's saving thread does
        helper.start()
        file, tensors, *_ = writer.write(directory, pieces, self.source, {})
        written.set()
        helper.join()
        self.manifest = ManifestWriter().commit(directory, _manifest(file, list(tensors)))
        return time.perf_counter() - begin

    def raw_read(self) -> float:
        begin = time.perf_counter()
        fd = os.open(self.raw, os.O_RDONLY)
        for offset in range(0, self.nbytes, CHUNK):
            os.readv(fd, [self.target[offset : offset + CHUNK]])
        os.close(fd)
        return time.perf_counter() - begin

    def load(self) -> float:
        """Straight into memory that is already there, as into live tensors."""
        assert self.manifest is not None
        first = min(entry.offset for entry in self.manifest.tensors)

        def into(entry: TensorEntry) -> memoryview:
            return self.target[entry.offset - first : entry.offset - first + entry.nbytes]

        for file in self.manifest.files:  # saves go past the page cache, and the plain read beside it is from there
            (self.folder / "checkpoints" / self.manifest.id / file.name).read_bytes()
        begin = time.perf_counter()
        load(self.folder / "checkpoints" / self.manifest.id, self.manifest, lambda _: True, into)
        seconds = time.perf_counter() - begin
        assert self.target == self.source, "what was loaded is not what was saved"
        return seconds

    def _safetensors(self) -> dict[str, Callable[[], float]]:
        """The safetensors library with fsync; no checksum, no manifest. Absent where it is not installed."""
        try:
            import numpy as np
            from safetensors.numpy import save_file
        except ImportError:
            return {}
        tensors, offset = {}, 0
        for index, number in enumerate(self.numbers):
            tensors[str(index)] = np.frombuffer(self.source[offset : offset + number], np.float32)
            offset += number
        path = self.folder / "library.safetensors"

        def save() -> float:
            path.unlink(missing_ok=True)
            begin = time.perf_counter()
            save_file(tensors, path)
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            return time.perf_counter() - begin

        return {"safetensors save_file + fsync": save}


def _help(writer: RankWriter, written: threading.Event) -> None:
    while not written.wait(0.001):
        writer.help()


def _sizes(nbytes: int) -> list[int]:
    """Bytes of each tensor: a third of them large matrices, the rest vectors; multiples of 4."""
    small = [4 * 768] * (TENSORS * 2 // 3)
    large = TENSORS - len(small)
    return small + [max((nbytes - sum(small)) // large // 4 * 4, 4)] * large


def _manifest(file: FileEntry, tensors: list[TensorEntry]) -> Manifest:
    hook = HookRecord(name="allreduce", parameters={}, state_version=1)
    return Manifest(
        job_id="bench", step=1, attempt=1, parent=Base(), world_size=1, created="now", reason="schedule", spec_digest="",
        replicas="equal", hook=hook, files=[file], tensors=tensors,
    )  # fmt: skip


def _print(bench: _Bench, found: dict[str, Estimate], rounds: int) -> None:
    print(machine())
    print(f"{bench.nbytes / 1e6:.0f} MB in {len(bench.numbers)} tensors, medians [95 %] of {rounds} interleaved rounds")
    print(f"{'operation':<38} {'s':<24} {'GB/s':>6} {'x copy':>7} {'x raw':>6}")
    for name, seconds in found.items():
        raw = READ if name in (READ, LOAD) else WRITE
        against = "" if "memory copy" in name else f"{seconds.median / found[raw].median:6.2f}"
        rate, copies = bench.nbytes / seconds.median / 1e9, seconds.median / found["memory copy"].median
        print(f"{name:<38} {seconds!s:<24} {rate:6.2f} {copies:7.2f} {against:>6}")


if __name__ == "__main__":
    main()
