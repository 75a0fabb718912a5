"""What a step costs under each hook on a slow network: two hosts, one rank each, on a link of 1 Gbit/s and of 100 Mbit/s.

The hosts are network namespaces of this machine (see ``namespaces``). Ratchet's ranks are the worker's own, started with what an
agent gives them, and run ``scripts/network.py``, a Session; only the agent is missing, which serves one machine so far. torch's
run ``scripts/network_by_hand.py``, DDP under torch's own hook, with the same variables and settings. There is a group of ranks
per hook of either, all alive at once: they take turns on the link, so that every round has a block of steps of each, those that
are compared one after the other, and a ratio is taken between blocks of one round. ``RATCHET_BENCH_HOOKS`` (names as in the
table, separated by commas) and ``RATCHET_BENCH_ROUNDS`` set what is measured.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.namespaces import Link, NoNamespaces
from benchmarks.network_groups import WARM_UP, Group, Model, Training
from benchmarks.scripts.stock import ONE_BUCKET
from benchmarks.stats import estimate, machine
from ratchet_hooks.summary import HookSummary

RATES: Final = {"1 Gbit/s": 1_000_000_000, "100 Mbit/s": 100_000_000}
ROUNDS: Final = 8
MODEL: Final = Model(1024, 8, 32)  # 33.6 MB of gradients
_BLOCK_SECONDS: Final = 0.4
_LONGEST_BLOCK: Final = 20  # steps
_PORTS_FROM: Final = 20_000  # in a network of our own


@dataclass(frozen=True)
class Case:
    """A line of the table: Ratchet's training, and torch's that it is compared with, if there is one."""

    ours: Training
    torchs: Training | None


def same(name: str) -> Case:
    """A hook that torch has, under the same name."""
    return Case(Training({"name": name}), Training({"name": name}, by_hand=True))


def low_rank(rank: int, *, one_bucket: bool = False, name: str = "powerSGD") -> Case:
    """torch's has one bucket, or waits for each inside its hook."""
    hook: dict[str, Any] = {"name": name, "matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    cap = ONE_BUCKET if one_bucket else None
    torchs = Training({**hook, "waits": not one_bucket}, by_hand=True, bucket_cap_mb=cap)
    return Case(Training(hook, bucket_cap_mb=cap), torchs)


ALLREDUCE: Final = "allreduce"
CASES: Final[dict[str, Case]] = {
    ALLREDUCE: same("allreduce"),
    "allreduce / DDP without a hook": Case(same("allreduce").ours, Training({}, by_hand=True)),
    "fp16_compress": same("fp16_compress"),
    "bf16_compress": same("bf16_compress"),
    "quantization_pertensor": Case(Training({"name": "quantization_pertensor"}), None),
    "powerSGD rank 1": low_rank(1),
    "powerSGD rank 1 in one bucket": low_rank(1, one_bucket=True),
    "powerSGD rank 4": low_rank(4),
    "powerSGD rank 4 in one bucket": low_rank(4, one_bucket=True),
    "batched_powerSGD rank 1": low_rank(1, name="batched_powerSGD"),
    "noop": same("noop"),
}


@dataclass(frozen=True)
class Measured:
    """Of one group at one rate, per step: seconds in each block, CPU seconds likewise, bytes that rank 0 sends as its interface
    counts them."""

    seconds: list[float]
    cpu: list[float]
    wire: float


def main() -> None:
    wanted = os.environ.get("RATCHET_BENCH_HOOKS", ",".join(CASES)).split(",")
    if unknown := sorted(set(wanted) - set(CASES)):
        raise SystemExit(f"RATCHET_BENCH_HOOKS: no {', '.join(unknown)} here; there are {', '.join(CASES)}")
    print(machine())
    rounds = int(os.environ.get("RATCHET_BENCH_ROUNDS", ROUNDS))
    try:
        tables({name: case for name, case in CASES.items() if name in (*wanted, ALLREDUCE)}, MODEL, RATES, rounds)
    except NoNamespaces as error:
        raise SystemExit(f"network: not measured. {error}") from error


def tables(cases: Mapping[str, Case], model: Model, rates: Mapping[str, int], rounds: int) -> None:
    """Start all groups, measure at each rate, print a table for each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-bench-")))
        link = stack.enter_context(Link())
        groups: dict[str, Group] = {}  # by training: one that is compared twice has one
        for training in (training for case in cases.values() for training in (case.ours, case.torchs) if training):
            if repr(training) not in groups:
                home = folder / str(len(groups))
                groups[repr(training)] = Group(link, home, training, model, _PORTS_FROM + len(groups))
                stack.callback(groups[repr(training)].kill)
        for group in groups.values():
            group.ready()
            group.turn(WARM_UP)
        for rate, bits in rates.items():
            link.limit(bits)
            measured = measure(link, groups, rounds)
            summaries = {name: groups[repr(case.ours)].summary() for name, case in cases.items()}
            _table(rate, bits, cases, measured, summaries)
    print(
        "ms: of Ratchet's step; torch's: under torch's own hook in a loop written by hand, PowerSGD with a wait for each bucket\n"
        "where there are several. ratio: a block of steps / torch's in the same round; of CPU time: of both ranks' processors.\n"
        f"to {ALLREDUCE}: a block / Ratchet's {ALLREDUCE} in the same round. sent: bytes per step and rank, as the hook's own\n"
        "summary counts them; wire: as the interface does. limit: `sent` at the rate of the link, in both directions at once.\n"
        "noop does not communicate: its time is that of computing alone."
    )


def measure(link: Link, groups: Mapping[str, Group], rounds: int) -> dict[str, Measured]:
    """``rounds`` blocks of each group, by turns."""
    blocks: dict[str, int] = {}
    before: dict[str, int] = {}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
    wire = dict.fromkeys(groups, 0)
    for name, group in groups.items():
        blocks[name] = min(_LONGEST_BLOCK, max(1, math.ceil(_BLOCK_SECONDS / group.turn(1)[0])))
        before[name] = 0 if blocks[name] == 1 else 1  # a step of a second or more hardly feels what this is for
    for number in range(rounds):
        for name in list(groups)[:: 1 if number % 2 == 0 else -1]:
            sent = link.sent(0)
            seconds, cpu = groups[name].turn(blocks[name], before=before[name])
            took[name].append((seconds / blocks[name], cpu / blocks[name]))
            wire[name] += link.sent(0) - sent
    return {
        name: Measured(*map(list, zip(*took[name], strict=True)), wire[name] / (rounds * (blocks[name] + before[name])))
        for name in groups
    }


def _table(
    rate: str,
    bits: int,
    cases: Mapping[str, Case],
    measured: Mapping[str, Measured],
    summaries: Mapping[str, HookSummary],
) -> None:
    print(
        _line(
            rate, "ms per step [95 %]", "torch's [95 %]", "ratio [95 %]", "of CPU time [95 %]", f"to {ALLREDUCE} [95 %]",
            "sent", "wire", "limit", "time / limit",
        )
    )  # fmt: skip
    base = measured[repr(cases[ALLREDUCE].ours)].seconds
    for name, case in cases.items():
        ours, torchs = measured[repr(case.ours)], measured[repr(case.torchs)] if case.torchs else None
        sent = summaries[name].bytes_after or 0
        limit = sent * 8 / bits * 1e3
        share = f"{estimate(ours.seconds).median * 1e3 / limit:.2f}" if limit else "-"
        against = [
            _ratio(ours.seconds, torchs and torchs.seconds),
            _ratio(ours.cpu, torchs and torchs.cpu),
            _ratio(ours.seconds, base),
        ]
        figures = (f"{sent / 1e6:.3f} MB", f"{ours.wire / 1e6:.3f} MB", f"{limit:.1f} ms", share)
        print(_line(f"  {name}", _ms(ours), _ms(torchs), *against, *figures), flush=True)


def _ms(of: Measured | None) -> str:
    if of is None:
        return "-"
    found = estimate([1e3 * value for value in of.seconds])
    return f"{found.median:.1f} [{found.low:.1f}, {found.high:.1f}]"


def _ratio(ours: Sequence[float], others: Sequence[float] | None) -> str:
    return "-" if others is None else str(estimate([a / b for a, b in zip(ours, others, strict=True)]))


def _line(title: str, *columns: str) -> str:
    *wide, sent, wire, limit, share = columns
    return f"{title:<34} {' '.join(f'{text:<24}' for text in wide)} {sent:>10} {wire:>10} {limit:>10} {share:>13}"


if __name__ == "__main__":
    main()
