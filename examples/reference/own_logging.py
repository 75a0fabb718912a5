"""A loop that keeps its own loggers, TensorBoard and MLflow: ``script: [own_logging.py]`` in the spec."""

from __future__ import annotations

import torch
from torch import nn

from ratchet import Session


def main() -> None:
    with Session() as session:
        net = nn.Linear(8, 2)
        model = session.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.register(optimizer=optimizer)
        writer = session.summary_writer()
        run = session.mlflow_run()
        for step in session.steps(12):
            loss = model(torch.randn(4, 8, device=session.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            writer.add_scalar("loss", loss, step)
            run.log_metric("loss", loss.item(), step)


if __name__ == "__main__":
    main()
