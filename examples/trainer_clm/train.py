"""A small GPT-2 on the bytes of a text, by Hugging Face's Trainer, with the structure of transformers' own run_clm.py."""

import logging
import math
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from ratchet.transformers import Trainer  # noqa: F811

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    n_embd: int = field(default=64)
    n_layer: int = field(default=2)
    n_head: int = field(default=4)


@dataclass
class DataTrainingArguments:
    train_file: str | None = field(
        default=None, metadata={"help": "A text file; scikit-learn's descriptions by default."}
    )
    block_size: int = field(default=64)
    validation_split_percentage: int = field(default=5)


def load_text(file: str | None) -> bytes:
    if file is not None:
        return Path(file).read_bytes()
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations, "pip install scikit-learn, or give --train_file"
    folder = Path(package.submodule_search_locations[0]) / "datasets/descr"
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.rst")))


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """A text in blocks of equal size."""

    def __init__(self, text: bytes, block_size: int) -> None:
        usable = len(text) // block_size * block_size
        self.blocks = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).long().view(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def preprocess_logits_for_metrics(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=training_args.get_process_log_level(), handlers=[logging.StreamHandler(sys.stdout)])
    logger.warning(
        "Process rank: %s, device: %s, n_gpu: %s, distributed training: %s",
        training_args.local_process_index, training_args.device, training_args.n_gpu,
        training_args.parallel_mode.value == "distributed",
    )  # fmt: skip
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="grouping texts together"):
        text = load_text(data_args.train_file)
        split = len(text) * data_args.validation_split_percentage // 100
        eval_dataset, train_dataset = (Blocks(part, data_args.block_size) for part in (text[:split], text[split:]))
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=data_args.block_size, n_embd=model_args.n_embd, n_layer=model_args.n_layer,
            n_head=model_args.n_head, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(train_dataset)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
