"""``ratchet init --patch`` of a script with Accelerate: ``ratchet.accelerate``, and ``epochs`` in the place of ``range``."""

from __future__ import annotations

import ast
from typing import Final

from ratchet_client.init import carried_variables, progress_bars
from ratchet_client.init.epoch_loops import Function, Loops
from ratchet_client.init.origins import ACCELERATORS
from ratchet_client.init.patching import Patching

_RESUMES: Final = ("load_state", "skip_first_batches")


def patch(patching: Patching) -> bool:
    """Whether the script is of this kind."""
    made = patching.calls(ACCELERATORS)
    if not made:
        return False
    name = _class(patching, made)
    held = {patching.source.statement(call) for call in made}  # one statement may choose between two calls
    names = {ast.unparse(s.targets[0]) for s in held if isinstance(s, ast.Assign) and len(s.targets) == 1}
    if len(held) > 1 or len(names) != 1:
        for call in made:
            patching.leave(
                call,
                f"{name}: what name the training has it by is not known; the loop over epochs goes over its epochs(n)",
            )
    else:
        _epochs(patching, names.pop())
    _resumes(patching)
    return True


def _class(patching: Patching, made: list[ast.Call]) -> str:
    """Make the class that of ``ratchet.accelerate``; its name."""
    uses = [n for n in ast.walk(patching.source.tree)
            if isinstance(n, ast.Attribute) and patching.origins.is_one(n, ACCELERATORS)]  # fmt: skip
    for use in uses:  # accelerate.Accelerator
        patching.source.replace(use, "Accelerator")
    statements = patching.imports_of(ACCELERATORS)
    names = {"Accelerator"} if uses else set()
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            bound = {a.asname or a.name for a in statement.names if a.name == "Accelerator"}
            patching.source.remove_names(statement, bound)
            names |= bound
    listed = ", ".join("Accelerator" if name == "Accelerator" else f"Accelerator as {name}" for name in sorted(names))
    patching.add_import(f"from ratchet.accelerate import {listed}", statements)
    return ast.unparse(made[0].func)


def _epochs(patching: Patching, accelerator: str) -> None:
    loops = Loops(patching.source).found()
    if not loops:
        call = patching.calls(ACCELERATORS)[0]
        patching.leave(
            call, f"no loop over epochs with a loop over batches in it was found: it goes over {accelerator}.epochs(n)"
        )
    for loop in loops:
        form = f"{accelerator}.epochs(n)"
        if len(loops) > 1:
            patching.leave(loop.node, f"one of {len(loops)} loops that train: a job has one, over {form}")
        elif why := loop.unknown(accelerator):
            patching.leave(loop.node, why)
        elif not _sees(patching, loop.node, accelerator):
            patching.leave(
                loop.node, f"{accelerator} is not known in its function: hand it on; the loop goes over {form}"
            )
        else:
            carried_variables.tell(patching, loop, f"{accelerator}.session.prepare")
            progress_bars.tell(patching, loop, f"{accelerator}.session")
            loop.change(patching.source, accelerator)


def _resumes(patching: Patching) -> None:
    for node in ast.walk(patching.source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in _RESUMES:
                patching.leave(node, f"{called}: a job goes on by itself, within its epoch: remove it")


def _sees(patching: Patching, loop: ast.For, name: str) -> bool:
    """Whether ``name`` is the Accelerator where the loop stands: of its function, or of the module."""
    scope = patching.source.scope(loop)
    home = patching.source.scope(patching.calls(ACCELERATORS)[0])
    if scope is home or isinstance(home, ast.Module):
        return True
    if "." in name:
        methods = isinstance(scope, Function) and patching.source.scope(scope) is patching.source.scope(home)
        return (methods and name.startswith("self.")) or f"{name}." in ast.unparse(loop)
    return isinstance(scope, Function) and any(a.arg == name for a in (*scope.args.args, *scope.args.kwonlyargs))
