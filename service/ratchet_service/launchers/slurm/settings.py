"""The service's settings for Slurm, from its launchers file, and how they lie under what a job gives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_engines import SlurmLauncherSpec


class Settings(BaseModel):
    """Under ``slurm:`` of the launchers file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    defaults: SlurmLauncherSpec = Field(
        SlurmLauncherSpec(), description="Keys of a job's `launcher` that jobs leave out."
    )
    commands: str | None = Field(None, pattern="^/", description="Directory of sbatch and the others; null: on PATH.")
    python: str = Field(sys.executable, pattern="^/", description="Of agents, and of ranks whose spec names none.")
    image_python: str = Field("python", min_length=1, description="The interpreter within a job's `image`.")
    poll_seconds: float = Field(2.0, gt=0, le=60, description="Between two questions to squeue, for all jobs together.")
    file_seconds: float = Field(
        15.0, ge=0, le=120, description="Until a file that was written on a node is seen here at the latest."
    )
    command_seconds: float = Field(10.0, ge=1, le=120, description="Until a command that does not answer is given up.")

    def launcher_of(self, spec: JobSpec) -> SlurmLauncherSpec:
        """What holds for a job: the keys that it gives, and the defaults for the others."""
        assert isinstance(spec.launcher, SlurmLauncherSpec)
        return spec.launcher.over(self.defaults)


def read(given: Mapping[str, Any]) -> Settings:
    """The settings. Raises ``ValueError`` with a sentence that names the key."""
    try:
        return Settings.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"launchers file, slurm: {key}: {first['msg']}") from None
