"""What checkpoints cost a training, and a restart: Ratchet's, other packages' and the plain system calls', by turns in one run.

Jobs of 1, 2 and 4 ranks under a real service and agent save at least 400 MB of parameters and AdamW's state beside real steps.
Each row is a way to save; every round has each of them once; medians with their 95 % intervals, the first save of each apart.
``RATCHET_BENCH_PARTS`` (names of ``PARTS``, separated by commas), ``RATCHET_BENCH_MB``, ``RATCHET_BENCH_RANKS`` and
``RATCHET_BENCH_ROUNDS`` say what is measured, ``RATCHET_BENCH_DIR`` on which disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks import checkpoint_steps, checkpoint_store
from benchmarks.checkpoint_jobs import Measured, Saves, Setup, measure, service
from benchmarks.stats import Estimate, estimate, machine
from examples.demo.processes import Service

MEGABYTES: Final = 401  # what is meant by "at least 400 MB" when a manifest's header is not counted
RANKS: Final = (1, 2, 4)
ROUNDS: Final = 5
SIZES: Final = (50, 100, 200, 400, 1000)
OTHERS: Final = (
    "torch.save",
    "dcp.save",
    "dcp.async_save, thread",
    "dcp.async_save, thread, kept stager",
    "dcp.async_save, thread, staged beside",
    "dcp.async_save, process",
    "dcp.async_save, process, shared stager",
    "Lightning AsyncCheckpointIO",
    "limit: copy, write in a thread",
)
"""Of ``scripts/save_ways.py``."""
OURS: Final = ("Ratchet", "Ratchet, nothing to hide it")
SHARE: Final = "copy of the share"
WRITE: Final = "write of the share"


def main() -> None:
    parts = os.environ.get("RATCHET_BENCH_PARTS", ",".join(PARTS)).split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise SystemExit(f"RATCHET_BENCH_PARTS: no {', '.join(unknown)} here; there are {', '.join(PARTS)}")
    print(machine(), flush=True)
    folder = tempfile.TemporaryDirectory(prefix="ratchet-bench-", dir=os.environ.get("RATCHET_BENCH_DIR"))
    with folder as name, service(Path(name)) as found:
        for part in parts:
            PARTS[part](found, Path(name))


def stalls(service: Service, folder: Path) -> None:
    """Every way beside training, then Ratchet's staging that blocks; and loading what the first job saved."""
    megabytes = int(os.environ.get("RATCHET_BENCH_MB", MEGABYTES))
    for ranks in _ranks():
        setup = Setup(megabytes, ranks, _rounds(ROUNDS), ways=OTHERS, restores=_rounds(ROUNDS))
        table(
            measure(service, setup, folder),
            measure(service, Setup(megabytes, ranks, _rounds(ROUNDS), "blocking"), folder),
        )


def growth(service: Service, folder: Path) -> None:
    """Ratchet alone, over sizes and ranks."""
    print("\ngrowth: Ratchet beside the plain copy and write of the same bytes, each rank its share")
    print(
        _growth_line(
            "",
            "",
            "hidden, ms",
            "% of step",
            "not hidden, ms",
            "x copy",
            "copy, ms",
            "total, ms",
            "x write",
            "write, ms",
        )
    )
    sizes = [int(size) for size in os.environ.get("RATCHET_BENCH_SIZES", ",".join(map(str, SIZES))).split(",")]
    for size in sizes:
        for ranks in _ranks():
            growth_row(measure(service, Setup(size, ranks, min(_rounds(3), 3)), folder))


def every_step(service: Service, folder: Path) -> None:
    """The built-in task with a checkpoint at every step."""
    print("\na checkpoint at every step of bytelm, 2 ranks, beside the same job without")
    checkpoint_steps.table(service, folder, _rounds(3))


def store(service: Service, folder: Path) -> None:
    """Without a training: a rank file against the plain system calls."""
    print("\nthe store alone")
    checkpoint_store.main()


PARTS: Final[dict[str, Callable[[Service, Path], None]]] = {
    "stalls": stalls,
    "growth": growth,
    "every_step": every_step,
    "store": store,
}


def table(beside: Measured, blocking: Measured) -> None:
    """``beside``: all ways; ``blocking``: Ratchet's staging that waits for the copy."""
    setup = beside.setup
    print(
        f"\n{setup.ranks} rank{'s' * (setup.ranks > 1)}, {beside.nbytes / 1e6:.0f} MB in {beside.tensors} tensors, "
        f"medians [95 %] of {setup.rounds} rounds"
    )
    print(
        _line(
            "",
            "stall, ms",
            "x copy 1/N",
            "% of step",
            "first, ms",
            "durable, s",
            "x write 1/N",
            "extra steps, %",
            "lost, s",
        )
    )
    rows = [
        ("Ratchet, overlapped", beside, "Ratchet"),
        ("  and nothing to hide it", beside, "Ratchet, nothing to hide it"),
    ]
    rows += [
        ("Ratchet, blocking", blocking, "Ratchet"),
        ("  and no steps beside it", blocking, "Ratchet, nothing to hide it"),
    ]
    for title, measured, way in [*rows, *((name, beside, name) for name in setup.ways)]:
        _save_row(title, measured, measured.saves[way])
    for name, seconds in beside.limits.items():
        print(f"{name:<40} {estimate(seconds)} s")
    ours = [saves for measured in (beside, blocking) for way, saves in measured.saves.items() if way in OURS]
    print(
        f"a step without a save: {beside.saves[OURS[0]].step:.3f} s; handing over at the boundary takes "
        f"{_milliseconds([s for saves in ours for s in saves.cpu])} ms of CPU; stalls that Ratchet tells itself: "
        f"{_span([told for saves in ours for told in saves.told if told is not None])} ms"
    )
    if beside.loads:
        loads(beside)


def _save_row(title: str, measured: Measured, saves: Saves) -> None:
    of_step = estimate([100 * stall / saves.step for stall in saves.stall])
    extra = estimate([100 * share for share in saves.interference()]) if saves.beside else None
    print(
        _line(
            title, _milliseconds(saves.stall), f"{measured.ratio(saves.stall, SHARE).median:.2f}", _short(of_step),
            f"{1e3 * saves.first:.1f}", str(estimate(saves.total)), _short(measured.ratio(saves.total, WRITE)),
            "-" if extra is None else _short(extra), f"{statistics.median(saves.lost):.3f}",
        ),
        flush=True,
    )  # fmt: skip


def loads(measured: Measured) -> None:
    found = dict(measured.loads)
    joined, first = found.pop("joined"), found.pop("first")
    raw = found["raw read"]
    print(f"{'loading, page cache warm':<40} {'s':<24} x raw read")
    for name, seconds in found.items():
        print(
            f"{name:<40} {estimate(seconds)!s:<24} {_short(estimate([a / b for a, b in zip(seconds, raw, strict=True)]))}"
        )
    print(
        f"the attempt that resumed: {joined[0]:.3f} s until its Session was there, {first[0]:.3f} s to put the state back",
        flush=True,
    )


def growth_row(measured: Measured) -> None:
    setup, (hidden, bare) = measured.setup, (measured.saves[way] for way in OURS)
    copy, write = (statistics.median(measured.limits[name]) * 1e3 for name in (SHARE, WRITE))
    print(
        _growth_line(
            f"{measured.nbytes / 1e6:.0f} MB", f"{setup.ranks}", f"{statistics.median(hidden.stall) * 1e3:.1f}",
            f"{100 * statistics.median(hidden.stall) / hidden.step:.2f}", f"{statistics.median(bare.stall) * 1e3:.1f}",
            _short(measured.ratio(bare.stall, SHARE)), f"{copy:.1f}", f"{statistics.median(bare.total) * 1e3:.0f}",
            _short(measured.ratio(bare.total, WRITE)), f"{write:.0f}",
        ),
        flush=True,
    )  # fmt: skip


def _ranks() -> list[int]:
    return [int(number) for number in os.environ.get("RATCHET_BENCH_RANKS", ",".join(map(str, RANKS))).split(",")]


def _rounds(default: int) -> int:
    return int(os.environ.get("RATCHET_BENCH_ROUNDS", default))


def _short(found: Estimate) -> str:
    """With two decimals."""
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _milliseconds(seconds: Sequence[float]) -> str:
    return _short(estimate([1e3 * value for value in seconds]))


def _span(values: Sequence[float]) -> str:
    return f"{1e3 * min(values):.2f} to {1e3 * max(values):.2f}" if values else "-"


def _line(
    title: str, stall: str, copies: str, step: str, first: str, total: str, writes: str, extra: str, lost: str
) -> str:
    return f"{title:<40} {stall:<22} {copies:>10} {step:>22} {first:>9} {total:<22} {writes:<19} {extra:<22} {lost:>8}"


def _growth_line(size: str, ranks: str, *columns: str) -> str:
    widths = (11, 10, 15, 19, 9, 10, 19, 10)
    return f"{size:>8} {ranks:>2} " + " ".join(f"{text:>{width}}" for text, width in zip(columns, widths, strict=True))


if __name__ == "__main__":
    main()
