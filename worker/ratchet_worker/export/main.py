"""``python -m ratchet_worker.export``: exports a checkpoint for other programs, in a process that may import torch.

The request is a JSON object on standard input. ``checkpoint``: the directory; ``digest``: the digest of its manifest;
``format``: the name of the format; ``asker``: the parent's pid; ``fd``: the descriptor of a file for the exported data;
``answer``: the descriptor of a file for the response, also JSON.
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

from ratchet_contract.atomic_write import write_all
from ratchet_contract.errors import CheckpointError, RatchetError
from ratchet_contract.paths import rank_file_name
from ratchet_hooks.state.files import DTYPE_NAMES
from ratchet_hooks.state.safetensors_header import Stored
from ratchet_store.format.manifest_file import check_files, read_manifest
from ratchet_store.format.safetensors_header import model_header
from ratchet_worker.export.torch_format import open_checkpoint, read_model, read_rank
from ratchet_worker.ipc.child_processes import die_with_parent
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.state.snapshot import byte_view

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def main() -> None:
    """Export the checkpoint that the request on standard input names, and write the response to the descriptor ``answer``."""
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
    """Write the requested checkpoint to the descriptor ``fd``, close it, and return the response. Raises ``CheckpointError``,
    ``StateError``, ``OSError``, ``MemoryError``."""
    directory = Path(request["checkpoint"])
    manifest = read_manifest(directory)
    if manifest.digest != request["digest"]:
        raise CheckpointError(f"{directory.name}: its manifest is not the one that was recorded")
    check_files(directory, manifest)
    chosen = open_checkpoint(directory, manifest)
    with os.fdopen(request["fd"], "r+b") as out:
        notes = _WRITERS[request["format"]](chosen, out)
        out.seek(0)
        return {"notes": notes, "digest": hashlib.file_digest(out, "sha256").hexdigest()}


def _safetensors(chosen: Chosen, out: BinaryIO) -> list[str]:
    """Write the model as one safetensors file to ``out``; return notes for its reader."""
    assert chosen.manifest is not None
    model = read_model(chosen)
    # Wide elements first, so that every tensor is aligned to its element size.
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
    """Write a tar with one ``.pt`` file per rank to ``out``; return notes for its reader."""
    assert chosen.manifest is not None
    notes: list[str] = []
    world_size = chosen.manifest.world_size
    with tarfile.open(fileobj=out, mode="w") as tar:
        for rank in range(world_size):
            state = read_rank(chosen, rank)
            notes += [note for note in state["notes"] if note not in notes]
            with tempfile.TemporaryFile() as file:  # the tar header needs the size first
                _save(state, file)
                name = rank_file_name(rank, world_size).replace(".safetensors", ".pt")
                member = tarfile.TarInfo(name)
                member.size = file.tell()
                file.seek(0)
                tar.addfile(member, file)
    return notes


def _dcp(chosen: Chosen, out: BinaryIO) -> list[str]:
    """Write a tar of DCP's files to ``out``; return notes for its reader."""
    from ratchet_worker.export import dcp_format  # its imports take a second, which the other formats do not need

    return dcp_format.write(chosen, out)


_WRITERS: Final = {"safetensors": _safetensors, "torch": _tar, "dcp": _dcp}


def _save(state: Any, file: IO[bytes]) -> None:
    """Save ``state`` to ``file`` by ``torch.save``. If writing fails, raises the ``OSError`` behind torch's ``RuntimeError``, if
    there is one."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        hidden: BaseException | None = error
        while hidden is not None and not isinstance(hidden, OSError):
            hidden = hidden.__context__
        raise hidden or error from None
