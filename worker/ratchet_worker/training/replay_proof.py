"""Checks whether lost steps are redone as the same steps. Every rank writes a fingerprint per step into its attempt's ring, and
compares it with that of an earlier attempt. Steps are compared only where they must be equal: on the same line
(``RingHeader.line``), without an inexact resume in between, and under the same facts."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from ratchet_contract.checkpoint.resume_report import ResumeReport, StepDifference
from ratchet_contract.checkpoint.step_ring import (
    RING_ATTEMPTS,
    RingHeader,
    StepFingerprint,
    StepRing,
    read_header,
    read_ring,
)
from ratchet_contract.errors import UserError
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.counter_layout import finished_step
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.data.streams import TrainStream
from ratchet_worker.state.environment import Record, compare, describe_differences
from ratchet_worker.state.step_fingerprint import StepFingerprints
from ratchet_worker.task import TrainData

if TYPE_CHECKING:
    from ratchet_worker.training.runtime import Runtime

_REPORT_SECONDS: Final = 2.0
"""Interval between two reports on the progress of the comparison."""
_MAX_NAMED: Final = 3
INEXACT: Final = "the resume is not exact"
"""Prefix of the reason why the steps of an earlier attempt are not compared."""
_POSITIONED: Final = (TrainLoader, TrainStream, SamplerPosition, StreamPosition)
"""Data classes whose attribute ``position`` is the position in the epoch."""
_DIGITS: Final = 16
"""Digits of digests in headers and reasons."""

Ranges = list[list[int]]
"""First and last step of each run of steps."""


class Redone(NamedTuple):
    """What all ranks have agreed to compare. ``steps``: number of steps after the base that every rank had already done in
    earlier attempts. ``compared``: the steps for which every rank has a fingerprint. ``reason``: why the other steps are not
    compared."""

    steps: int
    compared: frozenset[int]
    reason: str | None


class ReplayProof:
    """Records one rank's fingerprints and compares them with those of earlier attempts. ``ring``: the file for this attempt's
    fingerprints; None if it could not be created. ``earlier``: fingerprints of earlier attempts, by step. ``on_difference``:
    called at the first difference."""

    def __init__(
        self,
        fingerprints: StepFingerprints,
        ring: StepRing | None,
        redone: Redone,
        earlier: dict[int, StepFingerprint],
        reporter: Reporter,
        launch: LaunchFile,
        on_difference: Callable[[], None],
    ) -> None:
        self._fingerprints, self._ring, self._reporter, self._redone = fingerprints, ring, reporter, redone
        self._world_size, self._own_line, self._on_difference = launch.world_size, _own_line(launch), on_difference
        self._advice, self._strict = _advice(launch), launch.spec.determinism == "strict"
        self._earlier = {step: earlier[step] for step in redone.compared}
        self._compared = self._equal = 0
        self._difference: StepDifference | None = None
        self._reported: tuple[int, int] | None = None
        self._reported_at = time.monotonic()
        self._position: tuple[int, int] | None = None

    def record_step(self, step: int, data: TrainData | None, batches_taken: int) -> None:
        """Record the fingerprint of a finished step, which may be compared later. Raises ``UserError`` for a difference under
        ``determinism: strict``."""
        self._position = _position(data, batches_taken)
        for fingerprint in self._fingerprints.record_step(step, self._position):
            self._record(fingerprint)

    def changed_since_step(self, data: TrainData | None, batches_taken: int) -> list[str]:
        """Return what has moved since ``record_step``: ``data``, ``generators``, both or neither. ``batches_taken``: batches
        taken since then."""
        placed = isinstance(data, _POSITIONED) and self._position not in (None, _position(data, batches_taken))
        return [
            *(["data"] if batches_taken or placed else []),
            *(["generators"] if self._fingerprints.has_drawn else []),
        ]

    def finish(self) -> None:
        """Write and compare the fingerprints that were not complete yet, and report the result. Raises as ``record_step``
        does."""
        for fingerprint in self._fingerprints.drain():
            self._record(fingerprint)
        self.report()

    def report(self) -> None:
        """Report the comparison so far, unless no step was lost or there is nothing new."""
        if self._redone.steps and self._reported != (self._compared, self._equal):
            self._reported, self._reported_at = (self._compared, self._equal), time.monotonic()
            self._reporter.report_redone_steps(
                self._world_size, self._redone.steps, self._compared, self._equal, self._difference, self._redone.reason
            )

    def _record(self, fingerprint: StepFingerprint) -> None:
        """Write a complete fingerprint to the ring, if there is one, and compare it. Raises as ``record_step`` does."""
        if self._ring is not None:
            self._ring.write(fingerprint)
        if self._earlier:
            self._compare(fingerprint)

    def _compare(self, fingerprint: StepFingerprint) -> None:
        """Compare a fingerprint with the earlier one of its step, if any. After the first difference, no step counts as equal.
        Raises as ``record_step`` does."""
        before = self._earlier.pop(fingerprint.step, None)
        if before is None:
            return
        self._compared += 1
        part = before.first_difference(fingerprint)
        if part is not None and self._difference is None:
            self._difference = StepDifference(step=fingerprint.step, rank=self._reporter.rank, part=part)
            self._on_difference()
            # So later attempts of the former line are not compared with this one.
            if self._ring is not None:  # from here on the steps differ from those of earlier attempts
                self._ring.set_line(self._own_line)
            self.report()
            if self._strict:
                raise UserError(
                    f"determinism is strict, and {self._difference.sentence()}: something that training depends on is not in the "
                    "checkpoint, or computes with other bits each time. Register it (session.register, Parts.stateful) and "
                    f"{self._advice}",
                    code="replay-difference",
                )
        self._equal += self._difference is None
        if not self._earlier or time.monotonic() - self._reported_at > _REPORT_SECONDS:
            self.report()


def begin_proof(runtime: Runtime, report: ResumeReport) -> ReplayProof:
    """Agree with the other ranks on what is compared, and create this attempt's ring. A collective, after the restore."""
    launch, rank = runtime.launch, runtime.rank
    ddp, _ = runtime.state.require_wrapped()
    fingerprints = StepFingerprints([*ddp.module.parameters()], runtime.device)
    facts = _facts(runtime, launch, fingerprints.plan.digest)
    line = _line(runtime, report)
    earlier = [_Attempt(f"attempt {paths.root.name.lstrip('0')}", paths, facts) for paths in _attempts(launch)]
    if runtime.adopted is not None:
        theirs = _facts(runtime, runtime.adopted.launch, fingerprints.plan.digest)
        earlier += [_Attempt("the adopted run", paths, theirs) for paths in runtime.adopted.attempts()]
    found = _earlier(earlier, rank, report, line)
    redone = _agree(runtime.exchange.gather("redone", found.message()), report.base.step)
    ring = _ring(AttemptPaths(Path(launch.attempt_dir)).ring(rank), RingHeader(line, facts), runtime.reporter)
    if fingerprints.plan.unreadable:
        names = [name for name, _ in ddp.module.named_parameters()]
        left = ", ".join(names[n] for n in fingerprints.plan.unreadable[:_MAX_NAMED])
        count = pluralize(len(fingerprints.plan.unreadable), "parameter")
        text = f"fingerprints of steps leave out {count} without own memory: {left}"
        runtime.reporter.note(NoteType.FINGERPRINTS_PARTIAL, text)
    proof = ReplayProof(
        fingerprints, ring, redone, found.fingerprints, runtime.reporter, launch, runtime.mark_not_exact
    )
    if rank == 0:
        proof.report()
    return proof


class _Attempt(NamedTuple):
    """An earlier attempt of the job or of the run that it adopted. ``facts``: facts that the attempt's ring must have for a
    comparison."""

    name: str
    paths: AttemptPaths
    facts: Record


def _attempts(launch: LaunchFile) -> Iterator[AttemptPaths]:
    """Yield the paths of the job's earlier attempts, newest first, at most ``RING_ATTEMPTS``."""
    job = JobPaths(Path(launch.job_root))
    numbers = range(launch.attempt - 1, max(0, launch.attempt - 1 - RING_ATTEMPTS), -1)
    yield from (job.attempt(number) for number in numbers)


class _Earlier(NamedTuple):
    """What this rank knows of steps that earlier attempts have done after the base. ``last``: the last such step; 0 if there is
    none. ``fingerprints``: by step. ``reason``: why these steps cannot be compared; None if they can."""

    last: int
    fingerprints: dict[int, StepFingerprint]
    reason: str | None

    def message(self) -> dict[str, Any]:
        """Return these fields as JSON for the other ranks, with ranges of steps in place of the fingerprints."""
        return {"last": self.last, "has": _ranges(self.fingerprints), "reason": self.reason}


def _earlier(attempts: Sequence[_Attempt], rank: int, report: ResumeReport, line: str) -> _Earlier:
    """Return what this rank knows of steps after the base. ``attempts``: newest first; each step's newest fingerprint counts."""
    base = report.base.step
    refused: list[tuple[int, str]] = []
    last, fingerprints = 0, dict[int, StepFingerprint]()
    for name, paths, facts in attempts:
        done = finished_step(paths.counter(rank if paths.counter(rank).exists() else 0))
        if done <= base:
            continue
        why = _why_incomparable(name, report, read_header(paths.ring(rank)), RingHeader(line, facts))
        if why is not None:
            refused.append((done, why))
            continue
        last = max(last, done)
        fingerprints = {s: f for s, f in read_ring(paths.ring(rank)).items() if base < s <= done} | fingerprints
    if last == 0 and refused:
        done, why = refused[0]
        return _Earlier(done, {}, why)
    return _Earlier(last, fingerprints, None)


def _why_incomparable(name: str, report: ResumeReport, found: RingHeader | None, own: RingHeader) -> str | None:
    """Return why the earlier attempt ``name`` is not compared; None if it is. ``found``: its ring's header; ``own``: the required
    one."""
    if report.verdict not in ("fresh", "exact"):
        return f"{INEXACT}: {describe_inexact(report)}"
    if found is None:
        return f"{name} left no fingerprints that this version of Ratchet reads"
    differences = compare(found.facts, own.facts)
    if differences:
        return f"{name} ran under other facts: {describe_differences(differences, _MAX_NAMED)}"
    if found.line != own.line:
        return f"{name} and this one go back to different resumes that were not exact"
    return None


def describe_inexact(report: ResumeReport) -> str:
    """Return a part of a sentence on what is not exact in a resume: the first differences, and at most one component. With
    differences, a component is named only if it lost something; without them, any inexact component."""
    found = []
    if report.differences:
        found.append(describe_differences(report.differences, _MAX_NAMED))
    # A redistributed or reset component follows from the differences: it is named only without any. Data that start over do not.
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


def _agree(messages: list[dict[str, Any]], base: int) -> Redone:
    """Return what is compared, as it follows from all ranks' messages (``_Earlier.message``). ``base``: the base's step."""
    steps = max(0, min(rank["last"] for rank in messages) - base)
    reason = next((rank["reason"] for rank in messages if rank["reason"] is not None), None)
    common = frozenset(range(base + 1, base + steps + 1))
    for rank in messages:
        common &= {step for first, last in rank["has"] for step in range(first, last + 1)}
    if reason is None and len(common) < steps:
        reason = f"fingerprints of {pluralize(steps - len(common), 'step')} no longer exist, or were not written yet"
    return Redone(steps, common, reason)


def _line(runtime: Runtime, report: ResumeReport) -> str:
    """Return the name of this attempt's line (``RingHeader``): attempts with the same line must do the same steps."""
    base, launch, manifest = report.base, runtime.launch, runtime.chosen.manifest
    if report.verdict == "fresh":
        return "start"
    # A resume that is not exact begins a line; an exact one continues that of the attempt that wrote the checkpoint, if it is
    # known.
    if report.verdict != "exact":
        return _own_line(launch)
    job = JobPaths(Path(launch.job_root)) if runtime.adopted is None else runtime.adopted.paths
    own = manifest is not None and (runtime.adopted is not None or manifest.job_id == launch.job_id)
    if own and base.attempt is not None:
        header = read_header(job.attempt(base.attempt).ring(runtime.rank))
        if header is not None:
            return header.line
    return f"checkpoint {base.digest}"


def _advice(launch: LaunchFile) -> str:
    """Return the end of an error text: how to go on after a step that differs in a strict run."""
    if launch.is_standalone:
        return 'start it in another directory. To continue anyway, with other bits: Session(determinism="warn")'
    return (
        "submit the job again. To continue anyway, as a new job whose bits may differ: "
        f"`ratchet fork {launch.job_id} --set determinism=warn`, or where there is no checkpoint yet, submit it again with that"
    )


def _own_line(launch: LaunchFile) -> str:
    """Return the name of a line that begins in this attempt."""
    return f"attempt {launch.attempt} of {launch.job_id}"  # the id since an adopted run's line may continue in this job


def _facts(runtime: Runtime, launch: LaunchFile, sample: str) -> Record:
    """Return the facts that compared attempts must share, such as code and spec. ``sample``: the sample plan's digest."""
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
    """Create the ring file of this attempt at ``path`` and return the ring; None if that fails, which is reported."""
    try:
        return StepRing(path, header)
    except (OSError, ValueError) as error:
        text = f"no fingerprints of this attempt's steps are kept, so that nothing can be compared with them: {error}"
        reporter.note(NoteType.FINGERPRINTS_UNAVAILABLE, text)
        return None


def _position(data: TrainData | None, batches_taken: int) -> tuple[int, int]:
    """Return the epoch of the data and the position in it; for the user's own data or none, ``batches_taken`` as the
    position."""
    if isinstance(data, _POSITIONED):
        return data.epoch, data.position
    return 0 if data is None else int(data.epoch), batches_taken


def _ranges(steps: Iterable[int]) -> Ranges:
    """Return the steps as sorted ranges, each ``[first, last]``, such as ``[[41, 60], [62, 70]]``."""
    out: Ranges = []
    for step in sorted(steps):
        if out and out[-1][1] == step - 1:
            out[-1][1] = step
        else:
            out.append([step, step])
    return out
