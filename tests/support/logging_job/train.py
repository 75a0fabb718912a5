"""A script that logs by itself: ``train.py LOGGER STEPS PLACE...``. At each PLACE, ``ATTEMPT:STEP``, rank 0 is killed at the end
of that step, after it has logged it. The values go to ``truth.jsonl``, too, a line per step and attempt."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ratchet import Session

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Log = Callable[[int, float], None]


def session_writer(session: Session) -> Log:
    writer = session.summary_writer()
    writer.add_hparams({"lr": 0.1}, {})
    nested: list[SummaryWriter] = []

    def log(step: int, loss: float) -> None:
        writer.add_scalar("loss", loss, step)
        writer.add_scalars("both", {"loss": loss, "double": 2 * loss}, step)
        if step % 4 == 3:
            writer.add_scalar("of epoch", loss, step // 4)  # counts in another way
            with session.summary_writer() as again:
                again.add_scalar("again", loss, step)
        if step >= 7:
            nested[:] = nested or [session.summary_writer(f"{writer.get_logdir()}/val")]
            nested[0].add_scalar("val", loss, step)

    return log


def torch_writer(session: Session, *, purge: bool) -> Log:
    if session.rank != 0:
        return lambda *_: None
    from torch.utils.tensorboard import SummaryWriter

    writer: list[SummaryWriter] = []

    def log(step: int, loss: float) -> None:
        if not writer:
            writer.append(SummaryWriter("tensorboard", purge_step=session.step if purge else None))  # type: ignore[no-untyped-call]
        writer[0].add_scalar("loss", loss, step)  # type: ignore[no-untyped-call]
        writer[0].flush()  # type: ignore[no-untyped-call]

    return log


def session_mlflow(session: Session) -> Log:
    """With mlflow's own way, under other names, as the control."""
    run = session.mlflow_run()
    if run.run_id is None:
        return lambda step, loss: run.log_metric("loss", loss, step)
    import mlflow

    mlflow.start_run()

    def log(step: int, loss: float) -> None:
        run.log_metrics({"loss": loss, "double": 2 * loss}, step)
        mlflow.log_metrics({"plain": loss}, step)

    return log


LOGGERS: dict[str, Callable[[Session], Log]] = {
    "summary_writer": session_writer,
    "purge_step": lambda session: torch_writer(session, purge=True),
    "plain": lambda session: torch_writer(session, purge=False),
    "mlflow_run": session_mlflow,
}


def main() -> None:
    kind, steps, *places = sys.argv[1:]
    attempt = int(os.environ.get("RATCHET_ATTEMPT", os.environ.get("TRY", "1")))
    with Session(checkpoint={"every_steps": 5}) as session:
        log = LOGGERS[kind](session)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        model = session.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.register(optimizer=optimizer)
        for step in session.steps(int(steps)):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(step, loss.item())
            if session.rank == 0:
                with Path("truth.jsonl").open("a") as file:
                    file.write(json.dumps([attempt, step, loss.item()]) + "\n")
                if f"{attempt}:{step}" in places:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
