"""DDP communication hooks as data: specs, construction, exact capture and restore.

Torch-free: ``specs``, ``registry``, ``summary``, ``errors``. Everything that touches tensors lives in modules that import torch
themselves. The package stands alone: a training script of your own needs nothing else of Ratchet to resume a hook bit for bit.
Save what ``capture`` gives, on every rank, together with model, optimizer and RNG; build with the recorded layout and restore:

    import json
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file, save_file

    from ratchet_hooks.build import close_group, managed_ddp
    from ratchet_hooks.codec import decode, encode
    from ratchet_hooks.specs import PowerSGDSpec


    def train(directory: Path, steps: int) -> torch.nn.Module:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        tensors_file = directory / f"rank-{rank}.safetensors"
        json_file = directory / f"rank-{rank}.json"
        saved = json.loads(json_file.read_text()) if json_file.exists() else None

        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8))
        ddp, hook = managed_ddp(
            model,
            PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3),
            ddp={"bucket_cap_mb": 25},
            device=torch.device("cpu"),
            recorded_layout=saved["hook"]["layout"] if saved else None,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = 0
        if saved is not None:  # after managed_ddp: DDP has just broadcast rank 0's parameters and buffers
            stored = load_file(tensors_file)
            mine = {n.removeprefix("own/"): t for n, t in stored.items() if n.startswith("own/")}
            state = decode(mine, saved["own"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            hook.restore({n.removeprefix("hook/"): t for n, t in stored.items() if n.startswith("hook/")}, saved["hook"])
            torch.set_rng_state(state["rng"])
            step = state["step"]

        while step < steps:
            data = torch.Generator().manual_seed(1000 * step + rank)
            ddp(torch.randn(32, 64, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1

        own = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": step}
        own_tensors, own_json = encode(own, where="own")
        hook_tensors, hook_json = hook.capture()
        tensors = {f"own/{n}": t for n, t in own_tensors.items()} | {f"hook/{n}": t for n, t in hook_tensors.items()}
        save_file(tensors, tensors_file)
        json_file.write_text(json.dumps({"own": own_json, "hook": hook_json}))
        return model


    if __name__ == "__main__":  # torchrun --nproc-per-node 2 train.py
        dist.init_process_group("gloo")
        train(Path("."), steps=20)
        close_group()
"""
