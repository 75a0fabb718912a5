"""The promise, measured: a job interrupted again and again ends with exactly the tensors of one that nobody touched.

``python -m tests.e2e.exactness --n 24`` walks first the matrix of ``tests.support.exact_matrix``, in groups of ranks without a
service, and kills these ranks: hook x wrapper x ranks x buckets x DDP options x precision x model x optimizer, every pair.
Then ``n`` cells of hook x buckets x ranks x job go through the real service, which interrupts each job with {SIGKILL of one
rank, SIGKILL of the agent, SIGTERM, preempt over REST} at random steps before and after the hook starts, and compares every
tensor and every rank's state of the final checkpoints. Each cell is run twice against one undisturbed job: all attempts start
cold, or each after the first starts in a parked agent. (There the job is halted before each strike until there is one.) Reduced
sets run in the test suite.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ratchet_contract.paths import AttemptPaths
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare
from tests.support import exact_matrix
from tests.support.exact_cells import EVERY, START, STEPS, Cell, matrix
from tests.support.exact_matrix_runner import run_rows
from tests.support.server import Server, agent_pid, processes_below, rank_pid, wait_for

_TRIES = 3
Kill = Literal["rank", "agent", "sigterm", "preempt"]
KILLS: tuple[Kill, ...] = ("rank", "agent", "sigterm", "preempt")
CAUSES: dict[Kill, set[str]] = {
    "rank": {"rank-killed"},
    "agent": {"unknown"},
    "sigterm": {"sigterm"},
    "preempt": {"api-preempt"},
}


@dataclass
class Outcome:
    """What one case showed. ``problems`` empty: identical, and everything that must have happened did. ``late``: a strike came on
    the wrong side of the hook's start, as one may on a loaded machine; the case is run again."""

    kills: list[tuple[Kill, int]]
    bases: list[int] = field(default_factory=list)
    lost: int = 0
    tensors: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    late: str | None = None
    cold: int = 0


def plan_kills(rng: random.Random, kinds: tuple[Kill, ...]) -> list[tuple[Kill, int]]:
    """The first kill falls after the first checkpoint and before compression starts, the others after it, as does one alone.

    The first is one that acts at once; a preemption over REST takes up to half a second, in which a small model makes many
    steps, so it comes second, with the rest of the job before it. The order is random otherwise.
    """
    order = list(kinds)
    rng.shuffle(order)
    order.sort(key=lambda kind: kind not in ("rank", "agent"))
    first, *rest = order
    rng.shuffle(rest)
    rest.sort(key=lambda kind: kind != "preempt")
    after = range(START + EVERY + 1, STEPS // 2, 3)
    if not rest:
        return [(first, rng.choice(after))]
    later = sorted(rng.sample(after, len(rest)))
    return list(zip([first, *rest], [rng.randint(EVERY + 1, START - 5), *later], strict=True))


def strike(
    server: Server, job_id: str, kind: Kill, number: int, paths: AttemptPaths, rng: random.Random, ranks: int
) -> None:
    if kind == "rank":
        os.kill(rank_pid(paths, rng.randrange(ranks)), signal.SIGKILL)
    elif kind == "agent":
        os.kill(agent_pid(paths), signal.SIGKILL)
    elif kind == "sigterm":
        os.kill(agent_pid(paths), signal.SIGTERM)
    else:
        server.call("POST", f"/v1/jobs/{job_id}/preempt")


def final_checkpoint(server: Server, job_id: str) -> Path:
    job = server.job(job_id)
    path = server.paths.job(job_id).checkpoints / str(job["last_checkpoint"])
    assert (path / "MANIFEST.json").is_file(), f"no final checkpoint of {job_id}: {job['last_checkpoint']}"
    return path


def run_undisturbed(server: Server, spec: dict[str, Any]) -> Path:
    job_id = server.submit(spec)
    server.wait_phase(job_id, "SUCCEEDED", deadline=180)
    attempts = server.attempts(job_id)
    assert len(attempts) == 1, f"the undisturbed run was disturbed: {attempts}"
    return final_checkpoint(server, job_id)


def run_interrupted(
    server: Server,
    spec: dict[str, Any],
    kills: list[tuple[Kill, int]],
    rng: random.Random,
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Submit, strike at each step, wait for the end. Each strike must hit an attempt of its own.

    ``meanwhile`` runs before each strike: what it changes must not change the job.
    """
    job_id = server.submit(spec)
    struck = 0
    for kind, step in kills:
        number, paths = server.wait_step(job_id, step, after_attempt=struck, saved=struck == 0)
        meanwhile()
        strike(server, job_id, kind, number, paths, rng, int(spec["world"]["ranks_per_node"]))
        struck = number
    server.wait_phase(job_id, "SUCCEEDED", deadline=180)
    return job_id


def judge(
    server: Server,
    job_id: str,
    reference: Path,
    outcome: Outcome,
    *,
    total: int = STEPS,
    every: int = EVERY,
    start: int = START,
) -> None:
    """Everything the promise says, checked one by one; each breach is a line in ``outcome.problems``.

    The job makes ``total`` steps with a checkpoint each ``every`` and compresses from iteration ``start`` on.
    """
    bad = outcome.problems.append
    attempts = server.attempts(job_id)
    if len(attempts) != len(outcome.kills) + 1:
        bad(f"{len(outcome.kills)} strikes made {len(attempts)} attempts: {[a['cause'] for a in attempts]}")
    for attempt, (kind, step) in zip(attempts, outcome.kills, strict=False):
        if attempt["cause"] not in CAUSES[kind]:
            bad(
                f"attempt {attempt['number']} struck by {kind} at {step} ended as {attempt['cause']}: {attempt['message']}"
            )
        # The last save that was due may have been under way, and the one before it is done by then.
        if attempt["steps_lost"] is None or attempt["steps_lost"] > (2 * every if kind in ("rank", "agent") else 0):
            bad(f"attempt {attempt['number']} ({kind}) lost {attempt['steps_lost']} steps")
    for attempt in attempts[1:]:
        report = attempt["resume_report"] or {}
        outcome.bases.append(int((attempt["base"] or {}).get("step", 0)))
        if outcome.bases[-1] <= 0:
            bad(f"attempt {attempt['number']} began at step 0")
        if report.get("verdict") != "exact":
            bad(f"attempt {attempt['number']} resumed {report.get('verdict')}: {report}")
    if outcome.bases and not start <= outcome.bases[-1]:
        outcome.late = f"resumed at {outcome.bases}: compression starts at {start}, and the last must lie behind it"
    if len(outcome.bases) > 1 and not outcome.bases[0] < start:
        outcome.late = f"resumed at {outcome.bases}: compression starts at {start}, and the first must lie before it"
    outcome.lost = sum(int(a["steps_lost"] or 0) for a in attempts)
    executed = sum(int(a["steps_done"]) for a in attempts)
    if executed != total + outcome.lost:
        bad(f"{executed} steps executed, {total} wanted + {outcome.lost} lost")
    comparison = compare(reference, final_checkpoint(server, job_id))
    outcome.tensors = len(comparison.tensors)
    if not comparison.identical:
        names = [t.name for t in comparison.different] + [
            f"rank {d.rank}{d.pointer}: {d.a} != {d.b}" for d in comparison.states
        ]
        bad(f"final checkpoints differ in {len(names)} places: {', '.join(names[:5])}")
    if not comparison.tensors:
        bad("nothing was compared")


def halt_until_parked(server: Server) -> None:
    """Halt all ranks until the service has parked an agent."""
    ranks = [pid for pid in processes_below(server.home) if Path(f"/proc/{pid}/comm").read_text().startswith("rank-")]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(
            lambda: re.search(r"^ratchet_parked_agents [1-9]", server.call("GET", "/metrics").text, re.M),
            "a parked agent",
        )
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)


def cold_starts(server: Server, job_id: str) -> int:
    """The number of the job's attempts that did not start in a parked agent."""
    attempts = (server.paths.job(job_id).attempt(one["number"]) for one in server.attempts(job_id))
    told = [(paths.node(0).agent_log.read_text(), paths.log(0).read_text()) for paths in attempts]
    return sum(
        "start: parked" not in agent or "cold" in agent or "ranks are not forked" in rank for agent, rank in told
    )


def run_case(
    server: Server,
    cell: Cell,
    seed: int,
    reference: Path | None,
    kinds: tuple[Kill, ...] = KILLS,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Outcome, Path]:
    """One cell with one seed; the reference run is made once per cell and handed on."""
    began = time.monotonic()
    reference = reference or run_undisturbed(server, cell.spec(f"reference-{seed}"))
    for number in range(_TRIES):
        rng = random.Random(seed)
        outcome = Outcome(plan_kills(rng, kinds))
        job_id = run_interrupted(server, cell.spec(f"interrupted-{seed}-{number}"), outcome.kills, rng, meanwhile)
        outcome.cold = cold_starts(server, job_id)
        judge(server, job_id, reference, outcome)
        if outcome.late is None or outcome.problems:
            break
    else:
        outcome.problems.append(str(outcome.late))
    buckets = len(read_manifest(reference).bucket_layout or [])
    if not (buckets == 1 if cell.buckets == "one" else buckets >= 3):
        outcome.problems.append(f"{buckets} buckets, {cell.buckets} wanted")
    outcome.seconds = time.monotonic() - began
    return outcome, reference


def line(cell: Cell, outcome: Outcome) -> str:
    kills = " ".join(f"{kind}@{step}" for kind, step in outcome.kills)
    verdict = "identical" if not outcome.problems else "FAILED"
    return (
        f"{cell.hook:22s} {cell.buckets:5s} {cell.ranks} ranks {cell.job:13s} {kills:46s} resumed at "
        f"{outcome.bases!s:20s} lost {outcome.lost:3d}  {outcome.tensors:4d} tensors  {outcome.seconds:5.1f} s  {verdict}"
    )


Tally = dict[str, list[bool]]
"""By hook: was it identical, case by case?"""


def walk_groups(seed: int, tally: Tally) -> None:
    """The matrix below the service."""
    rows = exact_matrix.matrix()
    for number, verdict in enumerate(run_rows(rows, seed), start=1):
        tally.setdefault(exact_matrix.family(verdict.row["hook"]), []).append(not verdict.problems)
        end = "identical" if not verdict.problems else "FAILED"
        print(
            f"{number:4d}/{len(rows)} {exact_matrix.describe(verdict.row)}, killed at {verdict.kills}: {end}",
            flush=True,
        )
        for problem in verdict.problems:
            print(f"          {problem}", flush=True)


def walk_service(n: int, seed: int, tally: Tally) -> None:
    """``n`` cells through the real service, each with cold and with parked starts, compared with one undisturbed job."""
    cells, references = matrix(), dict[Cell, Path]()
    with tempfile.TemporaryDirectory(prefix="ratchet-exactness-") as home, ExitStack() as stack:
        starts = {}
        for name, standby in (("cold", "off"), ("parked", "processes=1")):
            server = Server(Path(home, name), afresh=True, variables={"RATCHET_STANDBY": standby})
            stack.callback(server.stop)
            starts[name] = server.start()
        for i in range(n):
            cell = cells[i % len(cells)]
            for name, server in starts.items():
                meanwhile = partial(halt_until_parked, server) if name == "parked" else lambda: None
                outcome, references[cell] = run_case(server, cell, seed + i, references.get(cell), meanwhile=meanwhile)
                attempts = len(outcome.kills) + 1
                if outcome.cold > 1 if name == "parked" else outcome.cold != attempts:
                    outcome.problems.append(f"{outcome.cold} of {attempts} attempts started cold")
                tally.setdefault(f"{exact_matrix.family(cell.hook)}, {name}", []).append(not outcome.problems)
                print(f"{i + 1:4d}/{n} {name:6s} {line(cell, outcome)}", flush=True)
                for problem in outcome.problems:
                    print(f"          {problem}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--n", type=int, default=24, help="cells through the service, from the first one again after all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which is killed")
    parser.add_argument("--only", choices=("groups", "service"), help="one half of it")
    arguments = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch's advice on find_unused_parameters
    groups, service = Tally(), Tally()
    if arguments.only != "service":
        walk_groups(arguments.seed, groups)
    if arguments.only != "groups":
        walk_service(arguments.n, arguments.seed, service)
    for title, tally in (("in groups of ranks", groups), ("through the service", service)):
        for hook, verdicts in sorted(tally.items()):
            print(f"{hook:34s} {title:20s} {sum(verdicts):4d} of {len(verdicts):4d} identical")
    every = [good for tally in (groups, service) for verdicts in tally.values() for good in verdicts]
    print(f"{sum(every)} of {len(every)} identical")
    return 0 if all(every) else 1


if __name__ == "__main__":
    sys.exit(main())
