"""``ratchet run --nproc 2 kills.py``: rank 1 kills itself after certain steps, once after each. Writes ``losses.txt``."""

from __future__ import annotations

from kills_loop import STEPS, kill_once, load, make_net, make_optimizer, train_step, write_loss

from ratchet import Session

session = Session()
data, net = load(), make_net()
model, optimizer = session.prepare(net, make_optimizer(net))
for step in session.steps(STEPS):
    kill_once(step, session.rank)
    loss = train_step(model, optimizer, data, step, session.rank)
    write_loss(step + 1, loss, session.rank)
