"""The arguments of ``Session()``; all except ``directory`` are named after keys of the spec. In a job, the job's spec takes
precedence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ratchet_contract.errors import SpecError, UserError
from ratchet_contract.paths import RUN_DIRECTORY
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import parse_spec
from ratchet_contract.spec.run_without_service import differing_leaves, value_text

_POLICY: Final = "on_hook_mismatch"


@dataclass(frozen=True)
class SessionArguments:
    """The arguments that a script or an integration package passes to a Session. ``directory``: where a run without a service
    saves. ``specified``: the other arguments that are not None, by name. ``yields_to_script``: True for an integration package;
    the arguments of a Session that is already open take precedence over its own."""

    directory: Path = Path(RUN_DIRECTORY)
    specified: dict[str, Any] = field(default_factory=dict)
    yields_to_script: bool = False

    def spec(self, data: Mapping[str, Any]) -> JobSpec:
        """Return the spec ``data`` with the script's arguments in place of its values; mappings other than ``hook`` are merged.
        Raises ``UserError`` if that is not valid."""
        out = {**data}
        for key, value in self.specified.items():
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
        """Return one text for each value in which the script's arguments differ from the job's ``spec``. Raises ``UserError`` for
        invalid arguments."""
        if not self.specified:
            return []
        jobs = spec.model_dump(mode="json")
        asked = self.spec(jobs).model_dump(mode="json")
        return [
            f"{path} ({value_text(there)} in the script, {value_text(here)} in the job's spec)"
            for key in ("policy" if key == _POLICY else key for key in self.specified)
            for path, there, here in differing_leaves(key, asked[key], jobs[key])
        ]
