"""``python -m tests.gpu``: see the package, and benchmarks/README.md. Standard library only."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu import table
from tests.gpu.packages import OBSTACLE
from tests.gpu.rows import ROWS
from tests.gpu.runner import ROOT, Result, run_rows
from tests.gpu.search_path import NoWheels, variables
from tests.gpu.work import Size

_OLDEST_PYTHON = (3, 11)
_INVENTORY_SECONDS = 90.0
_RESERVE_SECONDS = 10.0  # of the time given: for the last row's end and this program's own


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    given = _parser().parse_args(arguments)
    if sys.version_info[:2] < _OLDEST_PYTHON:
        have, need = (".".join(map(str, version)) for version in (sys.version_info[:2], _OLDEST_PYTHON))
        return _refused(f"{sys.executable} is Python {have}: give PYTHON= one with torch, {need} or newer")
    chosen = [row for name, row in ROWS.items() if not given.only or name in given.only]
    size: Size = given.size or ("full" if given.device == "cuda" else "small")
    results: list[Result] = []
    try:
        with variables(given.wheels) as environ:
            facts = _inventory(given.device, environ)
            print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", flush=True)
            table.write(given.out, facts, results)
            if OBSTACLE in facts:
                return _refused(f"{OBSTACLE}: {facts[OBSTACLE]}")

            def done(result: Result) -> None:
                results.append(result)
                table.write(given.out, facts, results)
                print(f"{result.row:12s} {result.verdict:14s} {result.seconds:5.0f} s  {result.seen}", flush=True)
                if result.verdict == "red":
                    lines = result.log.splitlines()[-30:]
                    lines += [f"{part.name}: {_last_line(part.seen)}" for part in result.parts if part.verdict == "red"]
                    print(*(f"    {line}\n" for line in lines), sep="", end="", flush=True)

            seconds = 60 * given.minutes - (time.monotonic() - began) - _RESERVE_SECONDS
            run_rows(chosen, given.device, size, seconds, environ, done)
    except NoWheels as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        where = f", which are in {given.out}/table.md" if results else ""
        print(f"make gpu: interrupted after {len(results)} rows{where}", file=sys.stderr)
        return 130
    print(table.markdown(facts, results), flush=True)
    print(f"{given.out}/table.md, {given.out}/table.json; {time.monotonic() - began:.0f} s")
    return 1 if any(result.verdict == "red" for result in results) else 0


def _last_line(text: str) -> str:
    """A traceback's is its error."""
    return text.strip().rpartition("\n")[2].strip()


def answer_signals() -> None:
    """As Ctrl-C: the row that runs is ended. Under nohup a hang-up stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _refused(why: str) -> int:
    print(f"make gpu: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description="Everything that needs CUDA, as rows of a table."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="directory of the results (default: %(default)s)"
    )
    parser.add_argument(
        "--wheels", type=Path, help="directory with wheels that this Python lacks (python -m tests.gpu.wheels)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default: %(default)g)")
    parser.add_argument(
        "--only", nargs="*", choices=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument("--size", choices=("full", "small", "cheap"), help="(default: full on cuda, small on cpu)")
    return parser


def _inventory(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """In a process of its own: this one touches no GPU."""
    command = [sys.executable, "-m", "tests.gpu.inventory", device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=dict(environ), capture_output=True, text=True, timeout=_INVENTORY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"device": device, "inventory": f"no answer within {_INVENTORY_SECONDS:g} s"}
    if done.returncode:
        return {"device": device, "inventory": done.stderr.strip()[-500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    answer_signals()
    sys.exit(main())
