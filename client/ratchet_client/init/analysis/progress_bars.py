"""Remarks on counters around the loader that restart at 0 after a resume, and on aliases of the loader."""

from __future__ import annotations

import ast

from ratchet_client.init.analysis.epoch_loops import Loop, Pass
from ratchet_client.init.analysis.loop_ranges import called_as
from ratchet_client.init.analysis.script_source import Patching


def add_remarks(patching: Patching, loop: Loop, session: str) -> None:
    """Add remarks on the loaders of the passes of ``loop``: aliases set too early, and counters that restart. ``session``: the
    Session's name."""
    for one in loop.passes:
        for name, statement in one.aliases:
            same = patching.source.scope(statement) is patching.source.scope(loop.node)
            if same and statement not in list(ast.walk(loop.node)):
                patching.add_remark(
                    statement,
                    f"{name} is set from the loader before the loop over epochs: set it within the loop, from the loader "
                    "that prepare returns",
                )
        for call in one.calls:
            if called_as(call) == "tqdm" and not any(k.arg in ("initial", None) for k in call.keywords):
                over = ast.unparse(call.args[0])
                text = f"its count begins at 0 if a resume continues within an epoch: tqdm({over}, initial={over}.start) goes on"
                patching.add_remark(call, text, needed=False)
        _numbers(patching, one, session)


def _numbers(patching: Patching, one: Pass, session: str) -> None:
    """Add a remark if the pass has ``enumerate`` around ``tqdm``. Such an ``enumerate`` counts from 0 if a resume continues
    within an epoch."""
    kinds = [called_as(call) for call in one.calls]
    target = one.node.target.elts[0] if isinstance(one.node.target, ast.Tuple) else one.node.target
    used = {n.id for s in one.node.body for n in ast.walk(s) if isinstance(n, ast.Name)}
    if "enumerate" in kinds and "tqdm" in kinds[kinds.index("enumerate") :]:
        text = f"enumerate around a progress bar counts from 0 if a resume continues within an epoch: {session}.enumerate(...)"
        needed = not isinstance(target, ast.Name) or target.id in used
        patching.add_remark(one.calls[kinds.index("enumerate")], text, needed=needed)
