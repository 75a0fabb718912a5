"""Pre-flight of ``environment``: reads the requirements from the code, and checks the versions of torch and of Ratchet.
Nothing is installed here: the first attempt builds the environment, as the job's user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ratchet_contract.code.choice import Allowed, allow_all
from ratchet_contract.doctor.installed_packages import release_tuple, satisfies
from ratchet_contract.errors import FieldProblem, SpecError
from ratchet_contract.spec.environment import EnvironmentSpec, normalise, read_lines
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.version import RATCHET_VERSION
from ratchet_hooks.torch_versions import OLDEST
from ratchet_service.isolation.file_access import open_read
from ratchet_service.preflight.report import Report

_POINTER: Final = "/environment/requirements"
_MAX_BYTES: Final = 1 << 20
_OWN: Final = ("ratchet-train", "ratchet-hooks")


def with_lines(spec: JobSpec, code: Path | None, allowed: Allowed = allow_all) -> JobSpec:
    """Return ``spec`` with the lines of its requirements in place of the name of a file. ``code``: the directory of the code,
    such as its snapshot. ``allowed``: returns whether a path may be read. Raises ``SpecError``."""
    environment = spec.environment
    if environment is None or not isinstance(environment.requirements, str) or code is None:
        return spec

    def read(name: str) -> str:
        """Return the text of a file below ``code``."""
        path = code / name
        if not allowed(path.resolve()):
            raise ValueError(f"{name} leads out of the directories that the service may read")
        try:
            with open_read(path) as file:
                data = file.read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise ValueError(f"{name} has more than {_MAX_BYTES >> 20} MiB")
            return data.decode()
        except OSError as error:
            raise ValueError(f"{name} of the code cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{name} is not text in UTF-8") from None

    try:
        if not (lines := read_lines(environment.requirements, read)):
            raise ValueError(f"{environment.requirements} has no requirements")
    except ValueError as error:
        problem = FieldProblem(pointer=_POINTER, code="bad-requirements", detail=str(error))
        raise SpecError(f"{_POINTER}: {error}", errors=[problem]) from None
    return spec.model_copy(update={"environment": EnvironmentSpec(requirements=lines)})


def check(spec: JobSpec, code: Path | None, report: Report, allowed: Allowed = allow_all) -> JobSpec:
    """Return ``spec`` as ``with_lines`` does. Add to ``report`` faults of the file, and requirements that exclude every version
    of torch or of Ratchet that can train the job. ``code``: None: the code cannot be read here."""
    try:
        spec = with_lines(spec, code, allowed)
    except SpecError as error:
        report.problems.extend(error.errors)
        return spec
    names = spec.environment.names if spec.environment is not None else {}
    if "torch" in names and _excludes_all_torch(names["torch"]):
        text = f"torch{names['torch']}: Ratchet needs torch {OLDEST} or newer"
        report.refuse(_POINTER, "torch-version", text)
    for name in _OWN:
        if name in names and not satisfies(RATCHET_VERSION, names[name]):
            text = (
                f"{name}{names[name]}: the job runs with Ratchet {RATCHET_VERSION}, that of its interpreter: remove the version, "
                "or name an interpreter that has it (python)"
            )
            report.refuse(_POINTER, "ratchet-version", text)
    return spec


def provides(spec: JobSpec, module: str) -> bool:
    """Return True if a requirement of the spec's environment has the name of the top-level ``module``."""
    return spec.environment is not None and normalise(module) in spec.environment.names


def _excludes_all_torch(versions: str) -> bool:
    """Return True if a specifier among ``versions`` allows only versions of torch that are older than ``OLDEST``."""
    oldest = release_tuple(OLDEST)
    for operator, version in re.findall(r"(===|~=|==|<=|<)\s*([^\s,]+)", versions):
        bound = release_tuple(version)
        if operator == "~=" and len(bound) > 2:
            bound = (*bound[:-2], bound[-2] + 1)
            operator = "<"
        if operator != "~=" and (bound <= oldest if operator == "<" else bound < oldest):
            return True
    return False
