"""What a script gives to ``Session()``, by the names of the spec: all of the spec that a run without a service has. In a job its
spec counts, and what the script gives otherwise is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ratchet_contract.errors import SpecError, UserError
from ratchet_contract.run_without_service import shown, unequal
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_parse import parse_spec

DIRECTORY: Final = "ratchet-checkpoints"
_POLICY: Final = "on_hook_mismatch"


@dataclass(frozen=True)
class SessionArguments:
    """``given``: by the spec's keys, as the script wrote it; what it left out is not there. ``on_hook_mismatch`` is one of
    ``policy``. ``gives_way``: a package's, in place of a script that has made no Session."""

    directory: Path = Path(DIRECTORY)
    given: dict[str, Any] = field(default_factory=dict)
    gives_way: bool = False

    def spec(self, data: Mapping[str, Any]) -> JobSpec:
        """``data`` with what the script gives in its place; of a mapping (``checkpoint``) the keys that it gives. Raises
        ``UserError``."""
        out = {**data}
        for key, value in self.given.items():
            if key == _POLICY:
                out["policy"] = {**out.get("policy", {}), _POLICY: value}
            elif key != "hook" and isinstance(value, dict):
                out[key] = {**out.get(key, {}), **value}
            else:
                out[key] = value
        try:
            return parse_spec(out)
        except SpecError as error:
            raise UserError(f"the arguments of Session(): {error.detail}", code="session-arguments") from None

    def differences(self, spec: JobSpec) -> list[str]:
        """Keys that the script gives other values than the job's ``spec`` has, with both. Raises ``UserError``."""
        if not self.given:
            return []
        jobs = spec.model_dump(mode="json")
        asked = self.spec(jobs).model_dump(mode="json")
        return [
            f"{path} ({shown(there)} in the script, {shown(here)} in the job's spec)"
            for key in ("policy" if key == _POLICY else key for key in self.given)
            for path, there, here in unequal(key, asked[key], jobs[key])
        ]
