"""A checkpoint as files for other programs. The job's own interpreter makes them, since torch is there and never here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_contract.errors import CheckpointError, Conflict, RatchetError, Refused
from ratchet_contract.paths import HomePaths
from ratchet_service import children, disk, object_store
from ratchet_service.credentials import inherited
from ratchet_service.database import Database
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
    """``turns``: of making a file, not of sending it. ``seconds``: the limit for making one, digest included."""

    database: Database
    homes: HomePaths
    turns: Turns
    seconds: float

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
        directory = self.homes.job(job_id).checkpoint(row.step, row.epoch)
        object_store.provide(self.homes, job, row)
        request = {"checkpoint": str(directory), "digest": row.digest, "format": form}
        with self.turns.taken():
            file = _unnamed(self.homes.job(job_id).root)
            try:
                asked = _Asked(job.resolved["python"], job.spec.get("env", {}), self.seconds, abandoned)
                answer = asked.answer(request, file)
                if "error" in answer:
                    raise _error(answer, row.name, directory)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                return Exported(file, size, bytes.fromhex(answer["digest"]), [str(note) for note in answer["notes"]])
            except BaseException:
                file.close()
                raise


def _unnamed(directory: Path) -> BufferedRandom:
    """On the disk of the checkpoints: what has no name is never left behind, whoever is killed."""
    try:
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
    """The process: no code of the user's runs in it, and no GPU is touched."""

    python: str
    env: Mapping[str, str]
    seconds: float
    abandoned: Callable[[], bool]

    def answer(self, request: Mapping[str, Any], file: BufferedRandom) -> dict[str, Any]:
        directory = str(Path(request["checkpoint"]).parent)
        with tempfile.TemporaryFile() as stderr:
            try:
                return children.ask(
                    [self.python, "-P", "-m", "ratchet_worker.export"],
                    {**request, "fd": file.fileno()},
                    cwd="/",
                    env={**inherited(os.environ), **self.env, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": directory},
                    seconds=self.seconds,
                    abandoned=self.abandoned,
                    stderr=stderr,
                    pass_fds=[file.fileno()],
                )
            except TimeoutError:
                return {"error": f"it took longer than {self.seconds:g} s", "code": "export-timeout"}
            except children.Abandoned:
                return {"error": "who asked for it has gone", "code": "export-failed"}
            except OSError as error:
                return {"error": f"{self.python} cannot be started: {error.strerror}", "code": "export-failed"}
            except ValueError as error:
                stderr.seek(0)
                last = stderr.read().decode(errors="replace").strip().splitlines()[-1:]
                said = f": {last[0][:500]}" if last else ""
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
