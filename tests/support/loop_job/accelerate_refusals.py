"""What ``ratchet.accelerate`` refuses, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ratchet.accelerate import Accelerator
from ratchet_contract.errors import UserError


def refused(what: Callable[[], object]) -> None:
    try:
        what()
    except UserError as error:
        print("refused:", error.detail, flush=True)
    else:
        print("refused: nothing", flush=True)


given: list[dict[str, Any]] = [
    {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
    {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]},
    {"dynamo_backend": "eager"},
    {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)},
]
for arguments in given:
    refused(lambda arguments=arguments: Accelerator(**arguments))  # type: ignore[misc]
    AcceleratorState._reset_state(reset_partial_state=True)

accelerator = Accelerator()
samples = TensorDataset(torch.randn(12, 4))
config = accelerator.dataloader_config
config.dispatch_batches = True
refused(lambda: accelerator.prepare(DataLoader(samples, 4)))
config.dispatch_batches, config.even_batches = None, False
refused(lambda: accelerator.prepare(DataLoader(samples, 4)))
config.even_batches = True
net = nn.Linear(4, 1)
optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
refused(lambda: next(accelerator.epochs(1)))
model, optimizer, test, loader = accelerator.prepare(net, optimizer, DataLoader(samples, 4), DataLoader(samples, 3))
refused(lambda: accelerator.skip_first_batches(test, 1))
refused(lambda: accelerator.join_uneven_inputs([model]))
refused(lambda: next(iter(test)))


def over_another() -> None:
    for _ in accelerator.epochs(1):
        refused(lambda: accelerator.load_state("there"))
        for (x,) in loader:
            refused(lambda x=x: accelerator.backward(model(x).sum()))  # type: ignore[misc]
            model(x).sum().backward()
            optimizer.step()


refused(over_another)
