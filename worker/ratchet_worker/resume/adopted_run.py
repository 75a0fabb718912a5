"""Facts for the resume of a job from the checkpoint of an adopted run (one without a service)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.run_without_service import standalone_spec
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.state import imported_code

UNCHECKED_NOTE = (
    "not compared: code that was not imported yet when Session() was called; environment variables, including "
    "PYTHONHASHSEED, except those that are known to change bits"
)
"""What the verdict on the first resume does not cover; a note in the resume report."""


class Adopted:
    """An adopted run, for the job that starts from its checkpoint. ``launch``: what the run would have recorded as this job's
    launch file. ``paths``: paths in the copy of the run."""

    def __init__(self, launch: LaunchFile) -> None:
        assert launch.fork is not None and launch.spec.script is not None
        self.paths = JobPaths(Path(launch.fork.job_root))
        script = Path(launch.code_dir or launch.workdir) / launch.spec.script[0]
        # Covers the modules imported so far: this object is made when the script makes its Session, where the run took the
        # digest.
        resolved = launch.resolved.model_copy(update={"code_digest": imported_code.digest(script)})
        spec = standalone_spec(launch.spec, launch.resolved.device)
        self.launch = launch.model_copy(update={"spec": spec, "resolved": resolved})

    def attempts(self) -> Iterator[AttemptPaths]:
        """Yield the paths of those attempts (starts) of the adopted run that the copy has, newest first."""
        found = [int(path.name) for path in (self.paths.root / "attempts").iterdir()]
        yield from (self.paths.attempt(number) for number in sorted(found, reverse=True))


def find_adopted(launch: LaunchFile, chosen: Chosen) -> Adopted | None:
    """Return the adopted run from whose checkpoint the attempt starts; None if it starts from anything else."""
    fork = launch.fork
    if fork is None or fork.adopted is None or chosen.base.digest != fork.digest:
        return None
    return Adopted(launch)
