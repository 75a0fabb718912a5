"""Exports a checkpoint in the format of ``torch.distributed.checkpoint`` (DCP). Ratchet never reads this format, which contains
pickles."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ratchet_worker.export.torch_format import origin, read_model, state_dict_keys, to_plain
from ratchet_worker.resume import read_checkpoint as disk
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.state import optimizer
from ratchet_worker.state.snapshot import Snapshot

Path = str | os.PathLike[str]


def write(chosen: Chosen, out: BinaryIO) -> list[str]:
    """Write a tar of DCP's files to ``out``, ``.metadata`` last; return notes for its reader. Raises ``CheckpointError``,
    ``StateError``, ``OSError``, ``MemoryError``."""
    state, notes = _state(chosen)
    files = _Unnamed()
    writer = FileSystemWriter("checkpoint", sync_files=False)
    writer.fs, writer.path = files, "checkpoint"  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():  # no_dist states already that there is no process group
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state, storage_writer=writer, no_dist=True)
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, file in sorted(files.files.items(), key=lambda item: item[0] == ".metadata"):
                member = tarfile.TarInfo(name)
                member.size = file.seek(0, os.SEEK_END)
                file.seek(0)
                tar.addfile(member, file)
    except CheckpointException as error:  # not a subclass of Exception, so no other handler would catch it
        causes = list(_causes(error))
        hidden = next((e for e in causes if isinstance(e, OSError | MemoryError)), None)
        raise hidden or OSError(f"torch.distributed.checkpoint failed: {causes[0]!r}") from None
    finally:
        files.close()
    return notes


def _state(chosen: Chosen) -> tuple[dict[str, Any], list[str]]:
    """Return the state to export by DCP's top-level keys (``model``, the optimizers, ``step``, ``ratchet``), and the notes for
    its reader."""
    manifest = chosen.manifest
    assert manifest is not None
    model = read_model(chosen)
    saved = disk.read(chosen, [0])[0]
    tensors = {**saved.shared, **saved.private}
    notes = [note for note in model.notes if not note.startswith("left out")]
    extra, state_dict, lost = saved.value("modules")["extra"], dict[str, Any](), list[str]()
    for key, name in state_dict_keys(tensors, saved.state, []):
        module, _, last = key.rpartition(".")
        if name is not None:
            state_dict[key] = model.tensors[model.tied.get(key, key)]
        elif last == "_extra_state" and module in extra:
            state_dict[key] = to_plain(extra[module], key)
        else:
            lost.append(key)
    if lost:
        notes.append(f"left out, being neither parameter nor buffer: {', '.join(lost[:5])}")
    optimizers = _optimizers(saved, tensors, notes)
    if optimizers and manifest.replicas != "equal":
        notes.append("the optimizer's state is rank 0's: every rank has its own")
    notes.append(".metadata is a pickle, as in every DCP checkpoint: load it only if you trust its source")
    facts = json.dumps({**origin(manifest), "notes": notes})
    return {"model": state_dict, **optimizers, "step": manifest.step, "ratchet": facts}, notes


def _optimizers(saved: Snapshot, tensors: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the states and parameter groups of rank 0's optimizers, by component. Parameters have their names instead of the
    numbers in a ``state_dict``. State that belongs to no parameter is left out, and ``notes`` gets a note on it."""
    replicas = {n.removeprefix("model/") for n in saved.private if n.startswith("model/")}
    out: dict[str, Any] = {}
    for component in sorted(saved.state):
        if component != "optimizer" and not component.startswith("user:"):
            continue
        value = saved.value(component, exclude=replicas)
        if not optimizer.is_captured(value):
            continue
        if lost := [str(key) for key in (*value["others"], *value["extra"])]:
            notes.append(f"left out of {component}, since it belongs to no parameter: {', '.join(lost[:5])}")
        labels = [label for group in value["param_groups"] for label in group["params"]]
        numbered = optimizer.as_state_dict(component, tensors, value)
        named = {
            labels[number]: to_plain(entry, f"{component}.state[{number}]")
            for number, entry in numbered["state"].items()
            if isinstance(number, int)
        }
        out[component] = {"state": named, "param_groups": to_plain(value["param_groups"], f"{component}.param_groups")}
    return out


def _causes(error: BaseException) -> Generator[BaseException]:
    """Yield the errors behind DCP's ``error``: the failures that it recorded, and the causes of each and of ``error``."""
    failures = getattr(error, "failures", {})
    for failure in [*failures.values(), (error.__cause__ or error.__context__,)]:
        hidden: BaseException | None = failure[0]
        while hidden is not None:
            yield hidden
            hidden = hidden.__cause__ or hidden.__context__


class _Unnamed(FileSystemBase):
    """The file system that DCP writes to: files of one flat directory, without names on the disk. ``close`` deletes them."""

    def __init__(self) -> None:
        self.files: dict[str, IO[bytes]] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Generator[Any]:
        """Context manager: yield a stream to a new unnamed file, which stays open in ``files`` by its name."""
        assert mode == "wb", mode
        # Without a name, so that a killed process leaves nothing behind.
        file = self.files[PurePosixPath(path).name] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        with os.fdopen(os.dup(file.fileno()), "wb") as stream:  # the writer closes it
            yield stream

    def concat_path(self, path: Path, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Path, new_path: Path) -> None:
        self.files[PurePosixPath(new_path).name] = self.files.pop(PurePosixPath(path).name)

    def init_path(self, path: Path) -> str:
        return str(path)

    def mkdir(self, path: Path) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return True

    def exists(self, path: Path) -> bool:
        return PurePosixPath(path).name in self.files

    def rm_file(self, path: Path) -> None:
        self.files.pop(PurePosixPath(path).name).close()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
