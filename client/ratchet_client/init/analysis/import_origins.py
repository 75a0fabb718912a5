"""Resolves the names of a file to their origins by its imports."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Final

LIGHTNING_TRAINERS: Final = frozenset(
    {"lightning.Trainer", "lightning.pytorch.Trainer", "lightning.pytorch.trainer.Trainer"}
)
OLD_LIGHTNING_TRAINERS: Final = frozenset({"pytorch_lightning.Trainer", "pytorch_lightning.trainer.Trainer"})
"""Of the predecessor package, whose classes are different ones."""
LIGHTNING_CLI: Final = frozenset({"lightning.pytorch.cli.LightningCLI"})
ACCELERATORS: Final = frozenset({"accelerate.Accelerator", "accelerate.accelerator.Accelerator"})
DDP: Final = frozenset(
    {"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"}
)

LOADERS: Final = frozenset({"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"})


def is_hugging_face_trainer(origin: str) -> bool:
    """Return True if ``origin`` is a name of ``transformers`` or ``trl`` that ends in ``Trainer``, like ``Seq2SeqTrainer`` and
    trl's ``SFTTrainer``."""
    return origin.startswith(("transformers.", "trl.")) and origin.endswith("Trainer")


def makes_a_session(origin: str) -> bool:
    """Return True if the dotted name ``origin`` is in one of Ratchet's integrations, whose classes create or use a Session."""
    return origin.startswith(
        ("ratchet.lightning.", "ratchet.transformers.", "ratchet.accelerate.", "ratchet_worker.integrations.")
    )


class Origins:
    """Maps the names that a file imports, except relatively, to their origins, as dotted names. One name may have several."""

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

    def origins_of(self, node: ast.expr) -> set[str]:
        """Return the origins of a name or dotted name, such as ``torch.optim.SGD``; empty if they are unknown."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{origin}.{node.attr}" for origin in self.origins_of(node.value)}
        return set()

    def is_one(self, node: ast.expr, expected: Collection[str]) -> bool:
        """Return True if ``node`` has origins and all of them are in ``expected``."""
        found = self.origins_of(node)
        return bool(found) and found <= set(expected)
