"""Slurm's commands as processes: each with a deadline, none with options from the environment, none left when we are killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from ratchet_service.launchers.base import EngineUnreachable

_AWAY: Final = re.compile(
    "unable to contact slurm|connection refused|connection timed out|timed out on send/recv|zero bytes were transmitted|"
    "standby mode|configuration source|unable to establish|no route to host|address .* failed|authentication|munge",
    re.IGNORECASE,
)
"""Of slurmctld, the network or munge, not of the request: it may be answered later."""
_OPTIONS: Final = ("SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_")
_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})


class Refused(Exception):
    """The command says no; in its own words."""


class Commands:
    """``folder``: where they are (None: on PATH); ``seconds``: how long each may take; ``environ``: the service's environment."""

    def __init__(self, folder: str | None, seconds: float, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._seconds = seconds
        self._environ = dict(environ)
        self._guard = shutil.which("setpriv")

    def run(self, name: str, *arguments: str, text: str = "", environ: Mapping[str, str] | None = None) -> str:
        """What the command prints. ``text``: its standard input; ``environ``: what a job gets, in place of the service's own.
        Raises ``EngineUnreachable``, also where there is no such command or it takes too long, and ``Refused``."""
        program = name if self._folder is None else f"{self._folder}/{name}"
        command = [program, *arguments]
        if (
            self._guard is not None
        ):  # an sbatch that outlived the service could submit what is submitted again meanwhile
            command = [self._guard, "--pdeathsig", "KILL", *command]
        try:
            done = subprocess.run(
                command,
                input=text,
                env=without_options(self._environ if environ is None else environ),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._seconds,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise EngineUnreachable(f"Slurm: {name} has not answered within {self._seconds:.0f} s") from None
        except OSError as error:
            raise EngineUnreachable(f"Slurm: {name} cannot be run: {error}") from None
        if done.returncode == 0:
            return done.stdout
        said = _words(done.stderr, name) or f"exit code {done.returncode}"
        if done.returncode == 127 or _AWAY.search(said):
            raise EngineUnreachable(f"Slurm: {name}: {said}")
        raise Refused(said)


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Without variables that would change what commands do: they count for more than a script's own lines. What a service that
    itself runs within a job has of that job goes with them."""
    return {k: v for k, v in environ.items() if k in _KEPT or not k.startswith(_OPTIONS)} | {"LC_ALL": "C.UTF-8"}


def own_user() -> str:
    """As squeue takes it."""
    return str(os.getuid())


def _words(stderr: str, name: str) -> str:
    """The message without the command's own name, in one line."""
    lines = [line.removeprefix(f"{name}: ").removeprefix("error: ").strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
