"""A small BERT under the Trainer, as a job, with the arguments and callbacks that the command line names; the first attempt dies
in step ``kill``, behind the checkpoint before it. With ``evaluation`` in that batch of the evaluation behind it; then the second
one gets a SIGTERM in that of step ``stop``."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from ratchet_worker.integrations.transformers import Trainer
from ratchet_worker.session.session import Session

case = json.loads(sys.argv[1])


class Dies(TrainerCallback):
    """``every``: steps between checkpoints."""

    def __init__(
        self, session: Session, *, kill: int, stop: int, every: int, evaluation: int | None = None, **_: Any
    ) -> None:
        self.kill, self.stop, self.every, self.evaluation = kill, stop, every, evaluation
        self.root, self.epoch = Path(session._runtime.launch.job_root), session._runtime.launch.attempt
        self.batches, self.first, self.agreement = 0, session.rank == 1, session._runtime.agreement

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches = 0
        if self.first and self.evaluation is None and self.epoch == 1 and state.global_step + 1 == self.kill:
            self._die((self.kill - 1) // self.every * self.every)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches += 1
        if not self.first or self.batches != self.evaluation:
            return
        if self.epoch == 1 and state.global_step == self.kill:
            self._die((self.kill - 1) // self.every * self.every)
        if self.epoch == 2 and state.global_step == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
            self.agreement.wait_for_decision()  # the other rank waits for this one's next batch

    def _die(self, saved: int) -> None:
        manifest, end = self.root / "checkpoints" / f"step-{saved:012d}.a0001" / "MANIFEST.json", time.monotonic() + 60
        while not manifest.exists() and time.monotonic() < end:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)


def samples(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 40, (number, 6), generator=draw)
    return [{"input_ids": row, "labels": row.sum() % 3} for row in words]


def main() -> None:
    with Session() as session:
        torch.manual_seed(session.seed)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3,
                max_position_embeddings=8,
            )
        )  # fmt: skip
        given = {
            "output_dir": "out", "per_device_train_batch_size": 2, "num_train_epochs": 3, "learning_rate": 1e-3,
            "logging_steps": 5, "report_to": "none", "disable_tqdm": True, "per_device_eval_batch_size": 2, "use_cpu": True,
            "save_strategy": "no",
        }  # fmt: skip
        arguments = TrainingArguments(**(given | case["arguments"]))
        callbacks = [getattr(transformers.trainer_callback, name)(**made) for name, made in case["callbacks"].items()]
        trainer = Trainer(
            model=model, args=arguments, train_dataset=samples(48, 1), eval_dataset=samples(12, 2),
            callbacks=[*callbacks, Dies(session, **case)],
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":  # workers of the loader are spawned
    main()
