"""The service's settings for Slurm, from its launchers file, and how a job's keys override their defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.launcher import SlurmLauncherSpec


class Settings(BaseModel):
    """The keys under ``slurm:`` in the launchers file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    defaults: SlurmLauncherSpec = Field(SlurmLauncherSpec(), description="Defaults for keys of a job's `launcher`.")
    commands: str | None = Field(
        None, pattern="^/", description="Directory of sbatch and the other Slurm commands; null: on PATH."
    )
    python: str = Field(
        sys.executable, pattern="^/", description="Interpreter of agents, and of ranks whose spec names none."
    )
    image_python: str = Field("python", min_length=1, description="The interpreter within a job's `image`.")
    poll_seconds: float = Field(2.0, gt=0, le=60, description="Interval of calls of squeue, one for all jobs.")
    file_seconds: float = Field(
        15.0, ge=0, le=120, description="Longest time until a file written on a node is visible here."
    )
    command_seconds: float = Field(10.0, ge=1, le=120, description="Time limit of a command.")

    def effective_launcher(self, spec: JobSpec) -> SlurmLauncherSpec:
        """Return the keys under ``launcher`` of the job's spec, with the service's defaults for those that it does not set."""
        assert isinstance(spec.launcher, SlurmLauncherSpec)
        return spec.launcher.with_defaults(self.defaults)


def parse_settings(raw_settings: Mapping[str, Any]) -> Settings:
    """Check the settings from the launchers file, and return them. Raises ``ValueError`` with a message that names the key."""
    try:
        return Settings.model_validate(dict(raw_settings))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"launchers file, slurm: {key}: {first['msg']}") from None
