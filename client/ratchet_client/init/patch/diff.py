"""``ratchet init --patch``: the change with which Ratchet resumes a script bit for bit, as a unified diff."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ratchet_client.init.analysis import carried_variables, stateful_objects
from ratchet_client.init.analysis.epoch_loops import Loop, parameters
from ratchet_client.init.analysis.loop_ranges import called_as
from ratchet_client.init.analysis.script_source import Patching, Remark
from ratchet_client.init.analysis.source_edits import Source, moved_lines, unified_diff
from ratchet_client.init.analysis.step_loops import StepLoop, training_loops
from ratchet_client.init.patch import accelerate, lightning, trainer, training_loop
from ratchet_contract.errors import NotFound, Refused

_KINDS: Final = (lightning.patch, trainer.patch, accelerate.patch, training_loop.patch)
_SESSIONS: Final = frozenset({"ratchet.Session", "ratchet_worker.Session", "ratchet_worker.session.Session"})
_GIVES: Final = frozenset({"prepare", "keep", "register", "wrap", "register_for_checkpointing"})
"""Methods of a Session, or of an Accelerator, that take objects whose state checkpoints have."""
_PACKAGES: Final = frozenset({"ratchet", "ratchet_worker", "ratchet_hooks"})


@dataclass
class Patch:
    """The result of ``patch_of``. ``diff``: empty if nothing is changed. ``known``: True if the script uses DDP or a framework
    that a patch handles. ``starts_ranks``: True if Lightning starts the ranks. ``encoding``: the encoding of the script and of
    the diff."""

    diff: str
    known: bool
    starts_ranks: bool
    encoding: str
    remarks: list[Remark] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    """Maps the unchanged lines of the script to their numbers in the changed script."""

    @property
    def is_complete(self) -> bool:
        """True if there is a diff and no needed remark."""
        return bool(self.diff) and not any(remark.needed for remark in self.remarks)


def patch_of(script: Path, name: str) -> Patch:
    """Return the patch of ``script``. ``name``: the file name in the diff. Raise ``NotFound`` if the file cannot be read,
    ``Refused`` if it is not valid Python."""
    text, encoding, patching = _read(script)
    known = [kind(patching) for kind in _KINDS]
    changed = _without_unused_imports(text, patching.source.edited_text())
    return Patch(
        unified_diff(text, changed, name), any(known), known[0], encoding, _sorted(patching), moved_lines(text, changed)
    )


def remaining_remarks(script: Path) -> list[Remark]:
    """Return remarks on state that the checkpoints of a script that uses Ratchet may lack. Raise the errors of ``patch_of``."""
    _, _, patching = _read(script)
    for loop in _session_loops(patching):
        carried_variables.add_remarks(patching, loop, _session(patching))
    _add_object_remarks(patching)
    return _sorted(patching)


def objects_without_session(script: Path) -> list[str]:
    """Return the copies of models and the objects of own classes, as ``ema (train.py, line 12)``, that the script's training
    loops use and its Session does not have. Empty for an invalid or unreadable file."""
    try:
        _, _, patching = _read(script)
    except (NotFound, Refused):
        return []
    _add_object_remarks(patching)
    return [f"{remark.text.partition(':')[0]} ({script.name}, line {remark.line})" for remark in _sorted(patching)]


def _add_object_remarks(patching: Patching) -> None:
    """Add remarks on copies of models and objects of own classes that training loops use and the script's Session does not
    have."""
    known = _known_names(patching)
    for loop in _session_loops(patching):
        own = parameters(patching.source.scope(loop.node))
        stateful_objects.add_object_remarks(patching, loop, _session(patching), known | own, only_own=True)


def _session_loops(patching: Patching) -> Sequence[Loop | StepLoop]:
    """Return the training loops of a script with a Session."""
    return _steps_loops(patching) or training_loops(patching)


def _steps_loops(patching: Patching) -> list[StepLoop]:
    """Return the loops over ``session.steps(...)``, also those with loops over the parts of a batch."""
    loops = (n for n in ast.walk(patching.source.tree) if isinstance(n, ast.For))
    return [StepLoop(n, None) for n in loops if any(called_as(c) == "steps" for c in _calls(n.iter))]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def _session(patching: Patching) -> str:
    """Return the name of the script's Session, ``x.session`` for an Accelerator ``x`` of Ratchet; ``session`` if unknown."""
    for made, target in _named_calls(patching):
        if isinstance(target, ast.Name):
            origins = patching.origins.origins_of(made.func)
            if origins & _SESSIONS:
                return target.id
            if any(origin.startswith("ratchet") and origin.endswith(".Accelerator") for origin in origins):
                return f"{target.id}.session"
    return "session"


def _known_names(patching: Patching) -> set[str]:
    """Return the names of objects that the Session has, or that Ratchet's functions and classes make."""
    found: set[str] = set()
    for node in ast.walk(patching.source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GIVES:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            found |= {n.id for value in given for n in ast.walk(value) if isinstance(n, ast.Name)}
    for made, target in _named_calls(patching):
        is_given = isinstance(made.func, ast.Attribute) and made.func.attr in _GIVES
        if is_given or any(origin.partition(".")[0] in _PACKAGES for origin in patching.origins.origins_of(made.func)):
            found |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def _named_calls(patching: Patching) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield each call whose result ``=`` or ``with`` binds, with the target."""
    for node in ast.walk(patching.source.tree):
        match node:
            case ast.Assign(targets=targets, value=ast.Call() as made):
                yield from ((made, target) for target in targets)
            case ast.AnnAssign(target=target, value=ast.Call() as made):
                yield made, target
            case ast.withitem(context_expr=ast.Call() as made, optional_vars=ast.expr() as target):
                yield made, target


def _sorted(patching: Patching) -> list[Remark]:
    """Return the distinct remarks, sorted by line, then by text."""
    return sorted(set(patching.remarks), key=lambda remark: (remark.line, remark.text))


def _read(script: Path) -> tuple[str, str, Patching]:
    """Return the script's text, encoding and ``Patching``. Raise ``NotFound`` if it cannot be read, ``Refused`` if it is not
    valid Python."""
    try:
        data = script.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        # So that the text keeps a byte order mark.
        encoding = encoding.removesuffix("-sig")
        text = data.decode(encoding)
        return text, encoding, Patching.parse(text)
    except OSError as error:
        raise NotFound(f"cannot read {script}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise Refused(f"{script}{line} is not valid Python: {reason}") from None


def _without_unused_imports(old: str, new: str) -> str:
    """Return the source ``new`` without the imported names that ``old`` uses and ``new`` does not."""
    if new == old:
        return new
    source = Source(new)
    gone = _used(Source(old).tree) - _used(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.remove_names(node, gone)
    return source.edited_text()


def _used(tree: ast.AST) -> set[str]:
    """Return all names that ``tree`` reads, and all its string constants, since ``__all__`` contains names as strings."""
    exported = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} | exported
