"""Trainings with planted state (``planted_job``), run undisturbed and interrupted, and what became of the bits.

``python -m tests.support.planted_runs [CASES] [--sample 8] [--ways epoch,stop,prove] [--jobs 2] [--blind]`` prints a table; exit
status 1: a case was silent, or could not be judged. ``CASES``: parts of their names; without any, all of them. ``--sample 9``:
every ninth of these. The way ``prove``, which is not among the default ones, is ``ratchet prove`` of the case.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_store.read.checkpoint_reader import CheckpointReader
from ratchet_store.read.compare import Comparison, compare
from tests.support.cli import Cli
from tests.support.fork_server import LIBRARIES, Program
from tests.support.launch import Attempt, Job
from tests.support.server import Server

CODE: Final = Path(__file__).parent / "planted_job"
WAYS: Final = {
    "epoch": Cause.RANK_KILLED, "preempt": Cause.SIGTERM, "evaluation": Cause.RANK_KILLED, "stop": Cause.SIGTERM,
}  # fmt: skip
"""How ``training.Fault`` interrupts a first attempt, and the cause of its end."""
_BASES: Final = {"Piece", "Training", "Case"}
_UNUSED: Final[dict[str, Any]] = {"ddp": {"find_unused_parameters": True}}
_SPEC: Final = {
    "networks:RequiresGrad": _UNUSED,
    **{f"clean:{name}": _UNUSED for name in ("Wav2Vec2", "DeBERTa", "Mixtral")},
}

NAMED: Final[dict[str, str]] = {
    "iterators:GeneratorObject": "model.levels",
}
"""Cases that are not exact: what a report, or a refusal, says of them."""
OUTSIDE: Final = frozenset({
    "datasets:InWorkers", "iterators:AppendedFile", "iterators:Cached", "iterators:CachedFunction", "networks:Scripted",
    "objects:Database", "objects:SimpleQueued", "optimizers:Defaults", "outside:Directory", "outside:Environment",
    "outside:GlobalOfAnotherModule", "script:BestSoFar", "script:LocalNumber", "script:LocalTeacher", "script:Reinforcement",
    "values:OrderOfSet",
})  # fmt: skip
"""State that docs/exactness.md says is not seen: the replay proof alone tells of it, where steps are done again."""


def catalogue() -> list[str]:
    """Every case, ``module:Class``: the public classes of ``planted_job`` that derive from one of ``_BASES``."""
    files = (file for file in sorted(CODE.glob("*.py")) if file.stem != "clean")
    return [f"{file.stem}:{name}" for file in files for name in _classes(file)]


def public_model_cases() -> list[str]:
    """Public models, in which nothing is planted."""
    return [f"clean:{name}" for name in _classes(CODE / "clean.py")]


def _classes(file: Path) -> Iterator[str]:
    known = set(_BASES)
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and known & {base.id for base in node.bases if isinstance(base, ast.Name)}:
            known.add(node.name)
            if not node.name.startswith("_") and node.name not in _BASES:
                yield node.name


@dataclass(frozen=True)
class How:
    """``blind``: state outside ``state_dict`` is neither saved nor named."""

    strict: bool = False
    blind: bool = False
    ranks: int = 1


def _spec(case: str, way: str, how: How) -> dict[str, Any]:
    """The job of a case; ``way``: of ``WAYS``, or ``none``."""
    module, name = case.split(":")
    told = f"{way}-blind" if how.blind else way
    if module == "script":
        code: dict[str, Any] = {"script": ["script.py", name, told]}
    else:
        code = {"task": {"entrypoint": "training:planted", "args": {"case": case, "way": told}}}
    return {
        **code,
        "name": "planted",
        "code": {"path": str(CODE)},
        "world": {"ranks_per_node": how.ranks, "device": "cpu"},
        "checkpoint": {"every_steps": 6, "first": "off"},
        "determinism": "strict" if how.strict else "warn",
        **_SPEC.get(case, {}),
    }


class _Run(Job):
    def __init__(self, home: Path, case: str, way: str, how: How) -> None:
        super().__init__(home / way, _spec(case, way, how), CODE, job_id="job")
        self._libraries = case.startswith(("libraries:", "clean:"))

    @override
    def start_agent(self, paths: AttemptPaths) -> subprocess.Popen[bytes] | Program:
        if not self._libraries:
            return super().start_agent(paths)
        with paths.agent_log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file)]
            return LIBRARIES.start(command, log.fileno())


@dataclass(frozen=True)
class Outcome:
    """``kind``: exact (equal bits, and so says the report), named (the report says not-exact, with ``reason``), refused (with
    ``reason``), proved other (other bits under ``exact``, and the replay proof, or ``ratchet prove``, found it), silent (other
    bits under ``exact``), false alarm (equal bits under ``not-exact``), broken (anything else)."""

    kind: str
    reason: str = ""


KINDS: Final = ("exact", "named", "refused", "proved other", "silent", "false alarm", "broken")


def run_case(home: Path, case: str, ways: Sequence[str] = (*WAYS,), how: How = How()) -> dict[str, Outcome]:
    """By way. One undisturbed run serves all of them."""
    whole = _Run(home, case, "none", how)
    try:
        attempt = whole.launch()
        result = attempt.wait(120)
        if result.cause is not Cause.COMPLETED:
            return dict.fromkeys(ways, _ended(attempt, result.cause, str(result.message)))
        if not _is_finite(whole.newest()):
            return dict.fromkeys(ways, Outcome("broken", "weights that are no numbers differ from none"))
        return {way: _interrupted(home, case, way, whole, how) for way in ways}
    finally:
        whole.close()


def _is_finite(checkpoint: Path) -> bool:
    stored = CheckpointReader(checkpoint).tensors("shared/model/").values()
    return all(np.isfinite(np.frombuffer(one.data, np.float32)).all() for one in stored if one.dtype == "F32")


def _interrupted(home: Path, case: str, way: str, whole: Job, how: How) -> Outcome:
    job = _Run(home, case, way, how)
    try:
        first = job.launch()
        result = first.wait(120)
        if result.cause is not WAYS[way]:
            return _ended(first, result.cause, str(result.message))
        resumed = job.launch()
        result = resumed.wait(120)
        if result.cause is not Cause.COMPLETED:
            return _ended(resumed, result.cause, str(result.message))
        return _judged(resumed, compare(whole.newest(), job.newest()))
    finally:
        job.close()


def prove_case(server: Server, home: Path, case: str, how: How = How()) -> Outcome:
    """What ``ratchet prove`` says of the case: ``differs`` is ``proved other``, ``not-repeatable`` is ``broken``."""
    file = home / "spec.json"
    file.write_text(json.dumps(_spec(case, "none", how) | {"resources": {"cpus_per_rank": 1}}))
    done = Cli(server.home, home).run_without_check("prove", str(file), "--json", deadline=600)
    if not done.text:
        return Outcome("refused" if "user-error" in done.errors else "broken", done.errors)
    proof = done.data
    if proof["verdict"] == "not-repeatable":
        return Outcome("broken", done.text)
    differ = [one["place"] for one in proof["comparison"]["differences"][:3]] + proof["metrics_differ"][:1]
    told = "; ".join(proof["reports"] + differ + proof["interruptions"])
    if proof["verdict"] != "differs":
        return Outcome("exact", told)
    return Outcome("named" if " is not-exact: " in told else "proved other", told)


def _judged(resumed: Attempt, found: Comparison) -> Outcome:
    report, redone = resumed.report(), resumed.messages(kind="redone")
    reasons = [f"{c.component}: {c.reason}" for c in report.components if c.status != "exact"]
    reasons += [f"{d.key}: {d.recorded} and now {d.current}" for d in report.differences]
    reasons += [message.first_difference.sentence() for message in redone[-1:] if message.first_difference]
    if found.identical:
        return Outcome("false alarm" if reasons or report.verdict != "exact" else "exact", "; ".join(reasons))
    if report.verdict != "exact":
        return Outcome("named", "; ".join(reasons))
    if reasons:
        return Outcome("proved other", "; ".join(reasons))
    compared = f"; {redone[-1].compared} of {redone[-1].steps} redone steps compared" if redone else ""
    differ = [*(tensor.name for tensor in found.different), *(state.pointer for state in found.states)]
    return Outcome("silent", ", ".join(differ[:3]) + compared)


def _ended(attempt: Attempt, cause: Cause, message: str) -> Outcome:
    if cause is Cause.USER_ERROR:
        return Outcome("refused", message)
    return Outcome("broken", f"{cause}: {message}\n{attempt.logs()[-1500:]}")


def table(found: dict[str, dict[str, Outcome]]) -> str:
    """How many cases of each kind, by way, and by the worst of all ways."""
    ways = [*dict.fromkeys(way for of_case in found.values() for way in of_case)]
    counts = {way: Counter(of_case[way].kind for of_case in found.values()) for way in ways}
    counts["all"] = Counter(max((o.kind for o in of_case.values()), key=KINDS.index) for of_case in found.values())
    head = f"{len(found)} cases".ljust(14) + "".join(kind.rjust(14) for kind in KINDS)
    return "\n".join(
        [head, *(way.ljust(14) + "".join(str(row[k]).rjust(14) for k in KINDS) for way, row in counts.items())]
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--sample", type=int, default=1, help="every n-th of them")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--blind", action="store_true")
    given = parser.parse_args()
    chosen = [case for case in catalogue() if not given.cases or any(part in case for part in given.cases)]
    chosen = chosen[:: given.sample]
    how = How(strict=given.strict, blind=given.blind, ranks=given.ranks)
    ways = [way for way in given.ways.split(",") if way != "prove"]
    found: dict[str, dict[str, Outcome]] = {}

    def one(case: str) -> None:
        home = Path(tempfile.mkdtemp(prefix="planted-"))
        try:
            found[case] = run_case(home, case, ways, how) if ways else {}
            if server is not None:
                found[case]["prove"] = prove_case(server, home, case, how)
        finally:
            shutil.rmtree(home, ignore_errors=True)
        for way, outcome in found[case].items():
            print(f"{case:40} {way:11} {outcome.kind:13} {outcome.reason[:400]}", flush=True)

    with ExitStack() as stack:
        server = None
        if "prove" in given.ways.split(","):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planted-")))
            server = Server(directory / "home").start()
            stack.callback(server.stop)
        pool = stack.enter_context(ThreadPoolExecutor(given.jobs))
        [*pool.map(one, chosen)]
    inside = {case: of_case for case, of_case in found.items() if case not in OUTSIDE}
    print(table(inside), "of what is not seen, " + table({c: found[c] for c in found if c in OUTSIDE}), sep="\n\n")
    return int(any(o.kind in KINDS[3:] for of_case in inside.values() for o in of_case.values()))


if __name__ == "__main__":
    sys.exit(main())
