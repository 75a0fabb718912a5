"""The surroundings of the script: its directory, the files in it, and the interpreter that runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from ratchet_contract.code.choice import iter_chosen
from ratchet_contract.code.tree import TreeError
from ratchet_contract.errors import NotFound, Refused

LARGE: Final = 100 * 10**6
"""Bytes below ``code.path`` above which a note is added. The service has its own limits, and reports them."""

MANY: Final = 10_000
"""Number of files below ``code.path`` above which the same note is added."""
_MAX_FILES: Final = 100_000
"""Maximum number of files that are counted; a data set of millions of files is large without counting all."""

_PROGRAM: Final = """
import json, sys
from importlib.util import find_spec
names, sys.path[:0] = json.loads(sys.argv[1]), json.loads(sys.argv[2])
def there(name):
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules
print(json.dumps([name for name in names if not there(name)]))
"""


@dataclass(frozen=True)
class Place:
    """Where a script is, as resolved paths. ``code``: the directory of the job's snapshot; ``script``: a file below it."""

    code: Path
    script: Path

    @property
    def relative(self) -> str:
        return self.script.relative_to(self.code).as_posix()


def locate(script: str, code: Path | None) -> Place:
    """Return the place of the script file ``script``. ``code``: the directory of the snapshot; None: the script's directory.
    Raise ``NotFound`` if the file or the directory does not exist. Raise ``Refused`` if the script is no ``.py`` file or is not
    below ``code``."""
    path = Path(script).expanduser().absolute()
    if path.is_dir():
        raise Refused(f"{script} is a directory: name the file that trains")
    if path.suffix != ".py":
        cure = {
            ".ipynb": "save the notebook as a script: jupyter nbconvert --to script",
            ".sh": "give the command that it starts in the end, like ratchet init torchrun --nproc-per-node 4 train.py",
        }.get(path.suffix, "a spec names a .py file")
        raise Refused(f"{script}: {cure}")
    if not path.is_file():
        raise NotFound(f"no such file: {script} (looked in {Path.cwd()})")
    path = path.resolve()
    if code is None:
        return Place(path.parent, path)
    root = code.expanduser().resolve()
    if not root.is_dir():
        raise NotFound(f"--code {code} is not a directory")
    if not path.is_relative_to(root):
        raise Refused(f"{script} is not below --code {code}: the snapshot must hold it")
    return Place(root, path)


def environment_of(python: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Return the environment, or the interpreter, that the job needs: that of ``python``, else the active environment that
    ``environ`` names. Return None if neither is set, or if it is the environment of this command."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if python is None and environ.get(name):
            python = Path(environ[name])
    if python is None:
        return None
    prefix = python if python.is_dir() else python.parent.parent
    return None if prefix.resolve() == Path(sys.prefix).resolve() else prefix if _is_environment(prefix) else python


def _is_environment(prefix: Path) -> bool:
    """Return True if ``prefix`` is a virtual environment or a conda environment with an interpreter."""
    return (prefix / "bin" / "python").exists() and (
        (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    )


def missing_modules(python: Path | None, names: Iterable[str], folders: list[Path]) -> list[str] | None:
    """Return those of ``names`` that the interpreter or environment ``python`` (None: this command's) cannot find. Return None if
    the interpreter fails. Starts the interpreter and blocks for up to 60 seconds. ``folders``: directories that are searched
    first."""
    program = Path(sys.executable) if python is None else python / "bin" / "python" if python.is_dir() else python
    try:
        done = subprocess.run(
            [str(program), "-c", _PROGRAM, json.dumps(sorted(names)), json.dumps([str(f) for f in folders])],
            capture_output=True, text=True, timeout=60, cwd="/", check=True,
        )  # fmt: skip
        return list(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Entry:
    """A file or directory directly in the code directory, as in a snapshot. ``name``: ends with "/" for a directory; ``size``:
    bytes."""

    name: str
    count: int
    size: int


def entries(code: Path) -> list[Entry]:
    """Return the files and directories directly in ``code`` that a snapshot would contain. The entry of a directory has the
    number and the total size of the files below it. At most ``_MAX_FILES`` files are counted."""
    sizes: dict[str, list[int]] = {}
    with suppress(TreeError):  # the submission reports it
        for entry in islice(iter_chosen(code), _MAX_FILES):
            top, below, _ = entry.path.partition("/")
            sizes.setdefault(top + below, []).append(entry.size)
    return [Entry(name, len(found), sum(found)) for name, found in sizes.items()]
