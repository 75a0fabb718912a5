"""How a rank ends: the cause behind an exception, its exit code, the result on the disk, and the way out of the process."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from typing import Final, NoReturn

import torch

from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.exit_codes import EXIT_CHECKPOINT_ERROR, EXIT_EXCEPTION, EXIT_USER_ERROR, own_code
from ratchet_contract.messages import RankResult
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_hooks.build import UnsupportedModel
from ratchet_hooks.errors import advice_on
from ratchet_worker.files import release
from ratchet_worker.results import write_rank_result
from ratchet_worker.user_code import shadowed

EXIT_CODES: Final = {
    Cause.USER_ERROR: EXIT_USER_ERROR,
    Cause.CHECKPOINT_ERROR: EXIT_CHECKPOINT_ERROR,
    Cause.OOM: EXIT_EXCEPTION,
    Cause.EXCEPTION: EXIT_EXCEPTION,
}


_PARSERS: Final = (
    argparse.ArgumentParser.parse_args,
    argparse.ArgumentParser.parse_known_args,
    argparse.ArgumentParser.parse_intermixed_args,
    argparse.ArgumentParser.parse_known_intermixed_args,
)


class ScriptExit(RuntimeError):
    """A script that ended by ``sys.exit`` with something else than 0. ``code``: what it gave; ``cause``: of the attempt's end."""

    def __init__(self, exit_: SystemExit) -> None:
        refusal = _refused_arguments(exit_)
        self.code, self.cause = exit_.code, Cause.EXCEPTION if refusal is None else Cause.USER_ERROR
        super().__init__(
            f"the script ended with sys.exit({exit_.code!r})"
            if refusal is None
            else f"the script does not take its arguments: {refusal}"
        )


def _refused_arguments(exit_: SystemExit) -> str | None:
    """What the script's ``argparse`` says, where it ended the script: no retry heals that."""
    frames = {frame.f_code: frame for frame, _ in traceback.walk_tb(exit_.__traceback__)}
    error = frames.get(argparse.ArgumentParser.error.__code__)
    if error is None or not any(parse.__code__ in frames for parse in _PARSERS):  # else the script's own call of error
        return None
    return str(error.f_locals["message"])


def exit_code_of(error: BaseException, cause: Cause) -> int:
    """What the rank's process ends with: the code that the user's code gave to ``sys.exit``, where it may have a meaning of its
    own (``policy.exit_codes``), else the cause's."""
    given = own_code(error.code) if isinstance(error, ScriptExit | SystemExit) else None
    return EXIT_CODES[cause] if given is None else given


def cause_of(error: BaseException) -> tuple[Cause, str]:
    """Cause of an attempt that ended with ``error``, and a sentence for people. The causes are those of ``EXIT_CODES``."""
    if isinstance(error, UserError):
        return Cause.USER_ERROR, error.detail
    if isinstance(error, CheckpointError):
        return Cause.CHECKPOINT_ERROR, error.detail
    if isinstance(error, ScriptExit):
        return error.cause, str(error)
    if isinstance(error, SystemExit):
        return Cause.EXCEPTION, f"the user's code called sys.exit({error.code!r}) in the middle of its work"
    if isinstance(error, UnsupportedModel):  # seen only when training began
        return Cause.USER_ERROR, str(error)
    if advice := advice_on(error) or shadowed(error):
        return Cause.USER_ERROR, f"{advice} ({type(error).__name__}: {error})"[:4000]
    text = error.detail if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Cause.OOM, f"out of memory: {text}"
    return Cause.EXCEPTION, text[:4000]


def write_result(paths: AttemptPaths, result: RankResult) -> None:
    """Into the room that was kept for it. A disk that still refuses it is told of in the log: the rank ends all the same."""
    path = paths.rank_result(result.rank)
    release(path)
    try:
        write_rank_result(path, result)
    except OSError as error:
        with suppress(OSError):
            print(f"ratchet: the result could not be written: {error}", file=sys.stderr, flush=True)


def leave_process(code: int) -> NoReturn:
    """Without destructors: torn down carelessly, torch's threads abort the process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
