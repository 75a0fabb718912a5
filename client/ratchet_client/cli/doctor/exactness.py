"""``ratchet doctor --exactness``: checks on this machine that a killed job ends with the same bits as an undisturbed one.

Per hook and device two jobs run under a temporary service: one undisturbed, one with a rank that is killed. Their final
checkpoints are compared.
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
from ratchet_client.cli.doctor.throwaway import temporary_service
from ratchet_client.cli.shared.service_process import was_started_below
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.api.views import AttemptView, JobView
from ratchet_contract.doctor.findings import Finding, failed, ok
from ratchet_contract.errors import Conflict, RatchetError, Refused, SpecError
from ratchet_contract.paths import MANIFEST_NAME, HomePaths
from ratchet_contract.phases import Cause, JobPhase
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.counter_layout import finished_step
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_hooks.specs.registry import HOOKS, HookEntry

Device = Literal["cpu", "cuda"]
STEPS: Final = 60
CHECKPOINT_EVERY_STEPS: Final = 20
COMPRESSION_START: Final = 8
"""The iteration at which PowerSGD begins to compress: before the first checkpoint, so that its state is in every one."""
TIMEOUT_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.004
"""Seconds between two polls of the step counters: a step takes about as long, and the window is some ten steps wide."""
_STATUS_POLL_SECONDS: Final = 0.5
_MAX_NAMES: Final = 10


@dataclass
class Proof:
    """The result for one hook on one device: of two jobs, one is undisturbed, and one has a rank killed. ``undisturbed``,
    ``killed``: ids of the two jobs. ``struck``: True if a rank was killed. ``identical``: whether the final checkpoints are
    equal; None if undecided. ``tensors``: number of compared tensors. ``lost``: number of steps that were done again.
    ``problems``: why the proof failed."""

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
        """Return the proof as a row of the table that ``doctor --exactness`` prints."""
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
        """Return the proof as a finding: ok only if the checkpoints are identical and there is no problem."""
        name = f"exactness {self.hook} {self.device}"
        words = (
            f"{pluralize(self.ranks, 'rank')} on {self.model}, {pluralize(self.tensors, 'tensor')}, {STEPS} steps, "
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
            cure="fix the failed checks above, then run `ratchet doctor --exactness` again",
        )


def prove(
    diagnosis: Diagnosis, home: Path, python: str | None, hooks: Collection[str], report_progress: Progress
) -> list[Proof]:
    """Run two jobs under a temporary service for each of ``hooks`` and each device that supports it, and return the proofs;
    may block for minutes. Failures are in their ``problems``."""
    proofs = [proof for device in _devices(diagnosis) for proof in _planned_proofs(diagnosis, device, hooks)]
    lacking = [name for name in ("torch", "extra worker", "extra service") if diagnosis.failed(name)]
    if lacking:
        return [_mark_blocked(proof, f"{', '.join(lacking)}: see above") for proof in proofs]
    report_progress("exactness: starting a temporary service ...")
    try:
        with temporary_service(home) as (client, paths):
            for device in _devices(diagnosis):
                _run(client, paths, [p for p in proofs if p.device == device], python, report_progress)
    except RatchetError as error:
        return [p if p.identical is not None else _mark_blocked(p, error.detail) for p in proofs]
    return proofs


def _devices(diagnosis: Diagnosis) -> tuple[Device, ...]:
    return ("cpu", "cuda") if diagnosis.gpus else ("cpu",)


def available() -> list[str]:
    """Return the names of all available hooks except ``custom``, which is only a frame for a function of the user's."""
    return [entry.name for entry in HOOKS.values() if entry.available and entry.spec is not CustomSpec]


def _planned_proofs(diagnosis: Diagnosis, device: Device, hooks: Collection[str]) -> list[Proof]:
    """Return a proof without results for each hook that ``device`` supports."""
    backend, model = ("gloo", diagnosis.cpu) if device == "cpu" else ("nccl", diagnosis.gpus[0])
    ranks = 2 if device == "cpu" else min(2, len(diagnosis.gpus))
    return [Proof(name, device, model, ranks) for name in hooks if backend in HOOKS[name].backends]


def _mark_blocked(proof: Proof, reason: str) -> Proof:
    """Append ``reason`` to the proof's problems, and return the proof."""
    proof.problems.append(reason)
    return proof


# --- the jobs ------------------------------------------------------------------------------------------------------------


def _hook(entry: HookEntry) -> dict[str, Any]:
    """Return the value of the spec's key ``hook`` for ``entry``, with an early start of compression where it can be set."""
    # The rank must be killed after compression has begun.
    known = {parameter.name for parameter in fields(entry.spec)}
    return {"name": entry.name} | {key: COMPRESSION_START for key in ("start_powerSGD_iter",) if key in known}


def spec_of(proof: Proof, python: str | None) -> dict[str, Any]:
    """Return the spec for both jobs of a proof. ``python``: the interpreter that trains; None: the service's."""
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
        "checkpoint": {"every_steps": CHECKPOINT_EVERY_STEPS, "keep_last": 2},
        "policy": {"max_failures": 3, "backoff": 0.1},
        "seed": 7,
    }


def _run(
    client: RatchetClient, paths: HomePaths, proofs: list[Proof], python: str | None, report_progress: Progress
) -> None:
    """Run the jobs of ``proofs``, which are for one device, and fill in the results. May block for minutes."""
    accepted = []
    for proof in proofs:
        try:
            proof.killed = client.submit(spec_of(proof, python)).id
            proof.undisturbed = client.submit(spec_of(proof, python)).id
            accepted.append(proof)
        except (SpecError, Conflict, Refused) as error:
            _mark_blocked(proof, f"its job was refused: {error}")
    jobs = _wait_until_ended(client, paths, accepted, report_progress)
    for proof in accepted:
        report_progress(f"exactness: comparing {proof.hook} on {proof.device} ...")
        _evaluate(client, proof, jobs)


def _wait_until_ended(
    client: RatchetClient, paths: HomePaths, proofs: list[Proof], report_progress: Progress
) -> dict[str, JobView]:
    """Block until all jobs of ``proofs`` have ended, or until no job has ended for ``TIMEOUT_SECONDS``. Return the jobs by id, as
    last read. Meanwhile kill a rank of the job ``killed`` of each proof once, and then set ``struck``. A job may end before its
    rank is killed."""
    ids = [job for proof in proofs for job in (proof.undisturbed, proof.killed)]
    end, ended, asked, shown = time.monotonic() + TIMEOUT_SECONDS, 0, 0.0, ""
    jobs: dict[str, JobView] = {}
    while time.monotonic() < end:
        for proof in proofs:
            if not proof.struck:
                proof.struck = _kill_rank(paths, proof)
        if time.monotonic() - asked >= _STATUS_POLL_SECONDS:
            jobs = {job.id: job for job in client.jobs() if job.id in ids}
            before, ended = ended, sum(job.phase.terminal for job in jobs.values())
            if ended > before:
                end = time.monotonic() + TIMEOUT_SECONDS
            if ended == len(ids):
                break
            struck = sum(proof.struck for proof in proofs)
            text = f"exactness: {proofs[0].device}, {ended} of {len(ids)} jobs done, {pluralize(struck, 'rank')} killed ..."
            if text != shown:
                report_progress(text)
            asked, shown = time.monotonic(), text
        time.sleep(_POLL_SECONDS)
    return jobs


def _kill_rank(paths: HomePaths, proof: Proof) -> bool:
    """Kill the last rank of the job ``proof.killed`` if its first attempt is well between a committed checkpoint and the next
    one. Return True if the rank was killed."""
    job = paths.job(proof.killed)
    attempt = job.attempt(1)
    step = finished_step(attempt.counter(0))
    if step < CHECKPOINT_EVERY_STEPS or not 2 <= step % CHECKPOINT_EVERY_STEPS <= CHECKPOINT_EVERY_STEPS - 5:
        return False
    if not (job.checkpoint(step - step % CHECKPOINT_EVERY_STEPS, 1) / MANIFEST_NAME).exists():
        return False
    pid = _pid(attempt.spool(proof.ranks - 1))
    if pid is None or not was_started_below(pid, paths.home):
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _pid(spool: Path) -> int | None:
    """Return the process id in the first message of a rank's spool file; None if it is not there yet."""
    with suppress(OSError, ValueError, KeyError):
        with spool.open() as lines:
            message = json.loads(next(lines, ""))
        if message["kind"] == "started":
            return int(message["pid"])
    return None


# --- the verdict ---------------------------------------------------------------------------------------------------------


def _evaluate(client: RatchetClient, proof: Proof, jobs: dict[str, JobView]) -> None:
    """Fill in the results of ``proof`` from its two jobs. If a job has not succeeded, only a text on that is appended to
    ``problems``. Otherwise a text is appended for each result that contradicts exactness."""
    bad = proof.problems.append
    unfinished = [job for job in (jobs[proof.undisturbed], jobs[proof.killed]) if job.phase is not JobPhase.SUCCEEDED]
    for job in unfinished:
        role = "killed" if job.id == proof.killed else "undisturbed"
        why = job.message or job.reason or f"no job has ended for {TIMEOUT_SECONDS:g} s"
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
    """Call ``bad`` with a text for each fault in the killed job's attempts, such as a resume that was not exact."""
    if len(attempts) < 2:
        bad("the job ended before its rank could be killed: nothing was resumed")
        return
    if attempts[0].cause is not Cause.RANK_KILLED:
        bad(f"the killed attempt ended as {attempts[0].cause}: {attempts[0].message}")
    for attempt in attempts[1:]:
        report = attempt.resume_report
        if report is None or report.verdict != "exact" or report.base.step < CHECKPOINT_EVERY_STEPS:
            said = "no report" if report is None else f"{report.verdict}, from step {report.base.step}"
            bad(f"attempt {attempt.number} did not resume exactly: {said}")


def _compare(client: RatchetClient, proof: Proof, jobs: dict[str, JobView]) -> None:
    """Have the service compare the jobs' final checkpoints, and store the result in ``proof``; ``identical`` stays None if they
    are equal but the proof has problems."""
    first, second = (jobs[job].last_checkpoint for job in (proof.undisturbed, proof.killed))
    found = client.compare(proof.undisturbed, proof.killed, checkpoint=first, with_checkpoint=second)
    proof.tensors = found.tensors
    if not found.identical:
        more = found.different - _MAX_NAMES
        names = ", ".join(one.place for one in found.differences[:_MAX_NAMES]) + (
            f" and {more} more" if more > 0 else ""
        )
        proof.problems.append(f"{found.different} differ: {names}")
        proof.identical = False
    elif not proof.problems:
        proof.identical = True
