"""Runs Slurm's commands, each with a time limit and without options from the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from ratchet_service.launchers.base import EngineUnreachable

_UNREACHABLE_ERROR: Final = re.compile(
    "unable to contact slurm|connection refused|connection timed out|timed out on send/recv|zero bytes were transmitted|"
    "standby mode|configuration source|unable to establish|no route to host|address .* failed|authentication|munge",
    re.IGNORECASE,
)
"""Errors of slurmctld, the network or munge rather than of the request, which may succeed later."""
_OPTION_PREFIXES: Final = ("SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_")
_KEPT_VARIABLES: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})


class Refused(Exception):
    """The command failed, and its error message does not say that Slurm is unreachable. The exception's text is this message, or
    the exit code if there is no message."""


class CannotRun(EngineUnreachable):
    """The command is not installed where the service runs, or cannot be executed there."""


class Commands:
    """Runs Slurm's commands. ``folder``: their directory; None: they are on PATH. ``seconds``: time limit of each command."""

    def __init__(self, folder: str | None, seconds: float, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._seconds = seconds
        self._environ = dict(environ)
        self._setpriv = shutil.which("setpriv")

    def run(self, name: str, *arguments: str, text: str = "", environ: Mapping[str, str] | None = None) -> str:
        """Run the command ``name`` with standard input ``text``, and return its output. Raises ``EngineUnreachable``
        (``CannotRun`` if there is no such command) and ``Refused``."""
        program = name if self._folder is None else f"{self._folder}/{name}"
        command = [program, *arguments]
        if self._setpriv is not None:  # an sbatch that outlived the service could submit a job a second time
            command = [self._setpriv, "--pdeathsig", "KILL", *command]
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
        except (FileNotFoundError, PermissionError) as error:
            raise CannotRun(f"Slurm: {name} cannot be run: {error}") from None
        except OSError as error:
            raise EngineUnreachable(f"Slurm: {name} cannot be run: {error}") from None
        if done.returncode == 0:
            return done.stdout
        message = _error_text(done.stderr, name) or f"exit code {done.returncode}"
        if done.returncode == 127:  # of setpriv, or of a command that lacks a library
            raise CannotRun(f"Slurm: {name} cannot be run: {message}")
        if _UNREACHABLE_ERROR.search(message):
            raise EngineUnreachable(f"Slurm: {name}: {message}")
        raise Refused(message)


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables from which Slurm's commands read options, and with the locale C.UTF-8."""
    return {k: v for k, v in environ.items() if k in _KEPT_VARIABLES or not k.startswith(_OPTION_PREFIXES)} | {
        "LC_ALL": "C.UTF-8"
    }


def own_user() -> str:
    """Return this process's user id, in the form that squeue accepts."""
    return str(os.getuid())


def _error_text(stderr: str, name: str) -> str:
    """Return the error message on one line, without the command's name; empty if there is none."""
    lines = [line.removeprefix(f"{name}: ").removeprefix("error: ").strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))
