"""The spec's key ``environment``: the packages that a job needs beyond those of its interpreter, as lines of a requirements
file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from pydantic import Field, field_validator

from ratchet_contract.spec.types import SpecModel

MAX_LINES: Final = 1000
_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[A-Za-z0-9._,\s-]*\])?\s*"
    r"((?P<versions>(===|~=|==|!=|<=|>=|<|>)\s*[^\s,;@#<>=!~]+(\s*,\s*(===|~=|==|!=|<=|>=|<|>)\s*[^\s,;@#<>=!~]+)*)?"
    r"|@\s*(?P<url>[A-Za-z][A-Za-z0-9+.-]*://\S+))"
    r"(\s*;\s*[^;]+?)?(\s+--hash=[a-z0-9]+:[0-9a-f]+)*"
)
_INCLUDE: Final = re.compile(r"(?:-r\s*|--requirement[\s=]\s*)(\S+)")
_CURES: Final = (
    (re.compile(r"(-i|--index-url|--extra-index-url|--find-links|-f|--no-index|--trusted-host|--pre|--prefer-binary|--only-binary"
                r"|--no-binary)\b"),
     "an option of pip: set it by its variable in env or secrets, such as PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"),
    (re.compile(r"-e\b|--editable\b|\.|/"),
     "a path: code.path is on the import path already; a package elsewhere is given as NAME @ file:///ABSOLUTE/PATH"),
    (re.compile(r"-c\b|--constraint\b"), "a file of constraints: write the versions into the requirements"),
    (re.compile(r"[A-Za-z0-9+.-]+://"), "an address without a name: write NAME @ ADDRESS"),
)  # fmt: skip


class EnvironmentSpec(SpecModel):
    """Packages that are installed for the job, in an environment on top of its interpreter."""

    requirements: str | list[str] = Field(
        description="Lines of a requirements file, or the name of such a file below code.path, whose lines are stored at "
        "submission. The interpreter's own packages, such as torch, stay visible. Options of pip are given by its "
        "variables in env or secrets, such as PIP_INDEX_URL."
    )

    @field_validator("requirements", mode="before")
    @classmethod
    def _shape(cls, value: Any) -> Any:
        """Raise ``ValueError`` for lines that are no requirements, and for a file that is not below ``code``."""
        if isinstance(value, str):
            path = PurePosixPath(value)
            if not value or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{value!r} is not the name of a file below code.path, given relative to it")
        elif isinstance(value, list) and value and all(isinstance(line, str) for line in value):
            lines = [line for each in value for _, line in _joined(each)]
            if len(value) > MAX_LINES:
                raise ValueError(f"{len(value)} lines; at most {MAX_LINES} are allowed")
            if fault := next((fault for line in lines if (fault := line_fault(line))), None):
                raise ValueError(fault)
            return lines
        else:
            raise ValueError("must be the name of a file below code.path, or a list of lines such as 'timm==1.0.9'")
        return value

    @property
    def lines(self) -> list[str]:
        """The requirements, one a line; empty if a file is named whose lines are not read yet."""
        return self.requirements if isinstance(self.requirements, list) else []

    @property
    def names(self) -> dict[str, str]:
        """The required packages: normalised name -> its versions as written, such as ``>=2.9,<3``."""
        found = (match for line in self.lines if (match := _REQUIREMENT.fullmatch(line)))
        return {normalise(match["name"]): match["versions"] or "" for match in found}


def normalise(name: str) -> str:
    """Return the normalised name of a package: ``Foo.bar`` is ``foo-bar``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def line_fault(line: str) -> str | None:
    """Return why ``line`` is not accepted as a requirement, with the cure; None if it is."""
    if _REQUIREMENT.fullmatch(line):
        return None
    cure = next((text for pattern, text in _CURES if pattern.match(line)), "not a requirement such as NAME==VERSION")
    return f"{line[:100]!r} is {cure}"


def read_lines(name: str, read: Callable[[str], str], _seen: tuple[str, ...] = ()) -> list[str]:
    """Return the requirements in the file ``name``, and in those that it includes by ``-r``. ``read`` returns a file's text.
    Raises ``ValueError``, which names file and line, and as ``read``."""
    if name in _seen:
        raise ValueError(f"{name} includes itself")
    lines: list[str] = []
    for number, line in _joined(read(name)):
        if match := _INCLUDE.fullmatch(line):
            path = PurePosixPath(name).parent / match[1]
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{name}, line {number}: {match[1]!r} is not a file below code.path, given without '..'"
                )
            lines += read_lines(str(path), read, (*_seen, name))
        elif fault := line_fault(line):
            raise ValueError(f"{name}, line {number}: {fault}")
        else:
            lines.append(line)
        if len(lines) > MAX_LINES:
            raise ValueError(f"{name} has more than {MAX_LINES} requirements")
    return lines


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and content of each line that is not empty, without comments, with continued lines joined."""
    waiting, begin = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begin = begin if waiting else number
        if line.endswith("\\"):
            waiting += line[:-1] + " "
            continue
        whole = " ".join(re.sub(r"(^|\s)#.*", "", waiting + line).split())
        waiting = ""
        if whole:
            yield begin, whole
