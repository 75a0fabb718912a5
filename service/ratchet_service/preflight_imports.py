"""The packages that a job's code imports, as its source tells: those that its interpreter lacks are found before it starts.

Only what certainly runs forbids the job: an import that is a statement of the script or the task's module, or of a module in the
code directory that is imported so. Within a function or a condition it is a warning; within ``try`` it is the code's own affair.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ratchet_contract.module_imports import files_of, imports
from ratchet_contract.public_names import PACKAGE, requirement
from ratchet_contract.spec import JobSpec
from ratchet_service import syntax
from ratchet_service.confined import Confined
from ratchet_service.file_owner import as_user
from ratchet_service.interpreters import pip_install
from ratchet_service.preflight_report import Report
from ratchet_service.snapshot import exists

_MAX_FILES: Final = 300
_MAX_BYTES: Final = 2 << 20
_OWN_PATHS: Final = (b"sys.path", b"sys.modules", b"meta_path", b"path_hooks", b"addsitedir")
"""Code with one of these may find modules where nobody else looks."""


@dataclass
class Imported:
    """Top-level modules that are none of the code's own, each with the place of an import; ``certain``: it runs in any case."""

    certain: dict[str, str] = field(default_factory=dict)
    perhaps: dict[str, str] = field(default_factory=dict)
    shadow: tuple[str, str] | None = None
    """A module of the code's own that is imported under Ratchet's name, and the place of the import."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.certain | self.perhaps))


def imported(spec: JobSpec, path: Sequence[str], confined: Confined) -> Imported:
    """``path``: directories of the spec's own PYTHONPATH."""
    if spec.code is None:
        return Imported()
    code = Path(spec.code.path)
    if spec.script is not None:
        entry = [code / spec.script[0]]
        roots = [entry[0].parent, code, *map(Path, path)]
    else:
        assert spec.task is not None
        entry, roots = files_of(spec.task.entrypoint.partition(":")[0], code), [code, *map(Path, path)]
    with as_user(confined.user):
        return _read(entry, roots, code)


def _read(entry: Sequence[Path], roots: Sequence[Path], code: Path) -> Imported:
    out, seen, own_paths = Imported(), dict[Path, bool](), False
    waiting = [(file, True) for file in entry]
    while waiting and len(seen) < _MAX_FILES:
        file, certain = waiting.pop()
        if seen.get(file, False) or (file in seen and not certain):
            continue
        seen[file] = certain
        try:
            if not file.is_file() or file.stat().st_size > _MAX_BYTES:
                continue
            source = file.read_bytes()
            tree = syntax.parse(source, file.name)
            found = list(imports(tree))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the interpreter itself will tell
            continue
        own_paths = own_paths or any(word in source for word in _OWN_PATHS)
        for one in found:
            mine = [f for root in roots for f in files_of(one.name, root)]
            waiting += [(f, certain and one.always) for f in mine if f.is_relative_to(code)]
            if one.top == PACKAGE and mine:
                out.shadow = os.path.relpath(mine[-1], code), f"{os.path.relpath(file, code)}, line {one.line}"
            if one.needed and not mine and not _is_local(one.top, roots):
                place = f"{os.path.relpath(file, code)}, line {one.line}"
                (out.certain if certain and one.always else out.perhaps).setdefault(one.top, place)
    if own_paths:
        return Imported(perhaps=out.perhaps | out.certain, shadow=out.shadow)
    return out


def _is_local(name: str, roots: Sequence[Path]) -> bool:
    return any(exists(root / name, directory=True) or any(root.glob(f"{name}.*")) for root in roots)


def check(spec: JobSpec, python: str, found: Imported, missing: Sequence[str], report: Report) -> None:
    pointer = "/script/0" if spec.script is not None else "/task/entrypoint"
    if found.shadow is not None:
        file, place = found.shadow
        text = (
            f"`import {PACKAGE}` ({place}): {file} of the code directory has the name of Ratchet's own package, and one hides "
            f"the other. Rename {file}, or write `from ratchet_worker.session import Session` where Ratchet's Session is meant"
        )
        report.warn(pointer, "ratchet-shadowed", text)
    if certain := {name: found.certain[name] for name in missing if name in found.certain}:
        report.refuse(pointer, "package-missing", f"{_lacks(python, certain)}. {_cure(python, certain)}")
    elif perhaps := {name: found.perhaps[name] for name in missing}:
        text = (
            f"{_lacks(python, perhaps)}; it may do without, since the import is within a function or a condition, or "
        )
        report.warn(pointer, "package-missing", f"{text}sys.path is the code's own. {_cure(python, perhaps)}")


def _lacks(python: str, places: Mapping[str, str]) -> str:
    named = ", ".join(f"{name!r} ({place})" for name, place in sorted(places.items()))
    return f"the code imports {named}, which {python} does not have"


def _cure(python: str, names: Mapping[str, str]) -> str:
    install = pip_install(python, *map(requirement, sorted(names)))
    return (
        f"Install it: {install} (if the package is named like its module), or name another interpreter with `python`. A module "
        "of your own belongs into the code directory"
    )
