"""A small BERT under the Trainer, as a job, with the arguments and callbacks that the command line names; the first attempt dies
in step ``kill``, behind the checkpoint before it."""

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

from ratchet_worker.integrations.transformers import SessionTrainer, options
from ratchet_worker.session import Session

case = json.loads(sys.argv[1])


class Dies(TrainerCallback):
    """``every``: steps between checkpoints."""

    def __init__(self, session: Session, kill: int, every: int) -> None:
        self.kill, self.every, self.rank = kill, every, session.rank
        self.root, self.epoch = Path(session._runtime.launch.job_root), session._runtime.launch.epoch

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.epoch == 1 and state.global_step + 1 == self.kill and self.rank == 1:
            name = f"step-{state.global_step // self.every * self.every:012d}.a0001"
            end = time.monotonic() + 60
            while not (self.root / "checkpoints" / name / "MANIFEST.json").exists() and time.monotonic() < end:
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
            "logging_steps": 5, "report_to": "none", "disable_tqdm": True,
        }  # fmt: skip
        arguments = TrainingArguments(**(options(session) | given | case["arguments"]))
        callbacks = [getattr(transformers.trainer_callback, name)(**made) for name, made in case["callbacks"].items()]
        trainer = SessionTrainer(
            session, model=model, args=arguments, train_dataset=samples(48, 1), eval_dataset=samples(12, 2),
            callbacks=[*callbacks, Dies(session, case["kill"], case["every"])],
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":  # workers of the loader are spawned
    main()
