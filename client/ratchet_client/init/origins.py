"""What the names of a file stand for, by its imports."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Final

LIGHTNING_TRAINERS: Final = frozenset(
    {"lightning.Trainer", "lightning.pytorch.Trainer", "lightning.pytorch.trainer.Trainer"}
)
OLD_LIGHTNING_TRAINERS: Final = frozenset({"pytorch_lightning.Trainer", "pytorch_lightning.trainer.Trainer"})
"""Of the package that came before; its classes are others."""
LIGHTNING_CLI: Final = frozenset({"lightning.pytorch.cli.LightningCLI"})
ACCELERATORS: Final = frozenset({"accelerate.Accelerator", "accelerate.accelerator.Accelerator"})
DDP: Final = frozenset(
    {"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"}
)


def is_hugging_face_trainer(origin: str) -> bool:
    """``Trainer`` and its kinds, like ``Seq2SeqTrainer`` and trl's ``SFTTrainer``."""
    return origin.startswith(("transformers.", "trl.")) and origin.endswith("Trainer")


def makes_a_session(origin: str) -> bool:
    """What integrations offer: a Session is in it, or it makes one."""
    return origin.startswith(
        ("ratchet.lightning.", "ratchet.transformers.", "ratchet.accelerate.", "ratchet_worker.integrations.")
    )


class Origins:
    """A name that several imports bind (``try`` and ``except``) has several origins."""

    def __init__(self, tree: ast.AST) -> None:
        self.names: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.names.setdefault(name, set()).add(alias.name if alias.asname else name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self.names.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")

    def of(self, node: ast.expr) -> set[str]:
        """Dotted names; empty for what is no dotted name, and for names that no import binds."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{origin}.{node.attr}" for origin in self.of(node.value)}
        return set()

    def is_one(self, node: ast.expr, wanted: Collection[str]) -> bool:
        """Whichever of its imports counts."""
        found = self.of(node)
        return bool(found) and found <= set(wanted)
