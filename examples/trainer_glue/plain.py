"""A small BERT that tells what kind of digits a line has, with the structure of transformers' own run_glue.py."""

import logging
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)
KINDS = ("sum", "palindrome", "sorted", "neither")


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32)
    num_hidden_layers: int = field(default=2)


@dataclass
class DataTrainingArguments:
    max_train_samples: int = field(default=1200)
    max_eval_samples: int = field(default=200)
    early_stopping_patience: int | None = field(default=None)


def sample(draw: random.Random) -> dict[str, Any]:
    """A line of digits, of the lengths that group_by_length is for, and its kind."""
    label = draw.randrange(len(KINDS))
    digits = [draw.randrange(10) for _ in range(draw.randrange(3, 14))]
    if KINDS[label] == "sum":
        digits = [*digits, 11, *(int(digit) for digit in str(sum(digits)))]
    elif KINDS[label] == "palindrome":
        digits = [*digits, *reversed(digits)]
    elif KINDS[label] == "sorted":
        digits = sorted(digits)
    return {"input_ids": [12, *(digit + 1 for digit in digits)], "label": label}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded to the longest of the batch; one token in ten is masked."""
    longest = max(len(one["input_ids"]) for one in samples)
    ids = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in samples])
    masked = torch.where((torch.rand(ids.shape) < 0.1) & (ids > 0), 13, ids)
    return {
        "input_ids": masked,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([one["label"] for one in samples]),
    }


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, axis=1) == found.label_ids).mean())}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=training_args.get_process_log_level(), handlers=[logging.StreamHandler(sys.stdout)])

    last_checkpoint = None
    if training_args.do_train and Path(training_args.output_dir).is_dir():
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
            logger.warning("Checkpoint detected, resuming training at %s.", last_checkpoint)
    set_seed(training_args.seed)

    draw = random.Random(1)
    train_dataset, eval_dataset = (
        [sample(draw) for _ in range(number)] for number in (data_args.max_train_samples, data_args.max_eval_samples)
    )
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=14, hidden_size=model_args.hidden_size, num_hidden_layers=model_args.num_hidden_layers,
            num_attention_heads=2, intermediate_size=64, max_position_embeddings=40, num_labels=len(KINDS),
        )
    )  # fmt: skip

    patience = data_args.early_stopping_patience
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        data_collator=collate,
        callbacks=[] if patience is None else [EarlyStoppingCallback(patience)],
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
