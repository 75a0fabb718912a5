"""Exit codes that scripts may rely on."""

from __future__ import annotations

import textwrap
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratchet_contract.errors import RatchetError


class Exit(IntEnum):
    """The exit codes of the command line. ``MEANINGS`` explains them."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    REFUSED = 5
    UNREACHABLE = 6
    DEADLINE = 7
    FAULT = 8
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.JOB_FAILED: (
        "the awaited job failed, was cancelled, or ended in another phase than requested; a checkpoint is damaged; "
        "`doctor --exactness`, `prove` or `compare` found a difference"
    ),
    Exit.USAGE: "wrong command line; a name that may mean several jobs; `checkpoints verify` could not read a "
    "checkpoint",
    Exit.NOT_FOUND: (
        "no such job, attempt, checkpoint, hook or file; `prove`: the runs are equal, but a resume was not "
        "exact, or something in the spec was not exercised"
    ),
    Exit.CONFLICT: "the action does not fit the job's phase",
    Exit.REFUSED: "invalid spec or configuration, or a request the service refuses; `init --patch`: some changes are left to you",
    Exit.UNREACHABLE: "the service does not answer",
    Exit.DEADLINE: "the timeout of a wait has expired; the job continues",
    Exit.FAULT: "the service failed, or something is missing from this installation; a check of `doctor` failed",
    Exit.INTERRUPTED: "ended by Ctrl-C; the job continues. `run` ended by Ctrl-C or SIGTERM; the job of `run` is suspended",
}


def exit_code_for(error: RatchetError) -> Exit:
    """Return the exit code of a command that ends with ``error``, by the error's class; ``FAULT`` for other classes."""
    from ratchet_client.http.errors import AmbiguousName, DeadlineReached, ServiceUnreachable
    from ratchet_contract.errors import Conflict, NotFound, Refused, SpecError

    table: tuple[tuple[type[RatchetError], Exit], ...] = (
        (AmbiguousName, Exit.USAGE), (NotFound, Exit.NOT_FOUND), (Conflict, Exit.CONFLICT), (SpecError, Exit.REFUSED),
        (Refused, Exit.REFUSED), (ServiceUnreachable, Exit.UNREACHABLE), (DeadlineReached, Exit.DEADLINE),
    )  # fmt: skip
    return next((code for kind, code in table if isinstance(error, kind)), Exit.FAULT)


def help_lines(width: int) -> list[str]:
    """Return the lines that list the exit codes and their meanings in ``--help``, wrapped to ``width`` columns."""
    lines = [" Exit codes:"]
    for code, text in MEANINGS.items():
        lines += textwrap.wrap(text, width - 1, initial_indent=f" {code.value:>3}  ", subsequent_indent=" " * 6)
    return lines
