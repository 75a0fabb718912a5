"""How much a rank sends per epoch under PowerSGD, beside the figures of its paper (Vogels et al., arXiv 1905.13727).

Bytes per step are counted by the hook's own summary, in a step of a model of the paper's shapes on random data; a table of shapes
shows what they consist of, from the P and Q that the hook's state holds, and both counts must agree. Steps per epoch are those of
the paper's 16 workers. Nothing is trained and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from benchmarks.processes import group_result
from examples.demo.processes import DemoError

RANKS: Final = 2
POWERSGD_RANKS: Final = (1, 2, 4)
_MIB: Final = 2**20
_ELEMENT: Final = 4  # bytes


@dataclass(frozen=True)
class Published:
    """``steps``: per epoch. ``megabytes`` (MiB) per epoch without compression; then by PowerSGD's rank, with the rate."""

    title: str
    steps: int
    why: str
    megabytes: int
    by_rank: Mapping[int, tuple[int, int]]


PAPER: Final = {
    "resnet18": Published(
        "ResNet-18, CIFAR-10",
        24,
        "50000 images / 16 workers = 3125 each, in batches of 128; the incomplete one is dropped",
        1023,
        {1: (4, 243), 2: (8, 136), 4: (14, 72)},
    ),
    "lstm": Published(
        "LSTM of 3 layers, WikiText-2",
        70,
        "16 workers with 64 sequences of 30 tokens each; 70 is what 7730 / 110.4 MB per step comes to, or 2.15 million tokens",
        7730,
        {1: (25, 310), 2: (38, 203), 4: (64, 120)},
    ),
}


def main() -> None:
    for model in PAPER:
        table(model)
    print(
        "MiB: 2**20 bytes, which is what the paper calls MB. Steps before PowerSGD's start, at least two of a job, send as "
        "allreduce does.\nCounted is what a rank hands over; of that, a ring of n ranks puts 2 (n - 1) / n on the wire."
    )


def table(model: str, low_ranks: Sequence[int] = POWERSGD_RANKS, ranks: int = RANKS) -> None:
    """Count one model, and print both tables."""
    paper = PAPER[model]
    arguments = {"model": model, "powersgd-ranks": ",".join(map(str, low_ranks))}
    found = group_result("benchmarks.scripts.paper", ranks, arguments)
    whole, compressed = found["allreduce"], {low: found[str(low)] for low in low_ranks}
    for name, counted in found.items():
        if _by_shapes(counted) != counted["summary"]["bytes_after"]:
            raise DemoError(
                f"{model}, {name}: the summary says {counted['summary']['bytes_after']} bytes, its shapes {_by_shapes(counted)}"
            )
    parameters = sum(prod(t["shape"]) for t in whole["tensors"].values())
    print(f"{paper.title}: {parameters} parameters, {paper.steps} steps per epoch ({paper.why})")
    print(_line("", "bytes per step", "MB per epoch", "MiB per epoch", "published", "rate", "published"))
    _row("allreduce", whole, whole, paper.steps, str(paper.megabytes), "")
    for low, counted in compressed.items():
        megabytes, rate = paper.by_rank[low]
        _row(f"powerSGD rank {low}", counted, whole, paper.steps, str(megabytes), f"{rate}x")
    _shapes(whole, compressed)


def _row(
    name: str, counted: Mapping[str, Any], whole: Mapping[str, Any], steps: int, megabytes: str, rate: str
) -> None:
    sent = counted["summary"]["bytes_after"]
    ours = f"{whole['summary']['bytes_after'] / sent:.1f}x"
    epoch = sent * steps
    print(_line(name, str(sent), f"{epoch / 1e6:.2f}", f"{epoch / _MIB:.2f}", megabytes, ours, rate))


def _line(title: str, sent: str, mb: str, mib: str, published: str, rate: str, published_rate: str) -> str:
    return f"  {title:<18} {sent:>15} {mb:>14} {mib:>15} {published:>11} {rate:>9} {published_rate:>11}"


def _by_shapes(counted: Mapping[str, Any]) -> int:
    return _ELEMENT * sum(_elements(tensor) for tensor in counted["tensors"].values())


def _elements(tensor: Mapping[str, Any]) -> int:
    return int(tensor["factors"] or prod(tensor["shape"]))


def _shapes(whole: Mapping[str, Any], compressed: Mapping[int, Mapping[str, Any]]) -> None:
    """Elements that are sent in a step, by shape: what a matrix and its P and Q come to, and what is not compressed."""
    groups: dict[str, list[str]] = {}
    for name, tensor in whole["tensors"].items():
        shape = tensor["shape"]
        label = f"{shape[0]} x {prod(shape[1:])}" if len(shape) > 1 else "biases and norms"
        groups.setdefault(label, []).append(name)
    columns = "".join(f"{f'rank {low}':>12}" for low in compressed)
    print(f"  {'elements per step':<18} {'tensors':>8} {'allreduce':>12}{columns}   as they are")
    for label, names in sorted(groups.items(), key=lambda item: -_sum(whole, item[1])):
        sums = "".join(f"{_sum(counted, names):>12}" for counted in compressed.values())
        plain = [low for low, c in compressed.items() if not all(c["tensors"][name]["factors"] for name in names)]
        note = "at every rank" if len(plain) == len(compressed) else ", ".join(f"at rank {low}" for low in plain)
        print(f"  {label:<18} {len(names):>8} {_sum(whole, names):>12}{sums}   {note}".rstrip())


def _sum(counted: Mapping[str, Any], names: Sequence[str]) -> int:
    return sum(_elements(counted["tensors"][name]) for name in names)


if __name__ == "__main__":
    main()
