"""Reads a job spec from a file, a mapping or a ``JobSpec``, and makes the paths of code, model and interpreter absolute."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ratchet_contract.errors import NotFound, SpecError
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import load_spec_text

_INIT = "ratchet init"
Spec: TypeAlias = JobSpec | Mapping[str, Any] | str | os.PathLike[str]
"""What ``submit`` accepts: a model, its data, or the path of a YAML or JSON file."""


def spec_body(spec: Spec) -> dict[str, Any]:
    """Return the spec as JSON data for a request. Paths of code, model and interpreter become absolute: relative to the spec's
    file, or without one to the current directory. Raises ``SpecError`` if the spec is not a mapping of JSON values, and
    ``NotFound`` if the file cannot be read."""
    if isinstance(spec, str | os.PathLike):
        return read_spec(os.fspath(spec))
    given = spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, JobSpec) else dict(spec)
    data: dict[str, Any] = json_value(given, "the spec")
    _absolute_paths(data, Path.cwd())
    return data


def read_spec(file: str) -> dict[str, Any]:
    """Return the spec in ``file`` ("-": standard input). Paths of code, model and interpreter become absolute, relative to the
    file's directory, or for "-" to the current one. Raises ``SpecError`` if it is no YAML or JSON mapping, and ``NotFound`` for
    an unreadable file."""
    if file.endswith(".py"):
        raise SpecError(f"{file} is a program, and a job spec is YAML: `{_INIT} {file}` writes one that runs it")
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot read {file}: {error.strerror or error}{_spec_hint(file)}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{file} is not UTF-8 text: a job spec is YAML or JSON") from None
    data = load_spec_text(text)
    if data is None:
        raise SpecError(
            f"{'standard input' if file == '-' else file} is empty: a job spec is a YAML mapping; `{_INIT} SCRIPT.py` writes one"
        )
    if not isinstance(data, dict):
        raise SpecError(
            f"{file} holds a {type(data).__name__}, no mapping: a job spec is a YAML mapping (`key: value` lines) or a JSON "
            f"object; `{_INIT} SCRIPT.py` writes one"
        )
    data = json_value(data, file)
    _absolute_paths(data, Path.cwd() if file == "-" else Path(file).absolute().parent)
    return dict(data)


def _spec_hint(file: str) -> str:
    """Return the end of an error message: it names spec files near ``file``; if there are none, how to write a spec."""
    path = Path(file)
    folder = path if path.is_dir() else path.parent
    found = sorted(str(p) for pattern in ("*.yaml", "*.yml", "*.json") for p in folder.glob(pattern))[:5]
    meant = (
        f"name one of its files: {', '.join(found)}" if path.is_dir() else f"is one of these meant? {', '.join(found)}"
    )
    return f"; {meant}" if found else f"; `{_INIT} SCRIPT.py` writes a spec"


def json_value(data: Any, where: str) -> Any:
    """Return a copy of ``data`` as JSON types; a ``Path`` becomes text. Raises ``SpecError`` for dates, NaN and similar values;
    ``where`` names the data in its message."""
    try:
        return json.loads(json.dumps(data, allow_nan=False, default=_path_text))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where} contains a value that JSON cannot represent ({error}): quote it") from None


def _path_text(value: Any) -> str:
    """Return a path as text; called by ``json.dumps`` for values that are not JSON types."""
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _absolute_paths(data: dict[str, Any], base: Path) -> None:
    """Make ``code.path``, ``start_from.path`` and a ``python`` with a slash absolute in ``data``, in place. ``base``: the
    directory that they are relative to."""
    # The service may run in another directory.
    code, start = data.get("code"), data.get("start_from")
    if isinstance(code, dict) and isinstance(code.get("path"), str) and code["path"]:
        code["path"] = str((base / Path(code["path"]).expanduser()).resolve())
    if isinstance(start, dict) and isinstance(start.get("path"), str) and start["path"]:
        # Not resolved: model caches contain links whose names show the format, to files whose names do not.
        start["path"] = str(base / Path(start["path"]).expanduser())
    python = data.get("python")
    if isinstance(python, str) and "/" in python:
        # Not resolved: a virtual environment's python is a link, and works only as a link.
        data["python"] = str(base / Path(python).expanduser())
