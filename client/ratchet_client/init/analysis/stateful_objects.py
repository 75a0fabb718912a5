"""Finds objects with state of their own, such as generators, that a loop uses besides model, optimizers and loaders."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from typing import Final

from ratchet_client.init.analysis.epoch_loops import Function, Loop, Loops
from ratchet_client.init.analysis.import_origins import LOADERS
from ratchet_client.init.analysis.loop_ranges import assignments, called_as
from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.step_loops import StepLoop

_GENERATORS: Final = frozenset({
    "torch.Generator", "numpy.random.default_rng", "numpy.random.Generator", "numpy.random.RandomState", "random.Random",
})  # fmt: skip
_DRAWS: Final = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "random", "uniform", "choice", "choices", "sample", "shuffle", "permutation", "gauss", "standard_normal", "integers",
    "randrange", "poisson", "exponential", "beta",
})  # fmt: skip
"""Functions and methods that draw random numbers; the names of tensor methods end with ``_``."""
_WITHOUT_STATE: Final = frozenset({
    "torch", "torchvision", "numpy", "math", "time", "argparse", "logging", "pathlib", "os", "tqdm", "wandb", "tensorboard",
    "tensorboardX", "transformers", "datasets", "tokenizers", "accelerate", "pandas", "matplotlib", "PIL", "rich", "json",
    "collections", "functools", "itertools", "types", "contextlib", "copy", "random", "evaluate", "sklearn", "scipy",
})  # fmt: skip
"""Packages whose objects are passed to the Session, or have no state that training depends on."""
_OF_DATA: Final = ("Module", "Dataset", "Sampler")
"""Suffixes of the names of base classes whose state the Session handles."""


def is_generator(patching: Patching, value: ast.expr) -> bool:
    """Return True if ``value`` creates a random number generator, as ``torch.Generator().manual_seed(0)`` does."""
    while isinstance(value, ast.Call):
        if patching.origins.is_one(value.func, _GENERATORS):
            return True
        if not isinstance(value.func, ast.Attribute):
            return False
        value = value.func.value
    return False


def is_used(patching: Patching, loop: Loop | StepLoop, name: str) -> bool:
    """Return True if the loop, or a function that it calls, uses ``name``, and no ``DataLoader(...)`` call does."""
    # The Session restores a loader's generator with the loader.
    given = [n for call in patching.calls(LOADERS) for n in ast.walk(call)]
    return not _named(given, name) and _named(Loops(patching.source).reachable_nodes(loop.node), name)


def _named(nodes: Iterable[ast.AST], name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in nodes)


def add_remarks(patching: Patching, loop: Loop | StepLoop, session: str, known: Collection[str]) -> None:
    """Add remarks on state and random numbers of the loop that no checkpoint has. ``session``: the Session's name; ``known``:
    names of objects that the Session has."""
    add_object_remarks(patching, loop, session, known)
    if isinstance(loop, Loop):
        _add_draw_remarks(patching, loop, session)


def is_stepped(loop: Loop | StepLoop, name: str) -> bool:
    """Return True if the loop calls ``name.step(...)``. This also detects a scheduler that a function has created."""
    calls = (n.func for n in ast.walk(loop.node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return any(func.attr == "step" and ast.unparse(func.value) == name for func in calls)


def add_object_remarks(
    patching: Patching, loop: Loop | StepLoop, session: str, known: Collection[str], *, only_own: bool = False
) -> None:
    """Add a remark for each object with state that the loop is seen to use, except those in ``known``. ``only_own``: only for
    the file's own classes and copies of models, as optional remarks."""
    said = {*known}
    inner = {n.id for n in ast.walk(loop.node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for node in ast.walk(loop.node):
        of, why = _used_with_state(patching, loop, node)
        if of is None or of in said:
            continue
        if only_own and why != "copy" and not _is_own(patching, _makers(patching, of, loop)):
            continue
        said.add(of)
        cure = f"give it to {session}.prepare" if of in inner else f"{of} = {session}.prepare({of})"
        if why == "next":
            text = f"{of} starts from its beginning after a resume: take its items by step number or from the prepared loader"
        elif why == "copy":
            text = f"{of}: no checkpoint has this copy: {of} = {session}.prepare({of}.requires_grad_(False)) before the loop"
        else:
            text = f"{of}: where training or a file depends on its state, {cure} before the loop"
        patching.add_remark(node, text, needed=not only_own)  # type: ignore[arg-type]


def _used_with_state(patching: Patching, loop: Loop | StepLoop, node: ast.AST) -> tuple[str | None, str]:
    """Return the name of an object whose state the loop may change at ``node``, and the way: "attribute", "next", "call" or
    "copy"; None and "" if there is none."""
    source = patching.source
    match node:
        case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()) if assignments(source, name, loop.node):
            return name, "attribute"
        case ast.Call(func=ast.Name(id="next"), args=[ast.Name(id=name), *_]):
            return (name, "next") if assignments(source, name, loop.node) else (None, "")
        case (
            ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method))
            | ast.Call(func=ast.Name(id=name) as method)
        ):
            makers = _makers(patching, name, loop)
            if method in ("readline", "read"):
                return (name, "next") if makers else (None, "")
            used = isinstance(method, ast.Name) or not isinstance(source.statement(node), ast.Expr)
            if _is_own(patching, makers) or (used and _is_third_party(patching, makers)):
                return name, "call"
            if method in ("step", "update_parameters") and not _is_of(patching, makers, "torch.profiler"):
                return name, "call"
        case ast.Name(id=name, ctx=ast.Load()) if _is_changed_copy(patching, loop, node):
            return name, "copy"
    return None, ""


def _is_changed_copy(patching: Patching, loop: Loop | StepLoop, use: ast.Name) -> bool:
    """Return True if ``use`` names the result of a ``deepcopy`` and is used as a model, for example in ``ema.parameters()``."""
    copies = [made for made in _makers(patching, use.id, loop) if ast.unparse(made).rpartition(".")[2] == "deepcopy"]
    parent = next(patching.source.ancestors(use))
    of_weights = isinstance(parent, ast.Attribute) and parent.attr in ("parameters", "buffers", "load_state_dict")
    handed = isinstance(parent, ast.Call) and called_as(parent) in Loops(patching.source).functions
    return bool(copies) and (of_weights or handed)


def _is_of(patching: Patching, makers: list[ast.expr], package: str) -> bool:
    """Return True if one of the functions ``makers`` has an origin that begins with ``package``, a dotted name."""
    return any(origin.startswith(package) for made in makers for origin in patching.origins.origins_of(made))


def _add_draw_remarks(patching: Patching, loop: Loop, session: str) -> None:
    """Add a remark at each statement that seems to draw random numbers in an epoch before its batches: a resume would draw
    other numbers."""
    loops = Loops(patching.source)
    bodies = [loop.node.body]
    for one in loop.passes:
        function = patching.source.scope(one.node)
        if isinstance(function, Function) and function is not patching.source.scope(loop.node):
            bodies.append(function.body)
    for body in bodies:
        training = next((n for n, s in enumerate(body) if loops.trains(s)), 0)
        for statement in body[:training]:
            if isinstance(statement, Function | ast.ClassDef):
                continue
            calls = [n for n in (statement, *loops.reachable_nodes(statement)) if isinstance(n, ast.Call)]
            if any(called_as(call).rstrip("_") in _DRAWS for call in calls):
                text = (
                    "a resume within an epoch draws other numbers here: draw only if loader.start == 0 (loader: as prepared), "
                    f"into an object that {session}.keep gives"
                )
                patching.add_remark(statement, text)


def _is_own(patching: Patching, makers: list[ast.expr]) -> bool:
    """Return True if one of ``makers`` is a class of the file, and its bases are not named like a module, data set or
    sampler."""
    classes = {
        n.name for n in ast.walk(patching.source.tree) if isinstance(n, ast.ClassDef)
        and not any(base.endswith(_OF_DATA) or base.startswith(("nn.", "torch.nn.")) for base in map(ast.unparse, n.bases))
    }  # fmt: skip
    return any(isinstance(made, ast.Name) and made.id in classes for made in makers)


def _is_third_party(patching: Patching, makers: list[ast.expr]) -> bool:
    """Return True if one of ``makers`` is imported from a package that is not in ``_WITHOUT_STATE``."""
    origins = (origin for made in makers for origin in patching.origins.origins_of(made))
    return any(origin.partition(".")[0] not in _WITHOUT_STATE for origin in origins)


def _makers(patching: Patching, name: str, loop: Loop | StepLoop) -> list[ast.expr]:
    """Return the functions and classes whose call results are assigned to ``name`` in the loop's function, before the loop."""
    found = []
    for n in ast.walk(patching.source.scope(loop.node)):
        match n:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(func=made)) if target == name:
                found += [made] if n.lineno < loop.node.lineno else []
    return found
