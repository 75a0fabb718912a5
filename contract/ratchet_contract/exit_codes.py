"""Reserved exit codes of ranks and agents. A launcher derives the cause of an end from such a code if it has no better record."""

from __future__ import annotations

from typing import Final

from ratchet_contract.phases import Cause, Outcome

EXIT_COMPLETED: Final = 0
EXIT_EXCEPTION: Final = 1
EXIT_CHECKPOINT_ERROR: Final = 74  # sysexits EX_IOERR
EXIT_LEASE_LOST: Final = 75  # sysexits EX_TEMPFAIL
EXIT_USER_ERROR: Final = 78  # sysexits EX_CONFIG: permanent, never retried
EXIT_HANG: Final = 124
EXIT_PREEMPTED: Final = 143  # 128 + SIGTERM: stopped at an agreed step with a checkpoint

CAUSE_OF_EXIT_CODE: Final[dict[int, Cause]] = {
    EXIT_COMPLETED: Cause.COMPLETED,
    EXIT_EXCEPTION: Cause.EXCEPTION,
    EXIT_CHECKPOINT_ERROR: Cause.CHECKPOINT_ERROR,
    EXIT_LEASE_LOST: Cause.LEASE_LOST,
    EXIT_USER_ERROR: Cause.USER_ERROR,
    EXIT_HANG: Cause.HANG,
    EXIT_PREEMPTED: Cause.SIGTERM,
}
"""The meaning of a code if no better record exists; a negative code is ``-signal`` and means rank-killed."""


RESERVED: Final[dict[int, str]] = {
    EXIT_COMPLETED: "success",
    EXIT_EXCEPTION: "any uncaught exception",
    EXIT_CHECKPOINT_ERROR: "checkpoint-error",
    EXIT_LEASE_LOST: "lease-lost",
    EXIT_USER_ERROR: "user-error, which is never retried",
    EXIT_HANG: "hang",
    EXIT_PREEMPTED: "preempted",
}
"""Codes that a job's own code cannot redefine, and why."""


def script_exit_code(code: object) -> int | None:
    """Return ``code``, the argument of ``sys.exit``, if it is an unreserved integer from 1 to 255, else None."""
    if isinstance(code, bool) or not isinstance(code, int) or not 0 < code <= 255 or code in RESERVED:
        return None
    return code


def exit_code_of(cause: Cause) -> int:
    """Return the exit code for ``cause``: that of an agent, or of a rank whose script has not set an exit code itself."""
    codes = {
        Cause.COMPLETED: EXIT_COMPLETED,
        Cause.CHECKPOINT_ERROR: EXIT_CHECKPOINT_ERROR,
        Cause.LEASE_LOST: EXIT_LEASE_LOST,
        Cause.USER_ERROR: EXIT_USER_ERROR,
        Cause.HANG: EXIT_HANG,
    }
    if cause in codes:
        return codes[cause]
    stopped = cause.outcome in (Outcome.PREEMPTED, Outcome.SUSPENDED, Outcome.CANCELLED)
    return EXIT_PREEMPTED if stopped else EXIT_EXCEPTION
