"""``TrainingArguments`` of a Trainer within a Session: those that the job decides, and those that it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from transformers.trainer_utils import SaveStrategy
from transformers.training_args import TrainingArguments

from ratchet_contract.errors import UserError
from ratchet_worker.session import Session

RESUMES: Final = "the job resumes by itself, from its own checkpoints; drop it"
SEARCH: Final = "a search over hyperparameters is many jobs; submit one for each trial"
_OTHER: Final = "not supported within a Session, which trains with DDP; drop it"
_DROPPED: Final[dict[str, str]] = {
    "load_best_model_at_end": "the job's checkpoints are no Trainer's; drop it",
    "resume_from_checkpoint": RESUMES,
    "enable_jit_checkpoint": RESUMES,
    "ignore_data_skip": "a job's data go on where they were; drop it",
    "auto_find_batch_size": "another batch size would be found in each attempt; choose one",
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config", "torch_compile"), _OTHER),
    "dataloader_multiprocessing_context": "workers of a TrainLoader are spawned; drop it",
}
_DDP: Final = (
    "ddp_backend", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
    "ddp_timeout",
)  # fmt: skip


def options(session: Session) -> dict[str, Any]:
    """For ``TrainingArguments(**options(session), ...)``: device, seed; none of the Trainer's checkpoints."""
    return {"use_cpu": session.device.type == "cpu", "seed": session.seed, "save_strategy": "no"}


def refuse(args: TrainingArguments, session: Session) -> None:
    """Raises ``UserError`` for an argument that the job decides, or that no resume could honour."""
    saves = SaveStrategy(args.save_strategy).value
    if saves != "no":
        raise UserError(
            f"save_strategy: {saves!r} is refused, since a job's checkpoints are the Session's (checkpoint in the spec); "
            "TrainingArguments(**options(session), ...) says 'no'"
        )
    for name, why in _DROPPED.items():
        if getattr(args, name, None):
            raise UserError(f"{name}: {why}")
    for name in _DDP:
        if getattr(args, name, None) != getattr(TrainingArguments, name, None):  # its default
            raise UserError(f"{name}: a job's DDP is that of its spec (world, ddp); drop it")
    if args.seed != session.seed:
        raise UserError(
            f"seed: {args.seed} here, {session.seed} in the job's spec, which the order of its data follows from; "
            "TrainingArguments(**options(session), ...) has the spec's"
        )
    if args.data_seed not in (None, session.seed):
        raise UserError("data_seed: the order of a job's data follows from its seed (seed in the spec); drop it")
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise UserError(
            f"train_sampling_strategy: {args.train_sampling_strategy!r} is not supported; 'random' or 'sequential', or "
            "session.register(data=...)"
        )
    config: Any = args.accelerator_config
    if config.split_batches:
        raise UserError("accelerator_config.split_batches: register TrainLoader(..., batch_is='global') instead")
    if config.dispatch_batches:
        raise UserError("accelerator_config.dispatch_batches: every rank of a job reads its own samples; drop it")


def make_generator(collator: Any, workers: int) -> None:
    """A collator of transformers with a ``seed`` makes a generator of its own with its first batch, which is too late for a
    resume to find it: now. Raises ``UserError`` where that would be in a DataLoader worker, whose state is lost."""
    if getattr(collator, "seed", None) is None or not hasattr(collator, "create_rng"):
        return
    if workers > 0:
        raise UserError(
            "data_collator: its seed makes a generator in every DataLoader worker, whose state is lost with it; leave seed out: "
            "what the collator draws from then is seeded for every sample; or dataloader_num_workers=0"
        )
    collator.create_rng()


def refuse_own_data(trainer: type, ours: Iterable[type]) -> None:
    """Raises ``UserError`` for a class that is not one of ``ours`` and makes or orders the training data itself: the job could
    not put back where they were, and beside ``SessionTrainer`` it would not even be asked."""
    for name in ("get_train_dataloader", "_get_train_sampler"):
        if owners := [one.__name__ for one in trainer.__mro__ if name in vars(one) and one not in ours]:
            raise UserError(
                f"{name} of {owners[0]}: a job's data go through a loader whose position can be put back; drop it, and "
                "session.register(data=TrainLoader(...)) for an order or batches of your own"
            )
