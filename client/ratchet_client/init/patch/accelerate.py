"""``ratchet init --patch`` of a script with Accelerate: ``ratchet.accelerate``, and ``epochs`` instead of ``range``."""

from __future__ import annotations

import ast
from typing import Final

from ratchet_client.init.analysis import carried_variables, progress_bars, stateful_objects
from ratchet_client.init.analysis.epoch_loops import Function, Loops, parameters
from ratchet_client.init.analysis.import_origins import ACCELERATORS
from ratchet_client.init.analysis.last_number import set_last_number
from ratchet_client.init.analysis.script_source import Patching

_RESUMES: Final = ("load_state", "skip_first_batches")


def patch(patching: Patching) -> bool:
    """Record the edits that make a script with Accelerate use ``ratchet.accelerate``, and add remarks on the rest. Return False
    if the script creates no Accelerator."""
    made = patching.calls(ACCELERATORS)
    if not made:
        return False
    name = _class(patching, made)
    held = {patching.source.statement(call) for call in made}  # one statement may choose between two calls
    names = {ast.unparse(s.targets[0]) for s in held if isinstance(s, ast.Assign) and len(s.targets) == 1}
    if len(held) > 1 or len(names) != 1:
        for call in made:
            patching.add_remark(
                call,
                f"{name}: it is unknown which variable the training uses; loop over epochs with its epochs(n)",
            )
    else:
        _epochs(patching, names.pop())
    _resumes(patching)
    return True


def _class(patching: Patching, made: list[ast.Call]) -> str:
    """Replace the script's Accelerator class and its import by those of ``ratchet.accelerate``; return the class's old source
    text."""
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
    """Record the edits of the only training loop, which then iterates over ``epochs`` of ``accelerator``. Add remarks where that
    is not possible."""
    loops = Loops(patching.source).training_loops()
    if not loops:
        call = patching.calls(ACCELERATORS)[0]
        patching.add_remark(
            call, f"found no loop over epochs with a loop over batches in it: it must use {accelerator}.epochs(n)"
        )
    for loop in loops:
        form = f"{accelerator}.epochs(n)"
        if len(loops) > 1:
            patching.add_remark(loop.node, f"one of {len(loops)} training loops: a job has one, over {form}")
        elif why := loop.unsupported_reason(accelerator):
            patching.add_remark(loop.node, why)
        elif not _sees(patching, loop.node, accelerator):
            patching.add_remark(
                loop.node, f"{accelerator} is not defined in its function: pass it in; the loop uses {form}"
            )
        else:
            loop.change(patching, accelerator)
            prepared = _prepared(patching, accelerator, patching.source.scope(loop.node))
            carried_variables.save_carried(patching, loop, f"{accelerator}.session", prepared)
            set_last_number(patching, loop)
            stateful_objects.add_remarks(patching, loop, f"{accelerator}.session", {accelerator, *prepared})
            progress_bars.add_remarks(patching, loop, f"{accelerator}.session")


def _prepared(patching: Patching, accelerator: str, scope: ast.AST) -> set[str]:
    """Return the names that hold results of ``accelerator.prepare``, and the parameters of the function ``scope``."""
    found = parameters(scope)
    for node in ast.walk(patching.source.tree):
        match node:
            case ast.Assign(targets=targets, value=ast.Call(func=ast.Attribute(attr="prepare", value=of))):
                if ast.unparse(of) == accelerator:
                    found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def _resumes(patching: Patching) -> None:
    """Add a remark at each call of ``load_state`` and ``skip_first_batches``, which the user must remove."""
    for node in ast.walk(patching.source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in _RESUMES:
                patching.add_remark(node, f"{called}: a job resumes automatically, within its epoch: remove it")


def _sees(patching: Patching, loop: ast.For, name: str) -> bool:
    """Return True if the Accelerator is seen to be visible at the loop under ``name``."""
    scope = patching.source.scope(loop)
    home = patching.source.scope(patching.calls(ACCELERATORS)[0])
    if scope is home or isinstance(home, ast.Module):
        return True
    if "." in name:
        methods = isinstance(scope, Function) and patching.source.scope(scope) is patching.source.scope(home)
        return (methods and name.startswith("self.")) or f"{name}." in ast.unparse(loop)
    return isinstance(scope, Function) and any(a.arg == name for a in (*scope.args.args, *scope.args.kwonlyargs))
