"""``ratchet init --patch``: the change that a script needs so that Ratchet resumes it bit for bit, as a unified diff."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ratchet_client.init import carried_variables, patch_accelerate, patch_lightning, patch_loop, patch_trainer
from ratchet_client.init.epoch_loops import Loops
from ratchet_client.init.patching import Patching, Remark
from ratchet_client.init.source_edits import Source, moved_lines, unified_diff
from ratchet_contract.errors import NotFound, Refused

_KINDS: Final = (patch_lightning.patch, patch_trainer.patch, patch_accelerate.patch, patch_loop.patch)


@dataclass
class Patch:
    """``diff`` is empty where nothing is changed. ``known``: the script trains in a way that is known here. ``starts_ranks``: it
    starts them itself, as Lightning does. ``encoding``: the script's, and the diff's."""

    diff: str
    known: bool
    starts_ranks: bool
    encoding: str
    remarks: list[Remark] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    """Lines of the script that the change leaves as they are, and where they are in the changed script."""

    @property
    def whole(self) -> bool:
        """Applied, nothing is left to be done by hand."""
        return bool(self.diff) and not any(remark.needed for remark in self.remarks)


def patch_of(script: Path, name: str) -> Patch:
    """``name``: of the file in the diff. Raises ``NotFound``, and ``Refused`` for what is not Python."""
    text, encoding, patching = _read(script)
    known = [kind(patching) for kind in _KINDS]
    changed = _without_unused_imports(text, patching.source.changed())
    return Patch(
        unified_diff(text, changed, name), any(known), known[0], encoding, _sorted(patching), moved_lines(text, changed)
    )


def left_in_patched(script: Path) -> list[Remark]:
    """What a script that uses Ratchet already carries in variables of its loops. Raises as ``patch_of``."""
    _, _, patching = _read(script)
    for loop in Loops(patching.source).found():
        carried_variables.tell(patching, loop, "session.prepare")
    return _sorted(patching)


def _sorted(patching: Patching) -> list[Remark]:
    return sorted(set(patching.remarks), key=lambda remark: (remark.line, remark.text))


def _read(script: Path) -> tuple[str, str, Patching]:
    """Its text, and how that is encoded."""
    try:
        data = script.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        encoding = encoding.removesuffix("-sig")
        text = data.decode(encoding)
        return text, encoding, Patching.of(text)
    except OSError as error:
        raise NotFound(f"cannot read {script}: {error.strerror or error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise Refused(f"{script}{line} is not valid Python: {reason}") from None


def _without_unused_imports(old: str, new: str) -> str:
    """``new`` without the imported names that were used in ``old`` and are not any more."""
    if new == old:
        return new
    source = Source(new)
    gone = _used(Source(old).tree) - _used(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.remove_names(node, gone)
    return source.changed()


def _used(tree: ast.AST) -> set[str]:
    exported = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} | exported
