"""Export a checkpoint as files for other programs, by a process with torch, which is never imported here.

The process runs on the service's machine, so nothing that a submitter chose decides what it runs, unless the submitter's code
runs on that machine anyway: then the job's interpreter is used. It never gets the job's variables.
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
    """A complete export of a checkpoint; what it contains was verified when it was read. ``file``: open, without a name on the
    disk, positioned at its start; closing it frees its space. ``size``: its bytes; ``digest``: SHA-256 of its content; ``notes``:
    sentences for the reader of the file."""

    file: BufferedRandom
    size: int
    digest: bytes
    notes: list[str]


@dataclass(frozen=True)
class Exporter:
    """Exports checkpoints, each in a separate process. ``permits``: limit on concurrent exports, held while a file is made, not
    while it is sent. ``seconds``: time limit for making one file. ``trains_here``: returns whether jobs of a launcher kind run on
    the service's machine; for jobs of other kinds the service's own interpreter makes the files. ``sandbox``: the user and the
    limits of the process."""

    database: Database
    homes: HomePaths
    permits: ConcurrencyLimit
    seconds: float
    trains_here: Callable[[str], bool]
    sandbox: Sandbox = NO_SANDBOX

    def export(
        self, job_id: str, checkpoint_id: str, file_format: Format, abandoned: Callable[[], bool] = lambda: False
    ) -> Exported:
        """Export a checkpoint and return the result as one open file, which the caller must close. Blocks until the file is
        complete; no transaction is open meanwhile. ``abandoned`` is polled meanwhile, and returns True if the caller no longer
        needs the file: the export then ends with ``export-failed``. A checkpoint that only the object store has is fetched first.

        Raises ``NotFound``, ``Conflict`` (``checkpoint-gone``, ``export-failed``), ``CheckpointError`` for a checkpoint that is
        damaged or cannot be read or fetched, ``Refused`` (``busy``, ``disk-full``, ``export-timeout``).
        """
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
                if "error" in answer:
                    raise _export_error(answer, row.name, directory)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                return Exported(file, size, bytes.fromhex(answer["digest"]), [str(note) for note in answer["notes"]])
            except BaseException:
                file.close()
                raise

    def _interpreter(self, job: Job, name: str) -> str:
        """Return the path of the interpreter that exports. It is the job's if jobs with its launcher run on this machine, else
        the service's own. Raises ``Conflict`` (``export-failed``) if the job runs elsewhere and the service's interpreter has no
        torch. ``name``: the checkpoint's, for the error."""
        kind = job.spec.get("launcher", {}).get("kind", "local")
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
    """Return a file without a name on the disk of ``directory``: nothing is left over, whichever process is killed. Raises
    ``Conflict`` (``checkpoint-gone``) if the directory is missing, and ``Refused`` (``disk-full``)."""
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


@dataclass(frozen=True)
class _Asked:
    """The export process. Of what a user chose it runs at most the job's interpreter (``python``), with the packages of that
    interpreter; it has no variables of a job and no credentials, and uses no GPU."""

    python: str
    seconds: float
    abandoned: Callable[[], bool]
    sandbox: Sandbox

    def run(self, request: Mapping[str, Any], file: BufferedRandom) -> dict[str, Any]:
        """Start the process, have it write the export into ``file``, wait for it, and return its answer: ``notes`` and
        ``digest``. A failure is returned, not raised, as a dict with ``error`` (a text) and ``code``. This includes the time
        limit, an abandoned request and a process that cannot be started."""
        directory = str(Path(request["checkpoint"]).parent)
        with tempfile.TemporaryFile() as stderr:
            try:
                return subprocess_query.query_process(
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
            except TimeoutError:
                return {"error": f"it took longer than {self.seconds:g} s", "code": "export-timeout"}
            except subprocess_query.Abandoned:
                return {"error": "the client disconnected", "code": "export-failed"}
            except OSError as error:
                return {"error": f"{self.python} cannot be started: {error.strerror}", "code": "export-failed"}
            except ValueError as error:
                last = subprocess_query.last_line(stderr)
                said = f": {last[:500]}" if last else ""
                return {"error": f"{self.python} ended, {error}{said}", "code": "export-failed"}


def _export_error(answer: Mapping[str, Any], name: str, directory: Path) -> RatchetError:
    """Return the error for a failed export's ``answer``; it is not raised. ``name``: the checkpoint's."""
    code, detail = str(answer["code"]), str(answer["error"])
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
