"""A checkpoint as ``torch.distributed.checkpoint`` (DCP) keeps one, for programs that read that. Written here and never read: its
``.metadata`` is a pickle, and so is every value in it that is no tensor.

Keys, as DCP flattens them: ``model.<key of state_dict>``; ``optimizer.state.<parameter>.<key>`` and
``optimizer.param_groups.<n>.<key>``, by names of parameters, as ``torch.distributed.checkpoint.state_dict`` has them; ``step``;
and ``ratchet``, JSON that says where it comes from.
"""

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

from ratchet_worker import optimizer_state
from ratchet_worker import restore as disk
from ratchet_worker.plain_form import keys_of, model_of, origin, plain
from ratchet_worker.restore import Chosen
from ratchet_worker.snapshot import Snapshot

Path = str | os.PathLike[str]


def write(chosen: Chosen, out: BinaryIO) -> list[str]:
    """A tar of DCP's files to ``out``, ``.metadata`` last; what its reader must know. Raises ``CheckpointError``, ``StateError``,
    ``OSError``."""
    state, notes = _state(chosen)
    files = _Unnamed()
    writer = FileSystemWriter("checkpoint", sync_files=False)
    writer.fs, writer.path = files, "checkpoint"  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():  # that there is no process group is what no_dist says
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state, storage_writer=writer, no_dist=True)
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, file in sorted(files.named.items(), key=lambda item: item[0] == ".metadata"):
                member = tarfile.TarInfo(name)
                member.size = file.seek(0, os.SEEK_END)
                file.seek(0)
                tar.addfile(member, file)
    except CheckpointException as error:  # no Exception: it would pass every other handler
        causes = list(_causes(error))
        hidden = next((e for e in causes if isinstance(e, OSError | MemoryError)), None)
        raise hidden or OSError(f"torch.distributed.checkpoint failed: {causes[0]!r}") from None
    finally:
        files.close()
    return notes


def _state(chosen: Chosen) -> tuple[dict[str, Any], list[str]]:
    manifest = chosen.manifest
    assert manifest is not None
    model = model_of(chosen)
    saved = disk.read(chosen, [0])[0]
    tensors = {**saved.shared, **saved.private}
    notes = [note for note in model.notes if not note.startswith("left out")]
    extra, state_dict, lost = saved.value("modules")["extra"], dict[str, Any](), list[str]()
    for key, name in keys_of(tensors, saved.state, []):
        module, _, last = key.rpartition(".")
        if name is not None:
            state_dict[key] = model.tensors[model.tied.get(key, key)]
        elif last == "_extra_state" and module in extra:
            state_dict[key] = plain(extra[module])
        else:
            lost.append(key)
    if lost:
        notes.append(f"left out, being neither parameter nor buffer: {', '.join(lost[:5])}")
    optimizers = _optimizers(saved, tensors)
    if optimizers and manifest.replicas != "equal":
        notes.append("the optimizer's state is rank 0's: every rank has its own")
    notes.append(".metadata is a pickle, as DCP has it: who loads it must trust where it came from")
    facts = json.dumps({**origin(manifest), "notes": notes})
    return {"model": state_dict, **optimizers, "step": manifest.step, "ratchet": facts}, notes


def _optimizers(saved: Snapshot, tensors: dict[str, Any]) -> dict[str, Any]:
    """By component; parameters by name, where a ``state_dict`` numbers them."""
    replicas = {n.removeprefix("model/") for n in saved.private if n.startswith("model/")}
    out: dict[str, Any] = {}
    for component in sorted(saved.state):
        if component != "optimizer" and not component.startswith("user:"):
            continue
        value = saved.value(component, apart=replicas)
        if not optimizer_state.is_captured(value):
            continue
        labels = [label for group in value["param_groups"] for label in group["params"]]
        numbered = optimizer_state.as_state_dict(component, tensors, value)
        named = {labels[number]: plain(entry) for number, entry in numbered["state"].items() if isinstance(number, int)}
        out[component] = {"state": named, "param_groups": plain(value["param_groups"])}
    return out


def _causes(error: BaseException) -> Generator[BaseException]:
    failures = getattr(error, "failures", {})
    for failure in [*failures.values(), (error.__cause__ or error.__context__,)]:
        hidden: BaseException | None = failure[0]
        while hidden is not None:
            yield hidden
            hidden = hidden.__cause__ or hidden.__context__


class _Unnamed(FileSystemBase):
    """Files of one flat directory that have no names on the disk: whoever is killed leaves nothing."""

    def __init__(self) -> None:
        self.named: dict[str, IO[bytes]] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Generator[Any]:
        assert mode == "wb", mode
        file = self.named[PurePosixPath(path).name] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        with os.fdopen(os.dup(file.fileno()), "wb") as stream:  # which the writer closes
            yield stream

    def concat_path(self, path: Path, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Path, new_path: Path) -> None:
        self.named[PurePosixPath(new_path).name] = self.named.pop(PurePosixPath(path).name)

    def init_path(self, path: Path) -> str:
        return str(path)

    def mkdir(self, path: Path) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return True

    def exists(self, path: Path) -> bool:
        return PurePosixPath(path).name in self.named

    def rm_file(self, path: Path) -> None:
        self.named.pop(PurePosixPath(path).name).close()

    def close(self) -> None:
        for file in self.named.values():
            file.close()
