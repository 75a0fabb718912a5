"""Scripts that ``ratchet init --patch`` has changed, killed within an epoch or at a step: they end as the unchanged ones do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from tests.support.fork_server import RANKS

HEAD = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

def dies(*place):
    if os.environ.get("DIES") == str(place):
        os._exit(9)

def end(*values):
    print(repr(values), flush=True)
    os._exit(0)  # torch's own end of a group hangs now and then

"""
EPOCHS = """\
best = 0

def fit(model, loader, optimizer, epoch):
    total = 0.0
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dies(epoch, number)
        total = loss.item()
    return total

def main():
    global best
    ddp = "RANK" in os.environ
    if ddp:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 2, (48,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ddp:
        model = DDP(model)
    history, patience = [], 0
    for epoch in range(4):
        loss = fit(model, loader, optimizer, epoch)
        history.append(loss)
        patience = patience + 1 if loss > 0.6 else patience
        best = max(best, loss)
        if history[-1] > history[0]:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    raw = model.module if ddp else model
    weights = sum(p.double().sum().item() for p in raw.parameters())
    end(best, history, patience, epoch, weights)

main()
"""
STEPS = """\
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = DDP(net)
draws = torch.Generator().manual_seed(1)
ahead, best, seen = torch.randn(4, 8, generator=draws), 9.0, torch.zeros(12)
step = 0
while True:
    x, ahead = ahead, torch.randn(4, 8, generator=draws)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    best = min(best, loss.item())
    seen[step] = best
    dies(step)
    step += 1
    if step >= 12:
        break
end(step, best, seen.tolist(), net.weight.double().sum().item())
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def ends(script: Path, code: int = 0, **variables: str) -> str:
    """What ``script`` prints before it exits with ``code``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET")} | {"OMP_NUM_THREADS": "1"} | variables
    with (script.parent / "out").open("w+") as out, (script.parent / "err").open("w+") as err:
        process = RANKS.start(
            [sys.executable, str(script)], out.fileno(), errors=err.fileno(), env=env, cwd=script.parent
        )
        found = process.wait(120)
        out.seek(0)
        err.seek(0)
        assert found == code, (found, err.read())
        return out.read()


@pytest.mark.parametrize(
    ("text", "places"), [(EPOCHS, ["(1, 3)", "(3, 2)"]), (STEPS, ["(5,)", "(8,)"])], ids=["epochs", "steps"]
)
def test_patched_script_killed_and_restarted_ends_as_the_unpatched_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, places: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + text)
    plain = ends(script, **ALONE)
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["init", "--patch", "train.py"])
    assert printed.exit_code == 0, printed.stderr
    subprocess.run(["patch", "-p0"], input=printed.stdout_bytes, check=True, timeout=30, capture_output=True)
    script.write_text(script.read_text().replace("Session()", 'Session(checkpoint={"every_steps": 2})'))
    for place in places:
        assert ends(script, 9, DIES=place) == ""
    assert ends(script) == plain
    assert "resumed exactly from step " in (tmp_path / "err").read_text()
    assert ends(script) == plain, "started again after its end"
