"""``ratchet init --patch`` of a script with Hugging Face's Trainer: replaces it by the Trainer of ``ratchet.transformers``."""

from __future__ import annotations

import ast
from typing import Final

from ratchet_client.init.analysis.import_origins import is_hugging_face_trainer
from ratchet_client.init.analysis.script_source import Patching

OFFERED: Final = ("Seq2SeqTrainer", "Trainer")
"""The classes of ``ratchet.transformers``."""


def patch(patching: Patching) -> bool:
    """Record the edits that replace Trainers of Hugging Face by those of ``ratchet.transformers``, and add remarks on the rest.
    Return False if the script uses none."""
    uses = [
        node
        for node in ast.walk(patching.source.tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and any(map(is_hugging_face_trainer, patching.origins.origins_of(node)))
    ]
    names: dict[str, str] = {}  # name in the file: name in transformers
    for use in sorted(uses, key=lambda node: (node.lineno, node.col_offset)):
        origins = patching.origins.origins_of(use)
        theirs = {origin.rpartition(".")[2] for origin in origins if is_hugging_face_trainer(origin)}
        if len(origins) != 1 or not theirs <= set(OFFERED):
            patching.add_remark(use, f"{ast.unparse(use)} is none of ratchet.transformers ({', '.join(OFFERED)}): train with "
                                f"`class Mine(Trainer, {ast.unparse(use)}): pass`, its Trainer first")  # fmt: skip
        elif isinstance(use, ast.Attribute):  # transformers.Trainer
            (name,) = theirs
            mine = name if name not in patching.bound_names() else f"Ratchet{name}"
            patching.source.replace(use, mine)
            names[mine] = name
        else:
            names[use.id] = next(iter(theirs))
    if names:
        listed = ", ".join(name if name == shown else f"{name} as {shown}" for shown, name in sorted(names.items()))
        wanted = frozenset(
            origin for found in patching.origins.names.values() for origin in found if is_hugging_face_trainer(origin)
        )
        beside = patching.imports_of(wanted or frozenset({"transformers.Trainer"}))
        again = set(names) & set(patching.origins.names)  # linters report such a redefinition
        patching.add_import(f"from ratchet.transformers import {listed}{'  # noqa: F811' if again else ''}", beside)
    return bool(uses)
