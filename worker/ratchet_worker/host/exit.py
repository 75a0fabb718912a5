"""How a rank ends: the cause that an exception stands for, the exit code, and the result file."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from typing import Final, NoReturn

import torch

from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.exit_codes import EXIT_CHECKPOINT_ERROR, EXIT_EXCEPTION, EXIT_USER_ERROR, script_exit_code
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import RankResult
from ratchet_hooks.errors import advice_on
from ratchet_hooks.manage.managed_ddp import UnsupportedModel
from ratchet_worker.host.user_code import shadowing_advice
from ratchet_worker.ipc.disk_reserve import release
from ratchet_worker.ipc.log_lines import print_to_log
from ratchet_worker.ipc.result_files import write_rank_result

EXIT_CODES: Final = {
    Cause.USER_ERROR: EXIT_USER_ERROR,
    Cause.CHECKPOINT_ERROR: EXIT_CHECKPOINT_ERROR,
    Cause.OOM: EXIT_EXCEPTION,
    Cause.EXCEPTION: EXIT_EXCEPTION,
}

_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: "
"""In the message of the ``RuntimeError`` that torch raises if memory for a tensor on the CPU cannot be allocated."""

_PARSERS: Final = (
    argparse.ArgumentParser.parse_args,
    argparse.ArgumentParser.parse_known_args,
    argparse.ArgumentParser.parse_intermixed_args,
    argparse.ArgumentParser.parse_known_intermixed_args,
)


class ScriptExit(RuntimeError):
    """Raised for a script that called ``sys.exit`` with the error ``code``. ``cause``: ``user-error`` if ``argparse`` refused its
    arguments, else ``exception``."""

    def __init__(self, exit_: SystemExit) -> None:
        refusal = _refused_arguments(exit_)
        self.code, self.cause = exit_.code, Cause.EXCEPTION if refusal is None else Cause.USER_ERROR
        super().__init__(
            f"the script ended with sys.exit({exit_.code!r})"
            if refusal is None
            else f"the script does not take its arguments: {refusal}"
        )


def _refused_arguments(exit_: SystemExit) -> str | None:
    """Return the message with which the script's ``argparse`` refused its arguments; None if the traceback shows no such
    refusal."""
    frames = {frame.f_code: frame for frame, _ in traceback.walk_tb(exit_.__traceback__)}
    error = frames.get(argparse.ArgumentParser.error.__code__)
    if error is None or not any(parse.__code__ in frames for parse in _PARSERS):  # else the script itself called it
        return None
    return str(error.f_locals["message"])


def exit_code_of(error: BaseException, cause: Cause) -> int:
    """Return the exit code of the rank's process after ``error``: that of the user's ``sys.exit``, if usable, else that of
    ``cause``."""
    given = script_exit_code(error.code) if isinstance(error, ScriptExit | SystemExit) else None
    return EXIT_CODES[cause] if given is None else given


def cause_of(error: BaseException) -> tuple[Cause, str]:
    """Return the cause for which the rank ends with ``error``, and a message. ``user-error``: a retry cannot help."""
    if isinstance(error, UserError):
        return Cause.USER_ERROR, error.detail
    if isinstance(error, CheckpointError):
        return Cause.CHECKPOINT_ERROR, error.detail
    if isinstance(error, ScriptExit):
        return error.cause, str(error)
    if isinstance(error, SystemExit):
        return Cause.EXCEPTION, f"the user's code called sys.exit({error.code!r}) in the middle of its work"
    if isinstance(error, UnsupportedModel):  # detected only when training begins
        return Cause.USER_ERROR, str(error)
    if advice := advice_on(error) or shadowing_advice(error) or _mlflow_advice(error):
        return Cause.USER_ERROR, f"{advice} ({type(error).__name__}: {error})"[:4000]
    text = error.detail if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}"
    cpu = isinstance(error, RuntimeError) and _CPU_ALLOCATOR in text
    if cpu or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Cause.OOM, f"out of memory: {text}"[:4000]
    return Cause.EXCEPTION, text[:4000]


def _mlflow_advice(error: BaseException) -> str | None:
    """Return advice if mlflow's ``start_run`` refuses MLFLOW_RUN_ID because of the script's ``set_experiment``; else None."""
    if "does not match environment run ID" not in str(error):
        return None
    return (
        "mlflow.set_experiment of the script names another experiment than the job's run (MLFLOW_RUN_ID) is in, which exists "
        "before the script starts: set MLFLOW_EXPERIMENT_NAME to the script's experiment in `env` of the spec"
    )


def write_result(paths: AttemptPaths, result: RankResult) -> None:
    """Write the rank's result file, freeing the disk space reserved for it. A failed write is only printed."""
    path = paths.rank_result(result.rank)
    release(path)
    try:
        write_rank_result(path, result)
    except OSError as error:
        print_to_log(f"ratchet: the result could not be written: {error}")


def exit_process(code: int) -> NoReturn:
    """End the process with ``code`` at once, after flushing ``sys.stdout`` and ``sys.stderr``. Exit handlers do not run."""
    for name in ("stdout", "stderr"):
        with suppress(Exception):
            getattr(sys, name).flush()
    # At interpreter shutdown, torch's threads might abort the process.
    os._exit(code)
