"""A job that has adopted a run without a service, until it has a checkpoint of its own: what the run recorded of its spec and its
code is compared with what it would record of this job's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.run_without_service import as_without_service
from ratchet_worker import imported_code
from ratchet_worker.restore import Chosen

NOT_LOOKED_AT = (
    "not looked at: code that was not imported yet when Session() was called; variables of the environment, PYTHONHASHSEED among "
    "them, but for those that are known to change bits"
)
"""What the verdict on the first resume does not cover."""


class Adopted:
    """Made as the script makes its Session, when the code that is imported is what it was in the run. ``launch``: as the run
    would have written it, so far as a resume compares it; ``paths``: of the copy of the run."""

    def __init__(self, launch: LaunchFile) -> None:
        assert launch.fork is not None and launch.spec.script is not None
        self.paths = JobPaths(Path(launch.fork.job_root))
        script = Path(launch.code_dir or launch.workdir) / launch.spec.script[0]
        resolved = launch.resolved.model_copy(update={"code_digest": imported_code.digest(script)})
        spec = as_without_service(launch.spec, launch.resolved.device)
        self.launch = launch.model_copy(update={"spec": spec, "resolved": resolved})

    def attempts(self) -> Iterator[AttemptPaths]:
        """Starts of the run whose steps may be done again; newest first."""
        found = [int(path.name) for path in (self.paths.root / "attempts").iterdir()]
        yield from (self.paths.attempt(number) for number in sorted(found, reverse=True))


def adopted(launch: LaunchFile, chosen: Chosen) -> Adopted | None:
    """None: the attempt does not start from the checkpoint of such a run."""
    fork = launch.fork
    if fork is None or fork.adopted is None or chosen.base.digest != fork.digest:
        return None
    return Adopted(launch)
