"""Hugging Face's Trainer: its checkpoints with every rank's hook state, resumed bit for bit.

    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=data)
    manage(trainer, "powerSGD", start_powerSGD_iter=100)
    trainer.train(resume_from_checkpoint=True)

``manage`` adds a ``TrainerCallback`` that registers the hook, and writes ``ratchet_hook_<rank>.safetensors`` into each
``checkpoint-<step>`` on every rank. Do not set ``ignore_data_skip``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError("transformers is not installed: pip install 'transformers[torch]'") from error

from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_hooks.errors import HookStateError, UnsupportedModel
from ratchet_hooks.integrations.rank_state import RankFile, check_equal_replicas
from ratchet_hooks.manage.managed_hook import ManagedHook
from ratchet_hooks.manage.register import Hook, hook_of, register, resolve


def manage(
    trainer: Trainer,
    hook: Hook,
    *,
    wrapper: str | Callable[..., Any] | None = None,
    redistribute: bool = False,
    **parameters: Any,
) -> RatchetCallback:
    """Make ``trainer`` train with ``hook``, and keep the hook's state in its checkpoints. Call it on every rank, before
    ``trainer.train``. Returns the callback that was added to the trainer.

    ``hook``, ``wrapper``, ``parameters``: as in ``ratchet_hooks.register``. ``redistribute`` True: checkpoints of another number
    of ranks are accepted, with a warning (``rank_state.redistribute_ranks``).

    ``trainer.train`` registers the hook, and raises the errors of ``ratchet_hooks.register``, and ``HookStateError`` for a
    checkpoint in which this rank's state is missing or does not fit.
    """
    callback = RatchetCallback(trainer, hook, wrapper, parameters, redistribute)
    trainer.add_callback(callback)
    return callback


class RatchetCallback(TrainerCallback):
    """The callback that ``manage`` adds to a Trainer. Creating it also replaces the Trainer's method that loads the optimizer."""

    def __init__(
        self,
        trainer: Trainer,
        hook: Hook,
        wrapper: str | Callable[..., Any] | None,
        parameters: dict[str, Any],
        redistribute: bool,
    ) -> None:
        self._redistribute = redistribute
        self._trainer, self._requested_hook, self._wrapper, self._parameters = trainer, hook, wrapper, parameters
        self._restored: str | None = None
        # The only point where the checkpoint's directory is known and the model is wrapped; there is no callback for it.
        load = trainer._load_optimizer_and_scheduler

        def load_and_restore(checkpoint: str | None) -> None:
            """Load optimizer and scheduler as the Trainer does, then this rank's state from the same directory. ``checkpoint``
            None: there is no checkpoint, so no state of this rank is loaded."""
            load(checkpoint)
            if checkpoint is not None:
                self._rank_file().load(checkpoint)
                self._restored = checkpoint

        setattr(trainer, load.__name__, load_and_restore)

    @property
    def hook(self) -> ManagedHook:
        """The hook of the model in training. Reading it may register the hook, which is a collective. Raises
        ``UnsupportedModel`` and other errors of ``register``."""
        return hook_of(self._ensure_managed())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook. Raises ``HookStateError`` if training continues from a later step and no hook state was loaded for
        it."""
        self._ensure_managed()
        if state.global_step > 0 and self._restored is None:
            raise HookStateError(
                "checkpoint", "training continues from a later step, but the Trainer itself has loaded no checkpoint"
            )
        self._restored = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average the parameters, if the hook does that. The Trainer calls it after each optimizer step."""
        self.hook.average_parameters()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this rank's file into the checkpoint's directory. A collective."""
        directory = Path(self._trainer._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._rank_file().save(directory)

    def _rank_file(self) -> RankFile:
        optimizer: Any = self._trainer.optimizer
        plain = getattr(optimizer, "optimizer", optimizer)
        return RankFile(self._ensure_managed(), [plain], redistribute=self._redistribute)

    def _ensure_managed(self) -> ManagedDDP:
        """Return the Trainer's present model, with the hook registered. Raises ``UnsupportedModel`` and other errors of
        ``register``."""
        model = self._trainer.model_wrapped
        if isinstance(model, ManagedDDP):
            return model
        if not isinstance(model, DistributedDataParallel):
            raise UnsupportedModel(
                f"the Trainer's model is a {type(model).__name__}, no DistributedDataParallel: hooks need DDP, with more than "
                "one process, and without torch_compile, FSDP or DeepSpeed"
            )
        if self._trainer.accelerator.scaler is not None:
            check_equal_replicas(resolve(model, self._requested_hook, wrapper=self._wrapper, **self._parameters))
        register(model, self._requested_hook, wrapper=self._wrapper, **self._parameters)
        assert isinstance(model, ManagedDDP)
        return model
