"""A checkpoint as files for other programs, made by a process with torch, which is never imported here.

The process runs beside the service, so nothing that a submitter chose decides what it runs, unless the submitter's code runs on
this very machine anyway: then the job's own interpreter is taken. It never gets the job's variables.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedRandom
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_contract.errors import CheckpointError, Conflict, RatchetError, Refused
from ratchet_contract.paths import HomePaths
from ratchet_service import children, disk, object_store
from ratchet_service.confined import OWN, Confined
from ratchet_service.credentials import bare
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Job
from ratchet_service.turns import Turns
from ratchet_service.usecases.queries import find_checkpoint, find_job

Format = Literal["safetensors", "torch", "dcp"]
MEDIA_TYPES: Final[dict[Format, str]] = {
    "safetensors": "application/octet-stream",
    "torch": "application/x-tar",
    "dcp": "application/x-tar",
}


@dataclass(frozen=True)
class Exported:
    """The whole result, verified; ``file`` has no name, and is gone when it is closed. ``digest``: SHA-256."""

    file: BufferedRandom
    size: int
    digest: bytes
    notes: list[str]


@dataclass(frozen=True)
class Exporter:
    """``turns``: of making a file, not of sending it. ``seconds``: the limit for making one, digest included. ``trains_here``: do
    jobs of a launcher run on the service's machine? Of all others the service's own interpreter makes the files. ``confined``: as
    whom."""

    database: Database
    homes: HomePaths
    turns: Turns
    seconds: float
    trains_here: Callable[[str], bool]
    confined: Confined = OWN

    def export(
        self, job_id: str, checkpoint_id: str, form: Format, abandoned: Callable[[], bool] = lambda: False
    ) -> Exported:
        """Make the files; no transaction is open meanwhile. ``abandoned`` is asked again and again: does nobody wait for them?

        Raises ``NotFound``, ``Conflict`` (``checkpoint-gone``, ``export-failed``), ``CheckpointError`` for damage, ``Refused``
        (``busy``, ``disk-full``, ``export-timeout``).
        """
        with self.database.read() as session:
            row = find_checkpoint(session, job_id, checkpoint_id)
            job = find_job(session, job_id)
        if row.state != "committed":
            raise Conflict(f"checkpoint {row.name} is {row.state}: there is nothing to export", code="checkpoint-gone")
        python = self._interpreter(job, row.name)
        directory = self.homes.job(job_id).checkpoint(row.step, row.epoch)
        object_store.provide(self.homes, job, row)
        request = {"checkpoint": str(directory), "digest": row.digest, "format": form}
        with self.turns.taken():
            file = _unnamed(self.homes.job(job_id).root)
            try:
                answer = _Asked(python, self.seconds, abandoned, self.confined).answer(request, file)
                if "error" in answer:
                    raise _error(answer, row.name, directory)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                return Exported(file, size, bytes.fromhex(answer["digest"]), [str(note) for note in answer["notes"]])
            except BaseException:
                file.close()
                raise

    def _interpreter(self, job: Job, name: str) -> str:
        """Raises ``Conflict`` (``export-failed``) where it has to be the service's own, which has no torch."""
        kind = job.spec.get("launcher", {}).get("kind", "local")
        if self.trains_here(kind):
            own = job.spec.get("python") is None  # as its next attempt would have it
            return sys.executable if own else str(job.resolved["python"])
        if find_spec("torch") is None:
            raise Conflict(
                f"checkpoint {name} cannot be exported: its job does not run on the service's machine (launcher {kind}), so that "
                f"the service's own interpreter, {sys.executable}, would have to make the files, and that has no torch: install "
                "ratchet-train[worker] where the service runs",
                code="export-failed",
            )
        return sys.executable


def _unnamed(directory: Path) -> BufferedRandom:
    """On the disk of the checkpoints: what has no name is never left behind, whoever is killed."""
    try:
        with as_owner(directory):
            return tempfile.TemporaryFile(dir=directory)
    except FileNotFoundError:
        raise Conflict(
            f"{directory} is not on the disk any more: there is nothing to export", code="checkpoint-gone"
        ) from None
    except OSError as error:
        if disk.is_full(error, directory):
            raise disk.full(directory, "nothing was exported") from error
        raise


@dataclass(frozen=True)
class _Asked:
    """The process: no code of the user's runs in it, no variable of a job's or credential is in it, and no GPU is touched."""

    python: str
    seconds: float
    abandoned: Callable[[], bool]
    confined: Confined

    def answer(self, request: Mapping[str, Any], file: BufferedRandom) -> dict[str, Any]:
        directory = str(Path(request["checkpoint"]).parent)
        with tempfile.TemporaryFile() as stderr:
            try:
                return children.ask(
                    [self.python, "-P", "-m", "ratchet_worker.export"],
                    {**request, "fd": file.fileno()},
                    cwd="/",
                    env={**bare(os.environ), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": directory},
                    seconds=self.seconds,
                    abandoned=self.abandoned,
                    stderr=stderr,
                    pass_fds=[file.fileno()],
                    confined=self.confined,
                )
            except TimeoutError:
                return {"error": f"it took longer than {self.seconds:g} s", "code": "export-timeout"}
            except children.Abandoned:
                return {"error": "who asked for it has gone", "code": "export-failed"}
            except OSError as error:
                return {"error": f"{self.python} cannot be started: {error.strerror}", "code": "export-failed"}
            except ValueError as error:
                last = children.last_line(stderr)
                said = f": {last[:500]}" if last else ""
                return {"error": f"{self.python} ended, {error}{said}", "code": "export-failed"}


def _error(answer: Mapping[str, Any], name: str, directory: Path) -> RatchetError:
    code, detail = str(answer["code"]), str(answer["error"])
    if code == "disk-full":
        return disk.full(directory, "nothing was exported")
    if code == "export-timeout":
        text = (
            f"checkpoint {name} was not exported: {detail}, and everything of it was ended; see whether the disk of {directory} "
            "answers (`ratchet checkpoints verify` reads the same files) and what else the machine has to do, then try again"
        )
        return Refused(text, code=code)
    if code == "checkpoint-missing":
        return Conflict(f"checkpoint {name} is not on the disk any more", code="checkpoint-gone")
    if code.startswith("checkpoint-"):
        return CheckpointError(f"checkpoint {name}: {detail}; `ratchet checkpoints verify` names a good one", code=code)
    return Conflict(f"checkpoint {name} cannot be exported: {detail}", code="export-failed")
