"""Counts around the loader that start over after a resume within an epoch, and names of the loader that are made too early."""

from __future__ import annotations

import ast

from ratchet_client.init.epoch_loops import Loop, Pass, called_as
from ratchet_client.init.patching import Patching


def tell(patching: Patching, loop: Loop, session: str) -> None:
    for one in loop.passes:
        for name, statement in one.aliases:
            same = patching.source.scope(statement) is patching.source.scope(loop.node)
            if same and statement not in list(ast.walk(loop.node)):
                patching.leave(
                    statement,
                    f"{name} is another name of the loader, made in front of the loop over epochs: make it within, of the loader "
                    "that prepare gives back",
                )
        for call in one.calls:
            if called_as(call) == "tqdm" and not any(k.arg in ("initial", None) for k in call.keywords):
                over = ast.unparse(call.args[0])
                text = f"its count begins at 0 where a resume goes on within an epoch: tqdm({over}, initial={over}.start) goes on"
                patching.leave(call, text, needed=False)
        _numbers(patching, one, session)


def _numbers(patching: Patching, one: Pass, session: str) -> None:
    """``enumerate`` around a progress bar, where the number is used."""
    kinds = [called_as(call) for call in one.calls]
    target = one.node.target.elts[0] if isinstance(one.node.target, ast.Tuple) else one.node.target
    used = {n.id for s in one.node.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    if "enumerate" in kinds and "tqdm" in kinds[kinds.index("enumerate") :]:
        text = f"enumerate around a progress bar counts from 0 where a resume goes on within an epoch: {session}.enumerate(...)"
        needed = not isinstance(target, ast.Name) or target.id in used
        patching.leave(one.calls[kinds.index("enumerate")], text, needed=needed)
