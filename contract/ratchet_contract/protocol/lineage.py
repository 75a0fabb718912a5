"""The checkpoints that a job may be resumed from: a pure function of what its attempts recorded.

Every attempt records its base, the checkpoint that it starts from, before it trains. So the checkpoints that lead to the current
state form a chain. The newest attempt k that recorded a base owns its own checkpoints of steps above base_k.step. Below that,
base_k is a checkpoint of an earlier attempt j, which owns its checkpoints of the steps in (base_j.step, base_k.step]; and so on
to the start.

Any other checkpoint on disk is not an ancestor. Examples are checkpoints that a zombie wrote above the point from which a later
attempt started, and those of a branch that an explicit "resume from step S" left. If the newest manifest simply counted, both
would be accepted.

The lineage is a list of ``Segment``, newest first. The numbers of attempts strictly decrease along the chain.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.protocol.messages import ForkSource


def lineage(
    bases: Mapping[int, Base], *, resume_from: Base | None = None, fork: ForkSource | None = None
) -> list[Segment]:
    """Return the segments of checkpoints that the next attempt may start from, newest first. Empty if ``resume_from`` requests a
    start from scratch, or if it is None and no attempt has recorded a base; then none of the job's own checkpoints may be used.

    - ``bases``: the recorded base by attempt number; attempts that died before they recorded one are missing.
    - ``resume_from``: an explicit request that no attempt has used yet: the chain begins at exactly that checkpoint.
    - ``fork``: the source of a forked job. It is another job's checkpoint: the chain ends before it, and no segment contains it.

    Raises ``ValueError`` if an attempt of the chain recorded a base of its own or of a later attempt.
    """
    if resume_from is not None:
        attempt, until = resume_from.attempt, resume_from.step
        return _chain(bases, attempt, until, fork) if attempt is not None else []
    if not bases:
        return []
    return _chain(bases, max(bases), None, fork)


def _chain(bases: Mapping[int, Base], attempt: int | None, until: int | None, fork: ForkSource | None) -> list[Segment]:
    """Return the segments from ``attempt`` back to the start. ``until``: the newest step of ``attempt`` that belongs to the
    lineage; None: all steps. If an attempt of the chain has no recorded base, the chain ends with a segment for only the
    checkpoint of step ``until`` of this attempt."""
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
    """True if the base is the fork's source, that is, a checkpoint of another job. A digest covers the job's id, so a base with
    the fork's digest is never one of this job's own."""
    return fork is not None and base.digest == fork.digest
