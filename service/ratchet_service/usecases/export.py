"""Exports a checkpoint as a file for other programs, by a separate process with torch, which never gets the job's variables."""

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

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ratchet_contract.errors import CheckpointError, Conflict, RatchetError, Refused
from ratchet_contract.paths import HomePaths
from ratchet_service.checkpoints import object_store
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.db.queries import find_checkpoint, find_job
from ratchet_service.isolation import subprocess_query
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox, minimal_environ
from ratchet_service.observability import disk_space

Format = Literal["safetensors", "torch", "dcp"]
MEDIA_TYPES: Final[dict[Format, str]] = {
    "safetensors": "application/octet-stream",
    "torch": "application/x-tar",
    "dcp": "application/x-tar",
}


@dataclass(frozen=True)
class Exported:
    """A complete export of a checkpoint. ``file``: the open file, which has no name in any directory; its position is at the
    start. ``digest``: the SHA-256 of the file. ``notes``: sentences about the export for the user."""

    file: BufferedRandom
    size: int
    digest: bytes
    notes: list[str]


@dataclass(frozen=True)
class Exporter:
    """Exports checkpoints, each in a separate process. ``permits``: limit on concurrent exports. ``seconds``: time limit for
    one file. ``trains_here``: returns whether jobs of a launcher kind run on this machine."""

    database: Database
    homes: HomePaths
    permits: ConcurrencyLimit
    seconds: float
    trains_here: Callable[[str], bool]
    sandbox: Sandbox = NO_SANDBOX

    def export(
        self, job_id: str, checkpoint_id: str, file_format: Format, abandoned: Callable[[], bool] = lambda: False
    ) -> Exported:
        """Export a checkpoint as one open file, which the caller must close. Blocks; ``abandoned`` returns True to end the
        export. Raise ``NotFound``, ``Conflict``, ``CheckpointError`` or ``Refused``."""
        with self.database.read() as session:
            row = find_checkpoint(session, job_id, checkpoint_id)
            job = find_job(session, job_id)
        if row.state != "committed":
            raise Conflict(f"checkpoint {row.name} is {row.state}: there is nothing to export", code="checkpoint-gone")
        python = self._interpreter(job, row.name)
        directory = self.homes.job(job_id).checkpoint(row.step, row.attempt)
        object_store.ensure_local(self.homes, job, row)
        request = {"checkpoint": str(directory), "digest": row.digest, "format": file_format}
        with self.permits.acquire():
            file = _unnamed_file(self.homes.job(job_id).root)
            try:
                answer = _Asked(python, self.seconds, abandoned, self.sandbox).run(request, file)
                if isinstance(answer, _Failure):
                    raise _export_error(answer, row.name, directory)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                return Exported(file, size, bytes.fromhex(answer.digest), answer.notes)
            except BaseException:
                file.close()
                raise

    def _interpreter(self, job: Job, name: str) -> str:
        """Return the interpreter that exports, the job's or the service's. Raise ``Conflict`` if the job does not run on this
        machine and the service's has no torch."""
        kind = job.spec.get("launcher", {}).get("kind", "local")
        # nothing that a submitter chose runs here, unless the submitter's code runs here anyway
        if self.trains_here(kind):
            own = job.spec.get("python") is None  # as for the job's next attempt
            return sys.executable if own else str(job.resolved["python"])
        if find_spec("torch") is None:
            raise Conflict(
                f"checkpoint {name} cannot be exported: its job does not run on the service's machine (launcher {kind}), so "
                f"the service's own interpreter, {sys.executable}, has to write the files, and it has no torch: install "
                "ratchet-train[worker] where the service runs",
                code="export-failed",
            )
        return sys.executable


def _unnamed_file(directory: Path) -> BufferedRandom:
    """Return a file without a name on the disk of ``directory``. Raise ``Conflict`` if that is missing, ``Refused`` if it is
    full."""
    try:
        with as_owner(directory):
            return tempfile.TemporaryFile(dir=directory)
    except FileNotFoundError:
        raise Conflict(
            f"{directory} is no longer on the disk: there is nothing to export", code="checkpoint-gone"
        ) from None
    except OSError as error:
        if disk_space.is_disk_full_error(error, directory):
            raise disk_space.disk_full_error(directory, "nothing was exported") from error
        raise


class _Success(BaseModel):
    """The export process has written the file. ``digest``: its SHA-256; ``notes``: sentences for the reader."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    notes: list[str]


class _Failure(BaseModel):
    """Why there is no file."""

    error: str
    code: str


_ANSWER: Final = TypeAdapter[_Failure | _Success](_Failure | _Success)


@dataclass(frozen=True)
class _Asked:
    """The export process. It has no variables of a job and no credentials, and uses no GPU."""

    python: str
    seconds: float
    abandoned: Callable[[], bool]
    sandbox: Sandbox

    def run(self, request: Mapping[str, Any], file: BufferedRandom) -> _Success | _Failure:
        """Have the process write the export into ``file``, and return its answer."""
        directory = str(Path(request["checkpoint"]).parent)
        with tempfile.TemporaryFile() as stderr:
            try:
                answer = subprocess_query.query_process(
                    [self.python, "-P", "-m", "ratchet_worker.export"],
                    {**request, "fd": file.fileno()},
                    cwd="/",
                    env={**minimal_environ(os.environ), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": directory},
                    timeout_seconds=self.seconds,
                    is_abandoned=self.abandoned,
                    stderr=stderr,
                    pass_fds=[file.fileno()],
                    sandbox=self.sandbox,
                )
                return _ANSWER.validate_python(answer)
            except TimeoutError:
                return _Failure(error=f"it took longer than {self.seconds:g} s", code="export-timeout")
            except subprocess_query.Abandoned:
                return _Failure(error="the client disconnected", code="export-failed")
            except OSError as error:
                return _Failure(error=f"{self.python} cannot be started: {error.strerror}", code="export-failed")
            except ValidationError:
                text = f"{self.python} ended, its answer is malformed: install the service's version of ratchet-train there"
                return _Failure(error=text, code="export-failed")
            except ValueError as error:
                last = subprocess_query.last_line(stderr)
                said = f": {last[:500]}" if last else ""
                return _Failure(error=f"{self.python} ended, {error}{said}", code="export-failed")


def _export_error(failure: _Failure, name: str, directory: Path) -> RatchetError:
    """Return the error for a failed export; it is not raised. ``name``: the checkpoint's."""
    code, detail = failure.code, failure.error
    if code == "disk-full":
        return disk_space.disk_full_error(directory, "nothing was exported")
    if code == "export-timeout":
        text = (
            f"checkpoint {name} was not exported: {detail}, and all its processes were ended; check that the disk of "
            f"{directory} responds (`ratchet checkpoints verify` reads the same files) and the load of the machine, then try "
            "again"
        )
        return Refused(text, code=code)
    if code == "checkpoint-missing":
        return Conflict(f"checkpoint {name} is no longer on the disk", code="checkpoint-gone")
    if code.startswith("checkpoint-"):
        return CheckpointError(f"checkpoint {name}: {detail}; `ratchet checkpoints verify` names a good one", code=code)
    return Conflict(f"checkpoint {name} cannot be exported: {detail}", code="export-failed")
