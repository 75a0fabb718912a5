"""A rank's reports for the service."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, cast, get_args

import torch

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base, ResumeReport, StepDifference
from ratchet_contract.errors import UserError
from ratchet_contract.phases import NoteType
from ratchet_contract.protocol import messages as m
from ratchet_hooks.ddp.numeric_warnings import HookWarning
from ratchet_hooks.summary import HookSummary
from ratchet_worker.ipc.log_lines import now
from ratchet_worker.ipc.report_spool import Spool

_PROGRESS_SECONDS: Final = 0.5
_HOOK_SECONDS: Final = 1.0
_HOOK_SHARE: Final = 0.005
"""The largest share of a rank's time that summaries may take: computing the norm of large residuals is slow."""
_POINTS: Final = 1000
_NEVER: Final = -math.inf


class Reporter:
    """Appends one rank's messages for the service to ``spool``. ``block_if_aborting`` is called before each message, and may
    block for ever."""

    def __init__(self, spool: Spool, rank: int, block_if_aborting: Callable[[], None] = lambda: None) -> None:
        self._spool, self._rank, self._block_if_aborting = spool, rank, block_if_aborting
        self._hook_pause = _HOOK_SECONDS
        self._hook_begun_at: float | None = None
        self._progress_at = self._hook_at = _NEVER
        self._progress_step: int | None = None
        self._warned: set[str] = set()

    @property
    def rank(self) -> int:
        return self._rank

    def report_started(self, device: str, torch_version: str, start: str | None = None) -> None:
        """Send that this rank's process has started, with its pid, host, device and torch version. ``start``: how
        (``env_vars.START``)."""
        how, _, why = (start or "").partition(": ")
        self._send(
            m.Started(
                rank=self._rank,
                pid=os.getpid(),
                host=socket.gethostname(),
                at=now(),
                device=device,
                torch=torch_version,
                start=how or None,
                why=why or None,
            )
        )

    def report_training(self, base: Base, total_steps: int | None) -> None:
        """Send that training begins, from ``base``, with ``total_steps`` steps of the whole job (None: not known)."""
        self._send(m.Training(rank=self._rank, at=now(), base=base, total_steps=total_steps))

    def report_resumed(self, report: ResumeReport) -> None:
        """Send the resume report."""
        self._send(m.Resumed(rank=self._rank, at=now(), report=report))

    def metrics_due(self, step: int, total_steps: int | None) -> bool:
        """True if the metrics of ``step`` are to be sent. In a job of many or an unknown number of steps, only a part of them is
        due."""
        # By step numbers alone, so that two runs of a job send the same series.
        every = 10 if total_steps is None else max(1, total_steps // _POINTS)
        return step % every == 0 or step == total_steps or step == 1

    def report_metrics(self, step: int, values: dict[str, float]) -> None:
        """Send the metrics of ``step``, by name. Does not check ``metrics_due``."""
        self._send(m.Metrics(rank=self._rank, at=now(), step=step, values=values))

    def report_progress(
        self, step: int, total_steps: int | None, data_epoch: int | None, *, always: bool = False
    ) -> None:
        """Send progress, unless the previous progress message is less than half a second old and ``always`` is False."""
        instant = time.monotonic()
        seconds = instant - self._progress_at
        if not always and seconds < _PROGRESS_SECONDS:
            return
        done = 0 if self._progress_step is None else step - self._progress_step
        rate = done / seconds if done > 0 and seconds > 0 else None
        self._progress_at, self._progress_step = instant, step
        self._send(
            m.Progress(
                rank=self._rank,
                at=now(),
                step=step,
                total_steps=total_steps,
                data_epoch=data_epoch,
                steps_per_second=rate,
            )
        )

    def hook_due(self) -> bool:
        """True if a summary of the hook is due: about every second, or less often if making summaries is slow."""
        instant = time.monotonic()
        due = instant - self._hook_at >= self._hook_pause
        if due:
            # Measures until ``report_hook`` how long making the summary takes.
            self._hook_begun_at = instant
        return due

    def report_hook(
        self, summary: HookSummary, warnings: Iterable[HookWarning] = (), times: m.StepTimes | None = None
    ) -> None:
        """Send the hook's summary with the step times since the last report, and as a note each of ``warnings`` whose text was
        not sent before."""
        self._hook_at = time.monotonic()
        if self._hook_begun_at is not None:
            self._hook_pause = max(_HOOK_SECONDS, (self._hook_at - self._hook_begun_at) / _HOOK_SHARE)
            self._hook_begun_at = None
        self._send(m.HookState(rank=self._rank, at=now(), summary=summary, times=times))
        for warning in warnings:
            text = str(warning)
            if text not in self._warned:
                self._warned.add(text)
                self._send_note(f"hook-{warning.code}", text, {"parameter": warning.parameter})

    def report_saved_hook(self, summary: HookSummary) -> None:
        """Send the hook's summary of a saved step, apart from the periodic summaries."""
        self._send(m.HookState(rank=self._rank, at=now(), summary=summary))

    def report_redone_steps(
        self,
        world_size: int,
        steps: int,
        compared: int,
        equal: int,
        difference: StepDifference | None,
        reason: str | None,
    ) -> None:
        """Send how many of ``steps`` redone steps were compared and were equal so far. ``reason``: why steps are not compared."""
        self._send(
            m.RedoneSteps(
                rank=self._rank, at=now(), world_size=world_size, steps=steps, compared=compared, equal=equal,
                first_difference=difference, reason=reason,
            )
        )  # fmt: skip

    def report_committed(self, manifest: Manifest, seconds: float, stall: float | None = None) -> None:
        """Send that a checkpoint was committed. ``seconds``: duration of the save; ``stall``: its ``Save.stall``, if known."""
        self._send(
            m.CheckpointCommitted(
                rank=self._rank, at=now(), step=manifest.step, attempt=manifest.attempt, digest=manifest.digest,
                size=manifest.size, files=len(manifest.files), seconds=seconds, stall=stall, reason=manifest.reason,
                parent=manifest.parent, finished=manifest.finished,
            )
        )  # fmt: skip

    def report_checkpoint_failed(self, step: int, error: str) -> None:
        """Send that the checkpoint of ``step`` could not be saved."""
        self._send(m.CheckpointFailed(rank=self._rank, at=now(), step=step, error=error))

    def report_deleted(self, step: int, attempt: int) -> None:
        """Send that a checkpoint, by step and attempt, was deleted."""
        self._send(m.CheckpointDeleted(rank=self._rank, at=now(), step=step, attempt=attempt))

    def report_quarantined(self, step: int, attempt: int, error: str) -> None:
        """Send that a damaged checkpoint, by step and attempt, was moved to the quarantine."""
        self._send(m.Quarantined(rank=self._rank, at=now(), step=step, attempt=attempt, error=error))

    def alert(self, step: int, title: str, text: str, level: str) -> None:
        """Send an alert of the script. ``title`` and ``text`` are cut at 200 and 1000 characters, with ``...`` at the end, and
        the title becomes one line. Raises ``UserError`` for an unknown level, and for what is no text or an empty title."""
        if level not in get_args(m.AlertLevel):
            raise UserError(f"an alert's level is {', '.join(get_args(m.AlertLevel))}, not {str(level)[:40]!r}")
        if not isinstance(title, str) or not isinstance(text, str) or not title.strip():
            raise UserError("an alert needs a title that is text and not empty; its text is text, too: use str(value)")
        title, text = _cut(" ".join(title.split()), 200), _cut(text.strip(), 1000)
        self._send(
            m.Alert(rank=self._rank, at=now(), step=step, title=title, text=text, level=cast("m.AlertLevel", level))
        )

    def note(self, type_: NoteType, message: str, **data: Any) -> None:
        """Send an event for the job's history. ``message`` is cut at 4000 characters; ``data``: further fields of the event."""
        self._send_note(type_, message, data)

    def _send_note(self, type_: str, message: str, data: dict[str, Any]) -> None:
        self._send(m.Note(rank=self._rank, at=now(), type=type_, message=message[:4000], data=data))

    def close(self) -> None:
        self._spool.close()

    def _send(self, message: m.RankMessage) -> None:
        """Append a message to the spool. May block for ever (``block_if_aborting``)."""
        self._block_if_aborting()
        self._spool.append(message)


Reason = Literal["schedule", "stop", "request", "end", "first", "memory"]


def _cut(text: str, most: int) -> str:
    """Return ``text``, with ``...`` at the end if it was longer than ``most`` characters, and ``?`` for what is no character."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."


def metric_value(name: str, value: float | torch.Tensor) -> float:
    """Return a metric's value as a float; may wait for the GPU. Raises ``UserError`` for an invalid name, or if ``float`` fails
    for a value other than a real tensor of one element."""
    if not name or len(name) > 200:
        raise UserError(f"a metric needs a name of 1 to 200 characters, not {name[:20]!r}")
    try:
        return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    except OverflowError as error:  # an int of any size
        raise UserError(
            f"metric {name!r} is too large for a float: log a smaller number, such as its logarithm"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            if value.is_complex():
                kind = f"complex {kind}"
            elif value.numel() == 1:
                raise  # an error of the device, not of the value
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f" {value!r:.60}"
        raise UserError(
            f"metric {name!r} is a number or a tensor of one element, not a {kind}{shape}: log each number by a name of its "
            "own, or their mean"
        ) from error
