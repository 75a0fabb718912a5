"""What a step costs under each of Ratchet's hooks beside the same step under torch's own, in a hand-written loop, at two sizes.

Two ranks over gloo, without a service and an agent: the hooks alone. The ratio of a pair of blocks that follow each other is free
of whatever slows the machine for longer; the median over the pairs comes with its 95 % interval, and torch's hook against torch's
hook shows what the method itself sees. ``RATCHET_BENCH_HOOKS``, ``RATCHET_BENCH_SIZES`` (``small,large``),
``RATCHET_BENCH_PAIRS`` and ``RATCHET_BENCH_BLOCK`` (steps) set what is measured.
"""

from __future__ import annotations

import os
import statistics
from typing import Final

from benchmarks.processes import group_result
from benchmarks.scripts.hooks import SPECS
from benchmarks.stats import estimate, machine
from benchmarks.step import Size
from ratchet_hooks.specs.registry import HOOKS

RANKS: Final = 2
SIZES: Final = {"small": Size(512, 4, 32, 10, 40), "large": Size(2048, 6, 32, 2, 24)}


def main() -> None:
    available = [name for name in SPECS if HOOKS[name.partition(" + ")[0]].available]
    hooks = os.environ.get("RATCHET_BENCH_HOOKS", ",".join(available)).split(",")
    sizes = os.environ.get("RATCHET_BENCH_SIZES", ",".join(SIZES)).split(",")
    print(machine())
    print(_line("", "ratio of a pair [95 %]", "of CPU time [95 %]", "control [95 %]", "us per step", "torch's"))
    for size in sizes:
        for hook in hooks:
            _row(size, hook, _size(SIZES[size]))
    print("ratio: Ratchet's hook / torch's own. control: torch's own / torch's own.")


def _size(size: Size) -> Size:
    pairs, block = (
        int(os.environ.get(f"RATCHET_BENCH_{key.upper()}", getattr(size, key))) for key in ("pairs", "block")
    )
    return Size(size.width, size.depth, size.batch, block, pairs)


def _row(name: str, hook: str, size: Size) -> None:
    result = group_result("benchmarks.scripts.hooks", RANKS, {"hook": hook, **vars(size)})
    wall, cpu = ({loop: [b[i] for b in blocks] for loop, blocks in result["blocks"].items()} for i in (0, 1))
    each = [f"{statistics.median(wall[loop]) / size.block * 1e6:.0f}" for loop in ("managed", "stock")]
    ratios = (_ratios(wall, "managed"), _ratios(cpu, "managed"), _ratios(wall, "control"))
    title = f"{name} {hook} ({result['parameters'] / 1e6:.1f} M)"
    print(_line(title, *(str(estimate(values)) for values in ratios), *each), flush=True)


def _ratios(seconds: dict[str, list[float]], loop: str) -> list[float]:
    return [a / b for a, b in zip(seconds[loop], seconds["stock"], strict=True)]


def _line(title: str, ratio: str, cpu: str, control: str, ours: str, torchs: str) -> str:
    return f"{title:<48} {ratio:<22} {cpu:<22} {control:<22} {ours:>11} {torchs:>9}"


if __name__ == "__main__":
    main()
