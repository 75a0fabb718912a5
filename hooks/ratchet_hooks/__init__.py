"""DDP communication hooks as data: specs, construction, exact capture and restore.

Torch-free: ``specs``, ``registry``, ``summary``, ``errors``. Every module that uses tensors imports torch itself. The package can
be used alone: your own training script needs nothing else of Ratchet to resume a hook bit for bit.

If other code creates DDP, or if the call of DDP must not change, three calls are enough (``ratchet_hooks.manage.register``
documents their arguments)::

    ratchet_hooks.register(ddp_model, (powersgd_state, powerSGD_hook))      # in place of ddp_model.register_comm_hook
    saved = ratchet_hooks.capture(ddp_model)                                # on every rank, with model, optimizer and RNG
    ratchet_hooks.restore(ddp_model, saved)                                 # on every rank, before the first forward

A script that creates DDP and the hook together calls ``managed_ddp`` instead. It saves the result of ``hook.capture()`` in the
same way, and passes this result to ``managed_ddp`` after a restart. (The following script saves into one file per rank;
examples/adoption/1_hooks also handles ranks that are killed while they save.)

    from pathlib import Path

    import torch
    import torch.distributed as dist

    from ratchet_hooks.build import close_group, managed_ddp
    from ratchet_hooks.files import load_state, save_state
    from ratchet_hooks.specs import PowerSGDSpec


    def train(directory: Path, steps: int) -> torch.nn.Module:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        file = directory / f"rank-{rank}.safetensors"
        saved = load_state(file) if file.exists() else None

        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8))
        ddp, hook = managed_ddp(
            model,
            PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3),
            ddp={"bucket_cap_mb": 25},
            captured=saved["hook"] if saved else None,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = 0
        if saved is not None:  # after managed_ddp: DDP has just broadcast rank 0's parameters and buffers
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["rng"])
            step = saved["step"]

        while step < steps:
            data = torch.Generator().manual_seed(1000 * step + rank)
            ddp(torch.randn(32, 64, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": step}
        save_state(file, {**state, "hook": hook.capture()})
        return model


    if __name__ == "__main__":  # torchrun --nproc-per-node 2 train.py
        dist.init_process_group("gloo")
        train(Path("."), steps=20)
        close_group()
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
"""Version of ratchet-hooks and of ratchet-train."""

__all__ = ["capture", "register", "restore"]

_LAZY = dict.fromkeys(__all__, "ratchet_hooks.manage.register")  # names whose module imports torch


def __getattr__(name: str) -> Any:
    """Return ``register``, ``capture`` or ``restore``, whose module imports torch at the first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
