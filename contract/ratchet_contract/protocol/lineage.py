"""Computes the lineage of a job: the checkpoints that it may be resumed from. Each attempt records its base, the checkpoint that
it started from. The newest attempt with a base contributes its checkpoints after this base. The attempt that wrote the base
contributes its checkpoints up to the base, and so on. Other checkpoints on disk do not count, such as those of a zombie or of an
abandoned branch."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.protocol.messages import ForkSource


def lineage(
    bases: Mapping[int, Base], *, resume_from: Base | None = None, fork: ForkSource | None = None
) -> list[Segment]:
    """Return the segments of checkpoints that the next attempt may start from, newest first. The list is empty if none of the
    job's own checkpoints count. ``bases``: the recorded bases by attempt number. ``resume_from``: the checkpoint that a request
    names, from which the segments go back; None: from the newest attempt with a base. ``fork``: the checkpoint that the job was
    created from; the segments end before it. Raises ``ValueError`` if the bases contradict each other."""
    if resume_from is not None:
        attempt, until = resume_from.attempt, resume_from.step
        return _chain(bases, attempt, until, fork) if attempt is not None else []
    if not bases:
        return []
    return _chain(bases, max(bases), None, fork)


def _chain(bases: Mapping[int, Base], attempt: int | None, until: int | None, fork: ForkSource | None) -> list[Segment]:
    """Return the segments from ``attempt`` back to the start. ``until``: the newest step of ``attempt`` that counts; None: all
    steps count. An attempt without a recorded base is the last one. Only one of its checkpoints counts: the base of the
    previous segment, or, without a previous segment, the checkpoint of the step ``until``."""
    out: list[Segment] = []
    while attempt is not None:
        base = bases.get(attempt)
        if base is None:
            # The base of that attempt was never recorded, so only the checkpoint that the chain names is certain.
            assert until is not None
            out.append(Segment(attempt=attempt, after_step=until - 1, until_step=until))
            break
        out.append(Segment(attempt=attempt, after_step=base.step, until_step=until))
        following = None if _is_fork(base, fork) else base.attempt
        if following is not None and following >= attempt:
            raise ValueError(f"attempt {attempt} records that it started from attempt {following}, which is later")
        attempt, until = following, base.step
    return out


def _is_fork(base: Base, fork: ForkSource | None) -> bool:
    """Return True if the base is the fork's source, a checkpoint of another job."""
    # A digest covers the job's id, so no checkpoint of this job has the fork's digest.
    return fork is not None and base.digest == fork.digest
