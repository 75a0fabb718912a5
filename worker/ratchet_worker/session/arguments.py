"""The arguments of ``Session()``, named after keys of the spec. The spec of a run without a service is made of them, the script,
the ranks and defaults. In a job, the job's spec takes precedence, and the caller reports arguments that differ from it."""

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
    """The arguments that a script passed to ``Session()``. ``directory``: where a run without a service saves. ``specified``: the
    other arguments that the script passed, by the spec's keys; arguments that were left out are absent. The key
    ``on_hook_mismatch`` in it stands for ``policy.on_hook_mismatch`` of the spec. ``yields_to_script``: an integration package
    passed these arguments; those of a Session that the script has made take precedence over them."""

    directory: Path = Path(RUN_DIRECTORY)
    specified: dict[str, Any] = field(default_factory=dict)
    yields_to_script: bool = False

    def spec(self, data: Mapping[str, Any]) -> JobSpec:
        """Return the spec made of ``data`` (the content of a spec) with the script's arguments in place of its values. In a
        mapping, such as ``checkpoint``, only the keys that the script passed are replaced; ``hook`` is replaced as a whole.
        Raises ``UserError`` if the result is not a valid spec."""
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
        """Return one text for each value that differs between the script's arguments and the job's ``spec``, with its path in the
        spec and both values; empty if none differs. Arguments that the script did not pass never differ, and ``directory`` is not
        compared. Raises ``UserError`` if the job's spec with the arguments in place of its values is not valid."""
        if not self.specified:
            return []
        jobs = spec.model_dump(mode="json")
        asked = self.spec(jobs).model_dump(mode="json")
        return [
            f"{path} ({value_text(there)} in the script, {value_text(here)} in the job's spec)"
            for key in ("policy" if key == _POLICY else key for key in self.specified)
            for path, there, here in differing_leaves(key, asked[key], jobs[key])
        ]
