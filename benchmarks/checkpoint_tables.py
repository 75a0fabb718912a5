"""What ``benchmarks.checkpoint`` prints: ways to save beside each other, the targets, and growth."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.checkpoint_jobs import DIGEST, DIRECT_WRITE, SHARE, WRITE, Measured, Saves
from benchmarks.stats import Estimate, estimate

BESIDE: Final = "Ratchet"
BARE: Final = "Ratchet, nothing to hide it"
LIMIT: Final = "limit: copy, write in a thread"
DIRECT: Final = "limit: copy, O_DIRECT write in a thread"
SMALL: Final = ", beside small steps"
LOAD: Final = "Ratchet, load and verify"
COLD: Final = ", from the disk"
"""Ways, as ``scripts/save_loop.py``, ``save_ways.py`` and ``restore_ways.py`` name them."""
_BESIDE_SMALL: Final = "  beside small steps"


def stalls(beside: Measured, blocking: Measured, again: Sequence[Measured] = ()) -> None:
    """``beside``: all ways; ``blocking``: Ratchet's staging that waits for the copy; ``again``: as ``beside``, for what there is
    once in an attempt, its first save."""
    setup = beside.setup
    cores = len(os.sched_getaffinity(0))
    free = max(cores - setup.ranks, 0)
    print(
        f"\n{setup.ranks} rank{'s' * (setup.ranks > 1)} of one thread on {cores} cores, {free or 'none'} of them free; "
        f"{beside.nbytes / 1e6:.0f} MB in {beside.tensors} tensors; a step without a save: {beside.saves[BESIDE].step:.3f} s"
    )
    print(
        _line(
            "medians [95 %]", "rounds", "stall, ms", "x copy 1/N", "% of step", "first, ms", "durable, s", "x write 1/N",
            "extra steps, %", "CPU, s", "lost, s",
        )
    )  # fmt: skip
    rows = [
        ("Ratchet, overlapped", beside, BESIDE),
        (_BESIDE_SMALL, beside, f"{BESIDE}{SMALL}"),
        ("  and nothing to hide it", beside, BARE),
        ("Ratchet, blocking, no steps", blocking, BARE),
    ]
    for name in setup.ways:
        rows.append((name, beside, name))
        if (way := f"{name}{SMALL}") in beside.saves:
            rows.append((_BESIDE_SMALL, beside, way))
    for title, measured, way in rows:
        _save_row(title, measured, measured.saves[way])
    for measured in (beside, blocking):
        limits = "; ".join(f"{name} {_milliseconds(seconds)} ms" for name, seconds in measured.limits.items())
        print(f"{measured.setup.staging}: {limits}")
    ours = (beside.saves[BESIDE], beside.saves[BARE], blocking.saves[BARE])
    told = ", ".join(_milliseconds([stall for stall in saves.told if stall is not None]) for saves in ours)
    print(f"stalls as Ratchet reports them, in the order of its rows: {told} ms")
    print(
        f"handing over at the boundary: {_milliseconds([s for saves in ours for s in saves.handing_over])} ms of CPU; once per "
        f"attempt, the trial of its first step: {1e3 * beside.trial:.0f} ms"
    )
    if beside.busy_cores and free:
        print(
            f"a step while all other cores compute and touch no memory: {_short(estimate(beside.busy_cores))} of its time"
        )
    if beside.loads:
        _loads(beside)
    targets(beside, blocking, again)


def _save_row(title: str, measured: Measured, saves: Saves) -> None:
    of_step = _short(_of_step(saves, measured)) if measured.saves.get(BESIDE) else "-"
    extra = _short(_extra(saves), 0) if saves.beside else "-"
    print(
        _line(
            title, str(len(saves.stall)), _milliseconds(saves.stall), _short(measured.ratio(saves.stall, SHARE)), of_step,
            f"{1e3 * saves.first:.1f}", _short(estimate(saves.total)), _short(measured.ratio(saves.total, WRITE)), extra,
            f"{statistics.median(saves.cpu):.2f}", f"{statistics.median(saves.lost):.2f}",
        ),
        flush=True,
    )  # fmt: skip


def _loads(measured: Measured) -> None:
    found = dict(measured.loads)
    joined, first = found.pop("joined"), found.pop("first")
    print(f"{'loading, from the page cache':<42} {'s':<24} x raw read from there")
    for name, seconds in found.items():
        print(f"{name:<42} {estimate(seconds)!s:<24} {_short(_of_raw(name, measured))}")
    print(
        f"the attempt that resumed: {joined[0]:.3f} s until its Session was there, {first[0]:.3f} s to put the state back"
    )


def targets(beside: Measured, blocking: Measured, again: Sequence[Measured]) -> None:
    """Print the targets, and whether the medians reach them."""
    hidden, bare, copied = beside.saves[BESIDE], beside.saves[BARE], blocking.saves[BARE]
    print(f"{'targets':<66} {'target':>6}   seen")
    target("stall, blocking, x copy of 1/N", 1.10, blocking.ratio(copied.stall, SHARE))
    target("stall, overlapped with nothing to hide it, x copy of 1/N", 1.10, beside.ratio(bare.stall, SHARE))
    target("stall, overlapped, % of a step", 1.0, _of_step(hidden, beside))
    each = [measured.saves[BESIDE] for measured in (beside, *again)]
    first = estimate([100 * saves.first / saves.step for saves in each])
    target("stall of the attempt's first save, overlapped, % of a step", 1.0, first)
    _interference(beside, blocking, SMALL, "extra time of small steps beside it, % of the save")
    _interference(beside, blocking, "", "extra time of the training's steps beside it, % of the save")
    direct = f"; x O_DIRECT write {_short(blocking.ratio(copied.total, DIRECT_WRITE))}"
    target("durable, no steps beside it, x write + fsync of 1/N", 1.15, blocking.ratio(copied.total, WRITE), direct)
    if beside.loads:
        for place in ("", COLD):
            target(f"load and verify{place}, x raw read", 1.40, _of_raw(f"{LOAD}{place}", beside))


def _interference(beside: Measured, blocking: Measured, steps: str, what: str) -> None:
    """``steps``: which, as behind the name of a way. Beside Ratchet's share of the save stand the plain calls', which stand
    still for their copy, and where no core is free how long what nobody can do without takes: a copy, and one digest of it."""
    hidden, told = beside.saves[f"{BESIDE}{steps}"], []
    for write, way in (("write", LIMIT), ("O_DIRECT write", DIRECT)):
        if (limit := beside.saves.get(f"{way}{steps}")) is not None:
            told.append(
                f"a plain copy and {write} in a thread {_short(_extra(limit))}, {statistics.median(limit.lost):.3f} s"
            )
    lost = f"; the loop lost {statistics.median(hidden.lost):.3f} s by it; {'; '.join(told)}"
    cpu = f"; without steps a save takes {_short(estimate(beside.saves[BARE].cpu))} s of CPU"
    target(what, 5.0, _extra(hidden), lost + cpu + _without_a_core(hidden, beside, blocking))


def _without_a_core(hidden: Saves, beside: Measured, blocking: Measured) -> str:
    if beside.setup.ranks < len(os.sched_getaffinity(0)):
        return ""
    least = statistics.median(blocking.saves[BARE].stall) + statistics.median(beside.limits[DIGEST])
    share = 100 * least / statistics.median(hidden.total)
    return f"; no core is free: the stall of blocking staging, which is the copy, and one digest take {share:.0f} % of the save"


def target(what: str, limit: float, seen: Estimate, beside: str = "") -> None:
    """``beside``: what else is to be told of it."""
    verdict = "met" if seen.median <= limit else "not met"
    print(f"{what:<66} {limit:>6.2f}   {_short(seen)}: {verdict}{beside}", flush=True)


def growth_head() -> str:
    return _growth_line(
        "MB", "", "step, s", "hidden, ms", "% of step", "first, ms", "not hidden, ms", "x copy", "copy, ms", "total, ms",
        "x write", "write, ms",
    )  # fmt: skip


def growth_row(measured: Measured) -> str:
    setup, hidden, bare = measured.setup, measured.saves[BESIDE], measured.saves[BARE]
    copy, write = (statistics.median(measured.limits[name]) * 1e3 for name in (SHARE, WRITE))
    return _growth_line(
        f"{measured.nbytes / 1e6:.0f}", f"{setup.ranks}", f"{hidden.step:.3f}", f"{statistics.median(hidden.stall) * 1e3:.1f}",
        f"{_of_step(hidden, measured).median:.2f}", f"{1e3 * hidden.first:.1f}", f"{statistics.median(bare.stall) * 1e3:.1f}",
        _short(measured.ratio(bare.stall, SHARE)), f"{copy:.1f}", f"{statistics.median(bare.total) * 1e3:.0f}",
        _short(measured.ratio(bare.total, WRITE)), f"{write:.0f}",
    )  # fmt: skip


def _of_step(saves: Saves, measured: Measured) -> Estimate:
    """Stalls in percent of a step without a save."""
    return estimate([100 * stall / measured.saves[BESIDE].step for stall in saves.stall])


def _extra(saves: Saves) -> Estimate:
    """Extra time of steps, in percent of the save."""
    return estimate([100 * share for share in saves.interference()])


def _of_raw(name: str, measured: Measured) -> Estimate:
    """A way of loading to plain reading from where it read, in the same round."""
    raw = measured.loads[f"raw read{COLD if name.endswith(COLD) else ''}"]
    return estimate([a / b for a, b in zip(measured.loads[name], raw, strict=True)])


def _short(found: Estimate, digits: int = 2) -> str:
    return f"{found.median:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _milliseconds(seconds: Sequence[float]) -> str:
    return _short(estimate([1e3 * value for value in seconds]), 1)


def _line(title: str, *columns: str) -> str:
    widths = (6, 20, 20, 20, 9, 19, 19, 16, 7, 7)
    return f"{title:<40} " + " ".join(f"{text:>{width}}" for text, width in zip(columns, widths, strict=True))


def _growth_line(size: str, ranks: str, *columns: str) -> str:
    widths = (8, 10, 9, 9, 14, 19, 8, 9, 19, 9)
    return f"{size:>6} {ranks:>2} " + " ".join(f"{text:>{width}}" for text, width in zip(columns, widths, strict=True))
