"""``ratchet run --nproc 2 kills.py``: rank 1 kills itself after certain steps, once after each. ``losses.txt`` gets a line for
each step that is done: its number, and the loss after it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kills_loop import KILLS, STEPS, load, make_net, make_optimizer, train_step

from ratchet import Session

session = Session()
data, net = load(), make_net()
model, optimizer = session.prepare(net, make_optimizer(net))
for step in session.steps(STEPS):
    mark = Path(f"killed-{step}")
    if step in KILLS and session.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    loss = train_step(model, optimizer, data, step, session.rank)
    if session.rank == 0:
        with Path("losses.txt").open("a") as lines:
            print(step + 1, repr(loss), file=lines)
