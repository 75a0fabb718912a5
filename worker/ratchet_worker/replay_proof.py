"""Steps that a kill took are done again: are they the same steps? Fingerprints of both times tell, while the attempt trains.

Every rank writes one per step into the ring of its attempt (``step_ring``) and reads the rings of earlier attempts, for steps
behind its base. Only what must be equal is compared: the resume is exact, and the earlier attempt trained along the same line
(``RingHeader.line``: no resume in between that was not exact) under the same facts. Otherwise nothing is compared, and the reason
is told. All ranks compare the same steps: those whose fingerprints every rank has.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from ratchet_contract.counter import finished_step
from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.plural import counted
from ratchet_contract.resume import ResumeReport, StepDifference
from ratchet_contract.step_ring import RING_ATTEMPTS, RingHeader, StepFingerprint, StepRing, read_header, read_ring
from ratchet_worker.data.iterable import TrainStream
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.environment_record import Record, compare, sentence
from ratchet_worker.reporter import Reporter
from ratchet_worker.step_fingerprint import StepFingerprints
from ratchet_worker.task import TrainData

if TYPE_CHECKING:
    from ratchet_worker.runtime import Runtime

_SECONDS: Final = 2.0
"""Between two reports of how far the comparison has got."""
_NAMED: Final = 3
INEXACT: Final = "the resume is not exact"
"""Prefix of the reason why the steps of an earlier attempt are not compared."""
_PLACED: Final = (TrainLoader, TrainStream, SamplerPosition, StreamPosition)
"""Data whose attribute ``position`` is the place in the epoch."""
_DIGITS: Final = 16
"""Of digests, in headers and reasons."""

Ranges = list[list[int]]
"""First and last step of each run of steps."""


class Redone(NamedTuple):
    """The same on all ranks. ``steps``: how many an earlier attempt had done behind the base; ``compared``: those of them that
    every rank has fingerprints of; ``reason``: why some or all are left out."""

    steps: int
    compared: frozenset[int]
    reason: str | None


class ReplayProof:
    """One rank's fingerprints in this attempt. ``earlier``: what an attempt before had, by step. ``differs`` is called at the
    first step that is not what it was."""

    def __init__(
        self,
        fingerprints: StepFingerprints,
        ring: StepRing | None,
        redone: Redone,
        earlier: dict[int, StepFingerprint],
        reporter: Reporter,
        launch: LaunchFile,
        differs: Callable[[], None],
    ) -> None:
        self._fingerprints, self._ring, self._reporter, self._redone = fingerprints, ring, reporter, redone
        self._world_size, self._own_line, self._differs = launch.world_size, _own_line(launch), differs
        self._cure, self._strict = _cure(launch), launch.spec.determinism == "strict"
        self._earlier = {step: earlier[step] for step in redone.compared}
        self._compared = self._equal = 0
        self._difference: StepDifference | None = None
        self._told: tuple[int, int] | None = None
        self._told_at = time.monotonic()
        self._place: tuple[int, int] | None = None

    def boundary(self, step: int, data: TrainData | None, taken: int) -> None:
        """Behind every step. ``taken``: batches that it took. Raises ``UserError`` (``replay-difference``) under ``determinism:
        strict``, for a step that differs from what it was."""
        self._place = _position(data, taken)
        for fingerprint in self._fingerprints.take(step, self._place):
            self._note(fingerprint)

    def moved(self, data: TrainData | None, taken: int) -> list[str]:
        """What has moved since ``boundary``, where ``taken`` batches were taken since."""
        placed = isinstance(data, _PLACED) and self._place not in (None, _position(data, taken))
        return [*(["data"] if taken or placed else []), *(["generators"] if self._fingerprints.has_drawn else [])]

    def finish(self) -> None:
        """The loop has ended, or stops: tell how far the comparison has got. Raises as ``boundary`` does."""
        for fingerprint in self._fingerprints.rest():
            self._note(fingerprint)
        self.tell()

    def tell(self) -> None:
        """Unless it was told."""
        if self._redone.steps and self._told != (self._compared, self._equal):
            self._told, self._told_at = (self._compared, self._equal), time.monotonic()
            self._reporter.redone(
                self._world_size, self._redone.steps, self._compared, self._equal, self._difference, self._redone.reason
            )

    def _note(self, fingerprint: StepFingerprint) -> None:
        if self._ring is not None:
            self._ring.write(fingerprint)
        if self._earlier:
            self._compare(fingerprint)

    def _compare(self, fingerprint: StepFingerprint) -> None:
        before = self._earlier.pop(fingerprint.step, None)
        if before is None:
            return
        self._compared += 1
        part = before.difference(fingerprint)
        if part is not None and self._difference is None:
            self._difference = StepDifference(step=fingerprint.step, rank=self._reporter.rank, part=part)
            self._differs()
            if self._ring is not None:  # what follows is not what the attempts before did
                self._ring.set_line(self._own_line)
            self.tell()
            if self._strict:
                raise UserError(
                    f"determinism is strict, and {self._difference.sentence()}: something that training depends on is not in the "
                    "checkpoint, or computes with other bits each time. Register it (session.register, Parts.stateful) and "
                    f"{self._cure}",
                    code="replay-difference",
                )
        self._equal += self._difference is None
        if not self._earlier or time.monotonic() - self._told_at > _SECONDS:
            self.tell()


def begin(runtime: Runtime, report: ResumeReport) -> ReplayProof:
    """Everything is restored. ``report``: how. A collective."""
    launch, rank = runtime.launch, runtime.rank
    ddp, _ = runtime.state.hook_or_refuse()
    fingerprints = StepFingerprints([*ddp.module.parameters()], runtime.device)
    facts = _facts(runtime, launch, fingerprints.plan.digest)
    line = _line(runtime, report)
    earlier = [_Attempt(f"attempt {paths.root.name.lstrip('0')}", paths, facts) for paths in _attempts(launch)]
    if runtime.adopted is not None:
        theirs = _facts(runtime, runtime.adopted.launch, fingerprints.plan.digest)
        earlier += [_Attempt("the adopted run", paths, theirs) for paths in runtime.adopted.attempts()]
    found = _earlier(earlier, rank, report, line)
    redone = _agree(runtime.exchange.gather("redone", found.told()), report.base.step)
    ring = _ring(AttemptPaths(Path(launch.attempt_dir)).ring(rank), RingHeader(line, facts), runtime.reporter)
    if fingerprints.plan.left_out:
        names = [name for name, _ in ddp.module.named_parameters()]
        left = ", ".join(names[n] for n in fingerprints.plan.left_out[:_NAMED])
        text = f"fingerprints of steps leave out {len(fingerprints.plan.left_out)} parameters without memory of their own: {left}"
        runtime.reporter.note("fingerprints-partial", text)
    proof = ReplayProof(
        fingerprints, ring, redone, found.fingerprints, runtime.reporter, launch, runtime.mark_not_exact
    )
    if rank == 0:
        proof.tell()
    return proof


class _Attempt(NamedTuple):
    """One before this. ``facts``: what this one's are, in the words of that."""

    name: str
    paths: AttemptPaths
    facts: Record


def _attempts(launch: LaunchFile) -> Iterator[AttemptPaths]:
    """The job's own, newest first."""
    job = JobPaths(Path(launch.job_root))
    numbers = range(launch.epoch - 1, max(0, launch.epoch - 1 - RING_ATTEMPTS), -1)
    yield from (job.attempt(number) for number in numbers)


class _Earlier(NamedTuple):
    """What this rank knows of the steps behind the base. ``last``: the last of them that it had done in an attempt that may be
    compared, or where there is none (``reason``: why) in any."""

    last: int
    fingerprints: dict[int, StepFingerprint]
    reason: str | None

    def told(self) -> dict[str, Any]:
        return {"last": self.last, "has": _ranges(self.fingerprints), "reason": self.reason}


def _earlier(attempts: Sequence[_Attempt], rank: int, report: ResumeReport, line: str) -> _Earlier:
    """``attempts``: newest first, whose fingerprints count where several have done a step."""
    base = report.base.step
    refused: list[tuple[int, str]] = []
    last, fingerprints = 0, dict[int, StepFingerprint]()
    for name, paths, facts in attempts:
        done = finished_step(paths.counter(rank if paths.counter(rank).exists() else 0))
        if done <= base:
            continue
        why = _incomparable(name, report, read_header(paths.ring(rank)), RingHeader(line, facts))
        if why is not None:
            refused.append((done, why))
            continue
        last = max(last, done)
        fingerprints = {s: f for s, f in read_ring(paths.ring(rank)).items() if base < s <= done} | fingerprints
    if last == 0 and refused:
        done, why = refused[0]
        return _Earlier(done, {}, why)
    return _Earlier(last, fingerprints, None)


def _incomparable(name: str, report: ResumeReport, found: RingHeader | None, mine: RingHeader) -> str | None:
    """Why the attempt ``name`` is not compared; None: it is."""
    if report.verdict not in ("fresh", "exact"):
        return f"{INEXACT}: {inexact(report)}"
    if found is None:
        return f"{name} left no fingerprints that this version of Ratchet reads"
    differences = compare(found.facts, mine.facts)
    if differences:
        return f"{name} ran under other facts: {sentence(differences, _NAMED)}"
    if found.line != mine.line:
        return f"{name} and this one go back to different resumes that were not exact"
    return None


def inexact(report: ResumeReport) -> str:
    """What of a resume is not exact, in words: what differs, and the first component that lost something by itself. A component
    that was redistributed or reset follows from what differs, and is named where nothing does; data that begin again always."""
    found = []
    if report.differences:
        found.append(sentence(report.differences, _NAMED))
    parts = [part for part in report.components if part.status != "exact"]
    lost = [
        part for part in parts
        if part.status in ("not-exact", "absent") or (part.component == "data" and part.status == "reset")
    ]  # fmt: skip
    for part in (lost if found else lost + parts)[:1]:
        told = part.reason if part.status == "not-exact" else f"{part.status} ({part.reason})"
        text = f"{part.component} of rank {part.rank}: {told}"
        found.append(textwrap.shorten(text, 400, placeholder=" ..."))
    return "; ".join(found)


def _agree(told: list[dict[str, Any]], base: int) -> Redone:
    """Of all ranks: the steps that each had done, and those of them that each has fingerprints of."""
    steps = max(0, min(rank["last"] for rank in told) - base)
    reason = next((rank["reason"] for rank in told if rank["reason"] is not None), None)
    common = frozenset(range(base + 1, base + steps + 1))
    for rank in told:
        common &= {step for first, last in rank["has"] for step in range(first, last + 1)}
    if reason is None and len(common) < steps:
        reason = (
            f"fingerprints of {counted(steps - len(common), 'step')} are not there any more, or were not written yet"
        )
    return Redone(steps, common, reason)


def _line(runtime: Runtime, report: ResumeReport) -> str:
    """See ``RingHeader``. An exact resume goes on along the line of the attempt that made the checkpoint."""
    base, launch, manifest = report.base, runtime.launch, runtime.chosen.manifest
    if report.verdict == "fresh":
        return "start"
    if report.verdict != "exact":
        return _own_line(launch)
    job = JobPaths(Path(launch.job_root)) if runtime.adopted is None else runtime.adopted.paths
    own = manifest is not None and (runtime.adopted is not None or manifest.job_id == launch.job_id)
    if own and base.epoch is not None:
        header = read_header(job.attempt(base.epoch).ring(runtime.rank))
        if header is not None:
            return header.line
    return f"checkpoint {base.digest}"


def _cure(launch: LaunchFile) -> str:
    """What to do behind a step that differs, where the run is strict."""
    if launch.standalone:
        return 'start it in another directory. To go on all the same, with other bits: Session(determinism="warn")'
    return (
        "submit the job again. To go on all the same, as a new job whose bits may differ: "
        f"`ratchet fork {launch.job_id} --set determinism=warn`, or where there is no checkpoint yet, submit it again with that"
    )


def _own_line(launch: LaunchFile) -> str:
    return f"attempt {launch.epoch} of {launch.job_id}"  # another run's line may go on in this job (``adopted``)


def _facts(runtime: Runtime, launch: LaunchFile, sample: str) -> Record:
    hook = launch.spec.hook
    facts = {
        **runtime.environment,
        "code_digest": launch.resolved.code_digest,
        "data_digest": runtime.data_digest,
        "hook": f"{hook.name} {xxhash.xxh3_64_hexdigest(json.dumps(hook.values()).encode())[:8]}",
        "sample": sample,
        "spec_digest": launch.spec.digest(),
    }
    return {
        key: value[:_DIGITS] if isinstance(value, str) and "digest" in key else value for key, value in facts.items()
    }


def _ring(path: Path, header: RingHeader, reporter: Reporter) -> StepRing | None:
    try:
        return StepRing(path, header)
    except (OSError, ValueError) as error:
        text = f"no fingerprints of this attempt's steps are kept, so that nothing can be compared with them: {error}"
        reporter.note("fingerprints-unavailable", text)
        return None


def _position(data: TrainData | None, taken: int) -> tuple[int, int]:
    """Epoch and place in it. Data of the user's own, whose attributes may mean anything: how many batches the step took."""
    if isinstance(data, _PLACED):
        return data.epoch, data.position
    return 0 if data is None else int(data.epoch), taken


def _ranges(steps: Iterable[int]) -> Ranges:
    """``[[41, 60], [62, 70]]``"""
    out: Ranges = []
    for step in sorted(steps):
        if out and out[-1][1] == step - 1:
            out[-1][1] = step
        else:
            out.append([step, step])
    return out
