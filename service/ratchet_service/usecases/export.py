"""A checkpoint as files for other programs. The job's own interpreter makes them, since torch is there and never here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_contract.errors import CheckpointError, Conflict, RatchetError
from ratchet_contract.paths import HomePaths
from ratchet_service import disk
from ratchet_service.credentials import withheld
from ratchet_service.database import Database
from ratchet_service.usecases.queries import find_checkpoint, find_job

Format = Literal["safetensors", "torch"]
MEDIA_TYPES: Final[dict[Format, str]] = {"safetensors": "application/octet-stream", "torch": "application/x-tar"}
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class Exported:
    """The whole result, verified; ``file`` has no name, and is gone when it is closed. ``digest``: SHA-256."""

    file: BufferedRandom
    size: int
    digest: bytes
    notes: list[str]

    def chunks(self) -> Iterator[bytes]:
        with self.file:
            while chunk := self.file.read(_CHUNK):
                yield chunk


def export(database: Database, job_id: str, checkpoint_id: str, homes: HomePaths, form: Format) -> Exported:
    """Make the files; no transaction is open meanwhile.

    Raises ``NotFound``, ``Conflict`` (``checkpoint-gone``, ``export-failed``), ``CheckpointError`` for damage, ``Refused``
    (``disk-full``).
    """
    with database.read() as session:
        row = find_checkpoint(session, job_id, checkpoint_id)
        job = find_job(session, job_id)
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: there is nothing to export", code="checkpoint-gone")
    directory = homes.job(job_id).checkpoint(row.step, row.epoch)
    request = {"checkpoint": str(directory), "digest": row.digest, "format": form}
    file = _unnamed(homes.job(job_id).root)
    try:
        answer = _run(job.resolved["python"], job.spec.get("env", {}), request, file)
        if "error" in answer:
            raise _error(answer, row.name, directory)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0)
        return Exported(file, size, digest, [str(note) for note in answer["notes"]])
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


def _run(python: str, env: Mapping[str, str], request: Mapping[str, Any], file: BufferedRandom) -> dict[str, Any]:
    """No code of the user's runs in it, and no GPU is touched."""
    kept = withheld(os.environ)
    variables = {k: v for k, v in os.environ.items() if k not in kept} | dict(env)
    directory = str(Path(request["checkpoint"]).parent)
    try:
        done = subprocess.run(
            [python, "-P", "-m", "ratchet_worker.export"],
            input=json.dumps({**request, "fd": file.fileno()}).encode(),
            capture_output=True,
            cwd="/",
            env=variables | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": directory},
            pass_fds=[file.fileno()],
        )
    except OSError as error:
        return {"error": f"{python} cannot be started: {error.strerror}", "code": "export-failed"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        said = f": {last[0][:500]}" if last else ""
        return {"error": f"{python} ended with {done.returncode}{said}", "code": "export-failed"}
    return answer


def _error(answer: Mapping[str, Any], name: str, directory: Path) -> RatchetError:
    code, detail = str(answer["code"]), str(answer["error"])
    if code == "disk-full":
        return disk.full(directory, "nothing was exported")
    if code == "checkpoint-missing":
        return Conflict(f"checkpoint {name} is not on the disk any more", code="checkpoint-gone")
    if code.startswith("checkpoint-"):
        return CheckpointError(f"checkpoint {name}: {detail}; `ratchet checkpoints verify` names a good one", code=code)
    return Conflict(f"checkpoint {name} cannot be exported: {detail}", code="export-failed")
