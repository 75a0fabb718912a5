"""The results of pre-flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem


@dataclass
class Report:
    """The results of pre-flight. ``problems`` forbid the job; ``warnings`` do not. Pointers are JSON pointers into the spec."""

    warnings: list[Warning_] = field(default_factory=list)
    problems: list[FieldProblem] = field(default_factory=list)

    def warn(self, pointer: str, code: str, detail: str) -> None:
        """Add a warning."""
        self.warnings.append(Warning_(pointer=pointer, code=code, detail=detail))

    def refuse(self, pointer: str, code: str, detail: str) -> None:
        """Add a problem, which forbids the job."""
        self.problems.append(FieldProblem(pointer=pointer, code=code, detail=detail))
