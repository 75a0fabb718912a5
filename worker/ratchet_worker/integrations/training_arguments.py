"""Checks the ``TrainingArguments`` of a Trainer in a job, turns four of them for DDP into arguments of the Session, and gives its
data collator a generator."""

from __future__ import annotations

from typing import Any, Final

from transformers.training_args import TrainingArguments

from ratchet_contract.errors import UserError

SEARCH: Final = "a search over hyperparameters is many jobs; submit one for each trial"
_DDP_ALONE: Final = "not supported within a job, which trains with DDP; drop it"
_REFUSED: Final[dict[str, str]] = {
    "enable_jit_checkpoint": "the job saves itself when it is stopped, and resumes by itself; drop it",
    "ignore_data_skip": "a job's data continue at their position; drop it",
    "auto_find_batch_size": "another batch size would be found in each attempt; choose one",
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), _DDP_ALONE),
}
_DDP: Final = {
    "ddp_backend": "backend",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
}
"""Argument names, mapped to their names in ``ddp`` of the spec."""


def check_arguments(args: TrainingArguments) -> None:
    """Raise ``UserError`` for an argument that a job cannot honour, and for one process with several GPUs."""
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise UserError(f"{name}: {why}")
    config: Any = args.accelerator_config
    if config.dispatch_batches:
        raise UserError("accelerator_config.dispatch_batches: every rank of a job reads its own samples; drop it")
    if args.n_gpu > 1:
        raise UserError(
            f"one process sees {args.n_gpu} GPUs, on which the Trainer would use DataParallel: start one process for each "
            f"(torchrun --nproc-per-node {args.n_gpu}), or let it see one (CUDA_VISIBLE_DEVICES=0)"
        )


def ddp_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return ``ddp`` for ``Session``, from the DDP arguments in ``_DDP`` that are set."""
    return {theirs: value for ours, theirs in _DDP.items() if (value := getattr(args, ours)) is not None}


def make_generator(collator: Any, workers: int) -> None:
    """Create the generator of a transformers collator that has a ``seed``; do nothing for another collator. Raises ``UserError``
    if ``workers`` is not 0, since each DataLoader worker would create a generator of its own."""
    if getattr(collator, "seed", None) is None or not hasattr(collator, "create_rng"):
        return
    if workers > 0:
        raise UserError(
            "data_collator: its seed makes a generator in every DataLoader worker, which a resume cannot restore; leave seed "
            "out: it then draws from torch's own, which is restored; or dataloader_num_workers=0"
        )
    # It would be made with the first batch, which is too late for a resume to find it.
    collator.create_rng()
