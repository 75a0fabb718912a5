"""Random faults over many jobs: none is lost, none runs twice, no process is left, and every job ends bit for bit as undisturbed.

``python -m tests.e2e.chaos --n 500 --seed 1`` strikes the whole of Ratchet 500 times, half of them on each database, while a job
for every five faults passes through it; ``tests.support.chaos`` has the faults, the jobs and the stage. Most jobs are stand-ins
without torch under the real agent, whose state follows from every step in its order; the others (``--real K`` on each database)
are two real ranks each, under five hooks in turn. At the end an invariant checker reads every job's history, rows and notes, and
each final checkpoint is compared with that of an undisturbed job.

The sequence of faults and actions is a function of the seed alone. How far jobs have come when one strikes is the machine's
affair and cannot be replayed exactly: the log has the instant and the victim of each, and ``--replay LOG`` strikes the same at
the same instants.

Half of the services keep parked agents for the real ranks: one of the two reconcilers, and SQLite's one process at every other
start. Before the faults and after them, when no agent is parked any more, processes, listening ports, descriptors, files in
/dev/shm (with a mount namespace) and memory are counted: ``tests.support.chaos.resources`` has the bounds.

Faults: SIGKILL, and SIGSTOP for up to 20 s, of ranks, agents, parked agents and their fork servers, APIs and reconcilers; of
a parked agent, its fork server or the service within the 0.1 s in which it is given an attempt; the database ended and
started again (SQLite: its lock held); the way to the API closed; requests and answers lost, cut, late, slow and sent twice; a
full disk (with root and mount namespaces; else it says that it is left out); wall clocks that jump by up to 20 hours, of the
control plane's processes and of stand-in agents and ranks (not: real ranks', the database server's). Actions of the API, not
counted as faults:
suspend and resume, preempt, checkpoint, cancel, submissions twice with one key; priorities make jobs preempt others. A job that
has ended as no-progress (three attempts in a row were struck before they could save) is resumed, as a person would; that is told.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from tests.support.chaos.final_checks import Verdict, check_run, history
from tests.support.chaos.planted_faults import PLANTED
from tests.support.chaos.run import Run, Wanted
from tests.support.chaos.schedule import Log, read_log
from tests.support.chaos.world import Engine, World

DISK_MIB = 192
"""Of the run directory, with what real jobs need in addition."""
REAL_JOB_MIB = 8
SHOWN = 5
_MARK = "RATCHET_CHAOS_DISK"


def chaos(root: Path, engine: Engine, wanted: Wanted, *, planted: str | None = None, disk: bool = False,
          log: Path | None = None) -> tuple[Run, Verdict, list[str]]:  # fmt: skip
    """One run on one database, below an empty directory. The lines are what is to be shown of its breaches."""
    told = Log({**asdict(replace(wanted, replay=None)), "engine": engine}, log)
    try:
        with World(root, engine, wanted.seed, planted=planted, disk=disk) as world:
            run = Run(world, wanted, told)
            run.play()
            verdict = check_run(run)
            lines = [text for found in verdict.breaches.values() for text in found]
            for job_id in [one for one in verdict.breaches if one][:SHOWN]:
                lines += ["", f"history of {job_id}:", *history(run, job_id)]
    finally:
        told.close()
    return run, verdict, lines


def report(run: Run, verdict: Verdict, lines: list[str], seconds: float, again: str) -> None:
    tally, seed = run.tally, run.wanted.seed
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.faults.items()))
    done = run.world.relay.done
    print(
        f"{run.world.engine}, seed {seed}: {tally.faults.total()} faults over {len(run.jobs)} jobs in {seconds:.0f} s"
    )
    print(f"  {faults}")
    print(
        f"  requests struck: {done.total() - done['none']} of {done.total()}; actions and answers: {dict(tally.actions)}"
    )
    print(f"  jobs ended {dict(verdict.ends)} by {verdict.causes.total()} attempts {dict(verdict.causes)}")
    print(f"  {verdict.lost_steps} steps were done again; {tally.resumed} times no-progress was resumed; "
          f"{tally.restarts} starts without a database or room")  # fmt: skip
    print(f"  final checkpoints identical to the undisturbed one: {verdict.identical} of {verdict.compared} "
          f"({verdict.reals} of real ranks; {verdict.tensors} tensors)")  # fmt: skip
    print(f"  {verdict.parked} attempts started in parked agents; {run.struck_hand_overs} hand-overs were struck")
    print(f"  before the faults: {run.before}\n  after them: {run.after}")
    count = sum(len(found) for found in verdict.breaches.values())
    print(f"  {count} breaches: " + ("every job kept" if not count else "FAILED"), flush=True)
    if lines:
        print(f"seed {seed}; again: {again}\nfaults and actions (seconds, number of the draw, what, whom):")
        for one in run.log.struck:
            print(f"  {one.at:8.2f} {one.number or '':>4} {one.kind:18s} {one.victim} {one.detail}")
        print("\n".join(lines), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--n", type=int, default=20, help="faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--jobs", type=int, help="on each database (default: one for every five faults)")
    parser.add_argument("--real", type=int, help="how many of these have two real ranks (default: a fifth)")
    parser.add_argument(
        "--pace", type=float, default=1.4, help="seconds between faults, on the average (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="*", default=(), metavar="FAULT", help="these kinds alone")
    parser.add_argument("--planted", choices=sorted(PLANTED), help="a fault in the product, which must be found")
    parser.add_argument(
        "--log",
        help="where the logs stay: LOG.sqlite.jsonl, LOG.postgresql.jsonl (default: if it fails, in the temporary directory)",
    )
    parser.add_argument(
        "--replay", type=Path, metavar="LOG", help="what this log has, at its instants; nothing else is heeded"
    )
    given = parser.parse_args()
    if _MARK not in os.environ:
        _with_mounts()
    signal.signal(signal.SIGTERM, _end)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    engines: list[Engine] = ["sqlite", "postgresql"] if given.engine == "both" else [given.engine]
    runs: list[tuple[Engine, Wanted]] = []
    for number, engine in enumerate(engines):
        count = given.n // len(engines) + (number < given.n % len(engines))
        jobs = given.jobs or max(3, count // 5)
        reals = given.real if given.real is not None else max(1, jobs // 5)
        runs.append((engine, Wanted(given.seed, count, jobs, reals, given.pace, only=list(given.only))))
    if given.replay is not None:
        header, struck = read_log(given.replay)
        runs = [(header.pop("engine"), Wanted(**header | {"replay": struck}))]
    log = given.log or str(Path(tempfile.gettempdir()) / f"ratchet-chaos-{'replay' if given.replay else given.seed}")
    try:
        verdicts = [_one(engine, wanted, given.planted, Path(f"{log}.{engine}.jsonl")) for engine, wanted in runs]
    except (SystemExit, KeyboardInterrupt) as end:
        atexit._run_exitfuncs()
        os._exit(
            end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else 130
        )  # clients may still try
    if given.log is None and not any(verdict.breaches for verdict in verdicts):
        for engine, _ in runs:  # nobody asked for them, and nobody will play them again
            Path(f"{log}.{engine}.jsonl").unlink(missing_ok=True)
    return 1 if any(verdict.breaches for verdict in verdicts) else 0


def _end(number: int, _frame: object) -> NoReturn:
    """In order: nothing of the run is left behind. A second signal does not cut that short; SIGKILL does, and the processes that
    all others are forked from end with this one, and take them along."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _one(engine: Engine, wanted: Wanted, planted: str | None, log: Path) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ratchet-chaos-", ignore_cleanup_errors=True) as name:
        home = Path(name) / "home"
        home.mkdir(mode=0o700)
        disk = bool(os.environ[_MARK])
        if disk:
            size = DISK_MIB + REAL_JOB_MIB * wanted.reals
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", str(home)], check=True)
        try:
            run, verdict, lines = chaos(Path(name), engine, wanted, planted=planted, disk=disk, log=log)
        finally:
            if disk:
                subprocess.run(["umount", "-l", str(home)], check=False)
    again = (
        f"python -m tests.e2e.chaos --engine {engine} --seed {wanted.seed} --n {wanted.faults} --jobs {wanted.jobs} "
    )
    again += (
        f"--real {wanted.reals} --pace {wanted.pace}; at the same instants: python -m tests.e2e.chaos --replay {log}"
    )
    report(run, verdict, lines, time.monotonic() - began, again)
    return verdict


def _with_mounts() -> None:
    """Go on in a mount namespace of its own, where there can be one: what is mounted there ends with the run."""
    mounts = ["unshare", "--mount", "--propagation", "private"]
    able = os.geteuid() == 0 and not subprocess.run([*mounts, "true"], capture_output=True).returncode
    os.environ[_MARK] = "1" if able else ""
    if able:
        mounts += ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]  # what is in it is the run's
        os.execvp(mounts[0], [*mounts, sys.executable, "-m", "tests.e2e.chaos", *sys.argv[1:]])
    print("full disk: left out, it needs root and mount namespaces", flush=True)


if __name__ == "__main__":
    sys.exit(main())
