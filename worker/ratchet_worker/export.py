"""``python -m ratchet_worker.export``: a checkpoint as files for other programs, in a process that may import torch.

Standard input: JSON with ``checkpoint`` (directory), ``digest`` (of its manifest), ``format`` and ``fd``, the descriptor of an
open file without a name, which takes the result: what is half written has no name either. ``safetensors``: the model alone.
``torch``: a tar of one ``rank-00000-of-00002.pt`` per rank, the only place where Ratchet calls ``torch.save``. ``dcp``: a tar of
what ``torch.distributed.checkpoint`` writes. ``asker``: the parent, with which this process ends. ``answer``: the descriptor of a
file that takes JSON, ``{"notes": [...], "digest": ...}`` (SHA-256 of the result, in hex) or ``{"error": ..., "code": ...}``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import torch

from ratchet_contract.errors import CheckpointError, RatchetError
from ratchet_contract.paths import rank_file_name
from ratchet_hooks.files import DTYPE_NAMES
from ratchet_hooks.safetensors_header import Stored
from ratchet_store.commit import check_files, read_manifest
from ratchet_store.files import write_all
from ratchet_store.header import model_header
from ratchet_worker.plain_form import chosen_of, model_of, rank_of
from ratchet_worker.procs import die_with_parent
from ratchet_worker.restore import Chosen
from ratchet_worker.snapshot import byte_view

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def main() -> None:
    """The process."""
    request = json.load(sys.stdin)
    die_with_parent(request["asker"])
    answer: dict[str, Any]
    try:
        answer = export(request)
    except RatchetError as error:
        answer = {"error": error.detail, "code": error.code}
    except OSError as error:
        full = error.errno in _FULL
        answer = {"error": error.strerror or str(error), "code": "disk-full" if full else "export-failed"}
    except MemoryError:
        answer = {"error": "the machine has too little memory for it", "code": "export-failed"}
    os.pwrite(request["answer"], json.dumps(answer).encode(), 0)


def export(request: dict[str, Any]) -> dict[str, Any]:
    """Write what is asked for; the answer. Raises ``CheckpointError``, ``StateError``, ``OSError``."""
    directory = Path(request["checkpoint"])
    manifest = read_manifest(directory)
    if manifest.digest != request["digest"]:
        raise CheckpointError(f"{directory.name}: its manifest is not the one that was recorded")
    check_files(directory, manifest)
    chosen = chosen_of(directory, manifest)
    with os.fdopen(request["fd"], "r+b") as out:
        notes = _WRITERS[request["format"]](chosen, out)
        out.seek(0)
        return {"notes": notes, "digest": hashlib.file_digest(out, "sha256").hexdigest()}


def _safetensors(chosen: Chosen, out: BinaryIO) -> list[str]:
    assert chosen.manifest is not None
    model = model_of(chosen)
    # Wide elements first, so that every tensor is aligned to its own.
    order = sorted(model.tensors, key=lambda key: -model.tensors[key].element_size())
    stored: dict[str, Stored] = {}
    position = 0
    for key in order:
        tensor = model.tensors[key]
        stored[key] = Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), position, position + tensor.nbytes)
        position += tensor.nbytes
    write_all(out.fileno(), memoryview(model_header(stored, model.metadata(chosen.manifest))))
    for key in order:
        write_all(out.fileno(), byte_view(model.tensors[key]))
    return model.notes


def _tar(chosen: Chosen, out: BinaryIO) -> list[str]:
    assert chosen.manifest is not None
    notes: list[str] = []
    world_size = chosen.manifest.world_size
    with tarfile.open(fileobj=out, mode="w") as tar:
        for rank in range(world_size):
            state = rank_of(chosen, rank)
            notes += [note for note in state["notes"] if note not in notes]
            with tempfile.TemporaryFile() as file:  # its size goes before it
                _save(state, file)
                name = rank_file_name(rank, world_size).replace(".safetensors", ".pt")
                member = tarfile.TarInfo(name)
                member.size = file.tell()
                file.seek(0)
                tar.addfile(member, file)
    return notes


def _dcp(chosen: Chosen, out: BinaryIO) -> list[str]:
    from ratchet_worker import dcp_form  # its imports take a second, which the other forms need not wait

    return dcp_form.write(chosen, out)


_WRITERS: Final = {"safetensors": _safetensors, "torch": _tar, "dcp": _dcp}


def _save(state: Any, file: IO[bytes]) -> None:
    """Raises ``OSError`` as the system gave it, which torch tells as a ``RuntimeError`` about positions in the file."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        hidden: BaseException | None = error
        while hidden is not None and not isinstance(hidden, OSError):
            hidden = hidden.__context__
        raise hidden or error from None


if __name__ == "__main__":
    main()
