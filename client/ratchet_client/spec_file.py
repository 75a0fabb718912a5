"""A job spec as people hand it over: a file, a mapping or a ``JobSpec``; relative paths made absolute where they are known."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ratchet_contract.errors import NotFound, SpecError
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_parse import load_spec_text

_INIT = "ratchet init"
Spec: TypeAlias = JobSpec | Mapping[str, Any] | str | os.PathLike[str]
"""What ``submit`` takes: a model, its data, or the path of a YAML or JSON file."""


def spec_body(spec: Spec) -> dict[str, Any]:
    """The request's body. ``code.path``, ``start_from.path`` and ``python`` are relative to the file, or to the current directory
    for data that comes from no file. Raises ``SpecError``, ``NotFound``."""
    if isinstance(spec, str | os.PathLike):
        return read_spec(os.fspath(spec))
    given = spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, JobSpec) else dict(spec)
    data: dict[str, Any] = json_value(given, "the spec")
    _absolute_paths(data, Path.cwd())
    return data


def read_spec(file: str) -> dict[str, Any]:
    """The decoded spec of a file, or of standard input for ``-``. Raises ``SpecError``, ``NotFound``."""
    if file.endswith(".py"):
        raise SpecError(f"{file} is a program, and a job spec is YAML: `{_INIT} {file}` writes one that runs it")
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot read {file}: {error.strerror or error}{_instead(file)}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{file} is not UTF-8 text: a job spec is YAML or JSON") from None
    data = load_spec_text(text)
    if data is None:
        raise SpecError(
            f"{'standard input' if file == '-' else file} is empty: a job spec is a YAML mapping; `{_INIT} SCRIPT.py` writes one"
        )
    if not isinstance(data, dict):
        raise SpecError(
            f"{file} holds no mapping but a {type(data).__name__}: a job spec is a YAML mapping (`key: value` lines) or a JSON "
            f"object; `{_INIT} SCRIPT.py` writes one"
        )
    data = json_value(data, file)
    _absolute_paths(data, Path.cwd() if file == "-" else Path(file).absolute().parent)
    return dict(data)


def _instead(file: str) -> str:
    """The specs that may have been meant: those of the directory that was named, or that the file is not in."""
    path = Path(file)
    folder = path if path.is_dir() else path.parent
    found = sorted(str(p) for pattern in ("*.yaml", "*.yml", "*.json") for p in folder.glob(pattern))[:5]
    meant = (
        f"name one of its files: {', '.join(found)}" if path.is_dir() else f"is one of these meant? {', '.join(found)}"
    )
    return f"; {meant}" if found else f"; `{_INIT} SCRIPT.py` writes a spec"


def json_value(data: Any, where: str) -> Any:
    """What YAML or Python gave, as JSON knows it; a ``Path`` becomes text. Raises ``SpecError`` for dates, not-a-number and
    the like."""
    try:
        return json.loads(json.dumps(data, allow_nan=False, default=_path_text))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where} holds a value that JSON does not know ({error}): quote it") from None


def _path_text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _absolute_paths(data: dict[str, Any], base: Path) -> None:
    """``code.path``, ``start_from.path`` and a ``python`` given as a path mean the same wherever the service runs."""
    code, start = data.get("code"), data.get("start_from")
    if isinstance(code, dict) and isinstance(code.get("path"), str) and code["path"]:
        code["path"] = str((base / Path(code["path"]).expanduser()).resolve())
    if isinstance(start, dict) and isinstance(start.get("path"), str) and start["path"]:
        # Not resolved: caches of models have links whose name tells the format, to files whose name does not.
        start["path"] = str(base / Path(start["path"]).expanduser())
    python = data.get("python")
    if isinstance(python, str) and "/" in python:
        # Not resolved: a virtual environment's python is a link that must stay one.
        data["python"] = str(base / Path(python).expanduser())
