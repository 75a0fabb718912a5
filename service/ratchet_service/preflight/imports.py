"""Pre-flight of the packages that a job's code imports, by its source. Only an import that certainly runs forbids the job, such
as one at the top level of the script; otherwise a missing package is a warning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ratchet_contract.script.module_imports import find_imports, module_files
from ratchet_contract.script.public_names import PACKAGE, requirement
from ratchet_contract.spec.job import JobSpec
from ratchet_service.isolation.file_access import as_user
from ratchet_service.isolation.sandbox import Sandbox
from ratchet_service.preflight import entrypoint, environment
from ratchet_service.preflight.report import Report
from ratchet_service.user_code.interpreter_probe import pip_install_command
from ratchet_service.user_code.snapshot import exists

_MAX_FILES: Final = 300
_OWN_PATHS: Final = (b"sys.path", b"sys.modules", b"meta_path", b"path_hooks", b"addsitedir")
"""Code with one of these may find modules in places that are not searched here."""


@dataclass
class Imported:
    """The top-level modules that a job's code imports: name -> place of an import. Modules of the code itself are left out. So
    are imports that are allowed to fail, such as one in a ``try``. ``certain``: the import runs in any case. ``conditional``: the
    import may run."""

    certain: dict[str, str] = field(default_factory=dict)
    conditional: dict[str, str] = field(default_factory=dict)
    shadow: tuple[str, str] | None = None
    """A module of the job's code that is imported under Ratchet's name, and the place of the import."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all these modules, sorted."""
        return tuple(sorted(self.certain | self.conditional))


def find_job_imports(spec: JobSpec, path: Sequence[str], sandbox: Sandbox) -> Imported:
    """Return what the job's code imports, by its source. ``path``: the directories of the spec's own PYTHONPATH."""
    if spec.code is None:
        return Imported()
    code = Path(spec.code.path)
    if spec.script is not None:
        entry = [code / spec.script[0]]
        roots = [entry[0].parent, code, *map(Path, path)]
    else:
        assert spec.task is not None
        entry, roots = module_files(spec.task.entrypoint.partition(":")[0], code), [code, *map(Path, path)]
    with as_user(sandbox.user):
        return _scan(entry, roots, code)


def _scan(entry: Sequence[Path], roots: Sequence[Path], code: Path) -> Imported:
    """Return the imports of the files ``entry`` and of the modules in ``code`` that these files import, directly or indirectly.
    Relative imports are not followed. At most ``_MAX_FILES`` files are read. ``roots``: the directories in which modules are
    searched."""
    out, seen, own_paths = Imported(), dict[Path, bool](), False
    pending = [(file, True) for file in entry]
    while pending and len(seen) < _MAX_FILES:
        file, certain = pending.pop()
        if seen.get(file, False) or (file in seen and not certain):
            continue
        seen[file] = certain
        try:
            if not file.is_file() or file.stat().st_size > entrypoint.MAX_SOURCE_BYTES:
                continue
            source = file.read_bytes()
            tree = entrypoint.parse(source, file.name)
            found = list(find_imports(tree))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the interpreter itself will report it
            continue
        own_paths = own_paths or any(word in source for word in _OWN_PATHS)
        for one in found:
            local_files = [f for root in roots for f in module_files(one.name, root)]
            pending += [(f, certain and one.is_top_level) for f in local_files if f.is_relative_to(code)]
            if one.top_package == PACKAGE and local_files:
                out.shadow = os.path.relpath(local_files[-1], code), f"{os.path.relpath(file, code)}, line {one.line}"
            if one.is_required and not local_files and not _is_local(one.top_package, roots):
                place = f"{os.path.relpath(file, code)}, line {one.line}"
                (out.certain if certain and one.is_top_level else out.conditional).setdefault(one.top_package, place)
    if own_paths:
        return Imported(conditional=out.conditional | out.certain, shadow=out.shadow)
    return out


def _is_local(name: str, roots: Sequence[Path]) -> bool:
    """Return True if one of the directories ``roots`` has a directory ``name``, or a file ``name`` with any suffix."""
    return any(exists(root / name, directory=True) or any(root.glob(f"{name}.*")) for root in roots)


def check(spec: JobSpec, python: str, packages: Imported, missing: Sequence[str], report: Report) -> None:
    """Check that the interpreter ``python`` has the packages that the code imports. Add a problem to ``report`` for missing
    packages whose import certainly runs. If there are none, add a warning for missing packages whose import may run. ``missing``:
    the names that the interpreter did not find. A module of the code that hides Ratchet's package gets a warning."""
    pointer = "/script/0" if spec.script is not None else "/task/entrypoint"
    if packages.shadow is not None:
        file, place = packages.shadow
        text = (
            f"`import {PACKAGE}` ({place}): {file} of the code directory has the name of Ratchet's own package, and one hides "
            f"the other. Rename {file}, or write `from ratchet_worker.session import Session` where Ratchet's Session is meant"
        )
        report.warn(pointer, "ratchet-shadowed", text)
    missing = [name for name in missing if not environment.provides(spec, name)]
    if spec.environment is not None and missing:
        places = packages.certain | packages.conditional
        text = _missing_text(python, {name: places[name] for name in missing if name in places})
        report.warn(pointer, "package-missing", f"{text}: it must come with the requirements of environment")
    elif certain := {name: packages.certain[name] for name in missing if name in packages.certain}:
        report.refuse(
            pointer, "package-missing", f"{_missing_text(python, certain)}. {_install_advice(python, certain)}"
        )
    elif perhaps := {name: packages.conditional[name] for name in missing if name in packages.conditional}:
        text = f"{_missing_text(python, perhaps)}; it may work without, since the import is in a function or a condition, or "
        report.warn(pointer, "package-missing", f"{text}the code changes sys.path. {_install_advice(python, perhaps)}")


def _missing_text(python: str, places: Mapping[str, str]) -> str:
    """Return a text with the missing modules and the places of their imports."""
    named = ", ".join(f"{name!r} ({place})" for name, place in sorted(places.items()))
    return f"the code imports {named}, which {python} does not have"


def _install_advice(python: str, names: Mapping[str, str]) -> str:
    """Return a text with the command that installs the packages of the modules ``names``."""
    install = pip_install_command(python, *map(requirement, sorted(names)))
    return (
        f"Install it: {install} (if the package has the same name as its module), or name another interpreter with `python`. "
        "Put a module of your own into the code directory"
    )
