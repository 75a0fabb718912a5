"""``ratchet doctor --exactness``: on this machine's own devices, does a killed job end with the bits of one that nobody touched?

Per hook and device two jobs run under a real service: one undisturbed, one of which a rank is killed (SIGKILL, from outside)
between two checkpoints, after compression has begun. Every tensor and every rank's state of the final checkpoints is compared.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_client.cli.doctor.checks import Diagnosis
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.doctor.throwaway import throw_away_service
from ratchet_client.cli.service_process import started_below
from ratchet_client.client import RatchetClient
from ratchet_contract.api import AttemptView, JobView
from ratchet_contract.counter import finished_step
from ratchet_contract.errors import RatchetError
from ratchet_contract.findings import Finding, failed, ok
from ratchet_contract.paths import MANIFEST_NAME, HomePaths
from ratchet_contract.phases import Cause, JobPhase
from ratchet_contract.plural import counted
from ratchet_hooks.registry import HOOKS, HookEntry

Device = Literal["cpu", "cuda"]
STEPS: Final = 60
EVERY: Final = 20
COMPRESS: Final = 8
"""The iteration at which PowerSGD begins to compress: before the first checkpoint, so that its state is in every one."""
SECONDS: Final = 300.0
_LOOK: Final = 0.004
"""Seconds between two looks at the step counters: a step takes about as long, and the window is some ten steps wide."""
_ASK: Final = 0.5
_MOST_NAMES: Final = 10


@dataclass
class Proof:
    """One hook on one device. ``identical`` None: nothing could be compared, ``problems`` say why."""

    hook: str
    device: Device
    model: str
    ranks: int
    undisturbed: str = ""
    killed: str = ""
    struck: bool = False
    identical: bool | None = None
    tensors: int = 0
    lost: int | None = None
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        answer = {True: "yes", False: "NO", None: "not compared"}[self.identical]
        lost = "-" if self.lost is None else str(self.lost)
        return (
            self.hook,
            f"{self.device}: {self.model}",
            str(self.ranks),
            answer,
            str(self.tensors),
            str(STEPS),
            lost,
            f"{self.seconds:.1f}",
        )

    def finding(self) -> Finding:
        name = f"exactness {self.hook} {self.device}"
        words = (
            f"{counted(self.ranks, 'rank')} on {self.model}, {counted(self.tensors, 'tensor')}, {STEPS} steps, "
            f"{self.lost} of them done again"
        )
        if self.identical and not self.problems:
            return ok(name, "identical", words)
        detail = "; ".join(self.problems)
        if self.identical is False:
            return failed(
                name,
                "not identical",
                detail=f"{words}: {detail}",
                cure="do not rely on resumes on this machine; report it with the output of `ratchet doctor --exactness --json`",
            )
        return failed(
            name,
            "not proved",
            detail=detail,
            cure="mend the failed checks above, then `ratchet doctor --exactness` again",
        )


def prove(found: Diagnosis, home: Path, python: str | None, hooks: Collection[str], say: Progress) -> list[Proof]:
    """One proof per hook of ``hooks`` and device of this machine; where the set-up fails, proofs that say why."""
    proofs = [proof for device in _devices(found) for proof in _planned(found, device, hooks)]
    lacking = [name for name in ("torch", "extra worker", "extra service") if found.failed(name)]
    if lacking:
        return [_blocked(proof, f"{', '.join(lacking)}: see above") for proof in proofs]
    say("exactness: starting a service of its own ...")
    try:
        with throw_away_service(home) as (client, paths):
            for device in _devices(found):
                _run(client, paths, [p for p in proofs if p.device == device], python, say)
    except RatchetError as error:
        return [p if p.identical is not None else _blocked(p, error.detail) for p in proofs]
    return proofs


def _devices(found: Diagnosis) -> tuple[Device, ...]:
    return ("cpu", "cuda") if found.gpus else ("cpu",)


def available() -> list[str]:
    """Names of the hooks that can be proved."""
    return [entry.name for entry in HOOKS.values() if entry.available]


def _planned(found: Diagnosis, device: Device, hooks: Collection[str]) -> list[Proof]:
    backend, model = ("gloo", found.cpu) if device == "cpu" else ("nccl", found.gpus[0])
    ranks = 2 if device == "cpu" else min(2, len(found.gpus))
    return [Proof(name, device, model, ranks) for name in hooks if backend in HOOKS[name].backends]


def _blocked(proof: Proof, why: str) -> Proof:
    proof.problems.append(why)
    return proof


# --- the jobs ------------------------------------------------------------------------------------------------------------


def _hook(entry: HookEntry) -> dict[str, Any]:
    """As a user would name it, with compression early enough to be killed in."""
    known = {parameter.name for parameter in fields(entry.spec)}
    return {"name": entry.name} | {key: COMPRESS for key in ("start_powerSGD_iter",) if key in known}


def spec_of(proof: Proof, python: str | None) -> dict[str, Any]:
    """The job that both runs are."""
    return {
        "name": f"doctor-{proof.hook.lower().replace('_', '-')}-{proof.device}",
        "task": {
            "entrypoint": "ratchet_worker.tasks.digits:DigitsTask",
            "args": {"steps": STEPS, "evaluate": False, "width": 16},
        },
        "python": None if python is None else str(Path(python).absolute()),
        "world": {"ranks_per_node": proof.ranks, "device": proof.device},
        "resources": {"cpus_per_rank": 1},
        "ddp": {"bucket_cap_mb": 0.05},
        "hook": _hook(HOOKS[proof.hook]),
        "checkpoint": {"every_steps": EVERY, "keep_last": 2},
        "policy": {"max_failures": 3, "backoff": 0.1},
        "seed": 7,
    }


def _run(client: RatchetClient, paths: HomePaths, proofs: list[Proof], python: str | None, say: Progress) -> None:
    """All jobs of one device at once, as many as the machine has room for; then the comparisons."""
    for proof in proofs:
        proof.killed = client.submit(spec_of(proof, python)).id
        proof.undisturbed = client.submit(spec_of(proof, python)).id
    jobs = _until_ended(client, paths, proofs, say)
    for proof in proofs:
        say(f"exactness: comparing {proof.hook} on {proof.device} ...")
        _judge(client, proof, jobs)


def _until_ended(client: RatchetClient, paths: HomePaths, proofs: list[Proof], say: Progress) -> dict[str, JobView]:
    """The jobs after their end. Each look may strike a job that is where it should be struck."""
    ids = [job for proof in proofs for job in (proof.undisturbed, proof.killed)]
    end, asked, shown = time.monotonic() + SECONDS, 0.0, ""
    jobs: dict[str, JobView] = {}
    while time.monotonic() < end:
        for proof in proofs:
            if not proof.struck:
                proof.struck = _strike(paths, proof)
        if time.monotonic() - asked >= _ASK:
            jobs = {job.id: job for job in client.jobs() if job.id in ids}
            ended = sum(job.phase.terminal for job in jobs.values())
            if ended == len(ids):
                break
            struck = sum(proof.struck for proof in proofs)
            text = (
                f"exactness: {proofs[0].device}, {ended} of {len(ids)} jobs done, {counted(struck, 'rank')} killed ..."
            )
            if text != shown:
                say(text)
            asked, shown = time.monotonic(), text
        time.sleep(_LOOK)
    return jobs


def _strike(paths: HomePaths, proof: Proof) -> bool:
    """SIGKILL the last rank if the first attempt is between two checkpoints, the first of them committed."""
    job = paths.job(proof.killed)
    attempt = job.attempt(1)
    step = finished_step(attempt.counter(0))
    if step < EVERY or not 2 <= step % EVERY <= EVERY - 5:
        return False
    if not (job.checkpoint(step - step % EVERY, 1) / MANIFEST_NAME).exists():
        return False
    pid = _pid(attempt.spool(proof.ranks - 1))
    if pid is None or not started_below(pid, paths.home):
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _pid(spool: Path) -> int | None:
    """What a rank said of itself in its first message."""
    with suppress(OSError, ValueError, KeyError):
        with spool.open() as lines:
            message = json.loads(next(lines, ""))
        if message["kind"] == "started":
            return int(message["pid"])
    return None


# --- the verdict ---------------------------------------------------------------------------------------------------------


def _judge(client: RatchetClient, proof: Proof, jobs: dict[str, JobView]) -> None:
    """Fill in what was found; every breach of the promise is a line in ``problems``."""
    bad = proof.problems.append
    unfinished = [job for job in (jobs[proof.undisturbed], jobs[proof.killed]) if job.phase is not JobPhase.SUCCEEDED]
    for job in unfinished:
        role = "killed" if job.id == proof.killed else "undisturbed"
        why = job.message or job.reason or f"no end within {SECONDS:g} s"
        bad(f"the {role} job is {job.phase} at step {job.progress.step}: {why}")
    if unfinished:
        return
    job = jobs[proof.killed]
    if job.ended_at is not None and job.started_at is not None:
        proof.seconds = (job.ended_at - job.started_at).total_seconds()
    attempts = client.attempts(proof.killed)
    proof.lost = sum(a.steps_lost or 0 for a in attempts)
    _check_attempts(attempts, bad)
    _compare(client, proof, jobs)


def _check_attempts(attempts: list[AttemptView], bad: Any) -> None:
    if len(attempts) < 2:
        bad("the job ended before its rank could be killed: nothing was resumed")
        return
    if attempts[0].cause is not Cause.RANK_KILLED:
        bad(f"the killed attempt ended as {attempts[0].cause}: {attempts[0].message}")
    for attempt in attempts[1:]:
        report = attempt.resume_report
        if report is None or report.verdict != "exact" or report.base.step < EVERY:
            said = "no report" if report is None else f"{report.verdict}, from step {report.base.step}"
            bad(f"attempt {attempt.number} did not resume exactly: {said}")


def _compare(client: RatchetClient, proof: Proof, jobs: dict[str, JobView]) -> None:
    """Bit for bit, by the service, which reads checkpoints."""
    first, second = (jobs[job].last_checkpoint for job in (proof.undisturbed, proof.killed))
    found = client.compare(proof.undisturbed, proof.killed, checkpoint=first, with_checkpoint=second)
    proof.tensors = found.tensors
    if not found.identical:
        more = found.different - _MOST_NAMES
        names = ", ".join(one.place for one in found.differences[:_MOST_NAMES]) + (
            f" and {more} more" if more > 0 else ""
        )
        proof.problems.append(f"{found.different} differ: {names}")
        proof.identical = False
    elif not proof.problems:
        proof.identical = True
