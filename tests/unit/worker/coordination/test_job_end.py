"""The end of a job is one of all its ranks: one that leaves its loop alone has not ended it for a resume."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import UserError
from ratchet_contract.paths import FINISHED_NAME, JobPaths
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_hooks.summary import HookSummary
from ratchet_store.format.manifest_file import read_manifest
from ratchet_worker.checkpoint.checkpointer import Checkpointer
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.state.snapshot import Snapshot
from ratchet_worker.training.runtime import Runtime
from tests.support.checkpoints import manifest_of, write_ranks
from tests.support.one_shot_writers import commit

SILENT: Any = SimpleNamespace(
    enter_stage=lambda _: None, tick=lambda: None, report_hook=lambda *_: None, report_committed=lambda *_: None,
    note=lambda *_, **__: None,
    report_checkpoint_failed=lambda *_: None, report_saved_hook=lambda _: None,
)  # fmt: skip
NEVER: Any = lambda: pytest.fail("nothing is given up")  # noqa: E731


def _launch(root: Path) -> Any:
    spec = SimpleNamespace(
        checkpoint=CheckpointSpec(), task=None, determinism="warn", digest=lambda: "spec", trial=None
    )
    deadlines = SimpleNamespace(step=10)
    return SimpleNamespace(
        job_root=str(root), job_id="job", attempt=1, spec=spec, save_seconds=0.0, deadlines=deadlines,
        code_dir=None, workdir=str(root), faults=[], fork=None,
    )  # fmt: skip


def test_final_save_of_only_some_ranks_is_refused_on_all(tmp_path: Path) -> None:
    store, said = HashStore(), {}

    def save(rank: int) -> None:
        exchange, saving = Exchange(store, rank, 2, 10), Exchange(store, rank, 2, 10)
        checkpointer = Checkpointer(
            _launch(tmp_path), exchange, saving, SILENT, SILENT, Base(step=0), torch.device("cpu"), NEVER
        )
        summary = HookSummary(
            name="allreduce", rank=rank, step=3, phase="steady", iteration=3, compression_rate=1.0, elements_before=1,
            elements_after=1, bytes_before=4, bytes_after=4,
        )  # fmt: skip
        content: Any = SimpleNamespace(
            snapshot=Snapshot(), summary=summary, parts=0, norm_of=lambda _: None, environment={}
        )
        with pytest.raises(UserError) as caught:
            checkpointer.save(3, "schedule", rank == 1, lambda: content)
        said[rank] = str(caught.value)

    ranks = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(30)
    assert said[0] == said[1] and said[0].startswith("rank [1] ended after step 3, others continue")
    assert not list(tmp_path.rglob("MANIFEST.json"))


def test_finished_marker_is_written_after_all_ranks_gather(tmp_path: Path) -> None:
    directory = JobPaths(tmp_path).checkpoint(3, 1)
    sealed = commit(directory, manifest_of(3, 1, *write_ranks(directory)))
    marked: list[bool] = []
    exchange: Any = SimpleNamespace(
        block_if_aborting=lambda: None,
        rank=0,
        world_size=1,
        gather=lambda *_, **__: marked.append((directory / FINISHED_NAME).exists()),
    )
    agreement: Any = SimpleNamespace(begin=lambda _: None, close=lambda: None)
    chosen: Any = SimpleNamespace(base=Base(step=0), manifest=None)
    runtime = Runtime(_launch(tmp_path), 0, torch.device("cpu"), exchange, exchange, agreement, SILENT, SILENT, chosen)
    hook = SimpleNamespace(summary=lambda **_: None, warnings=list)
    runtime.proof = SimpleNamespace(finish=lambda: None)  # type: ignore[assignment]
    runtime.state = SimpleNamespace(require_wrapped=lambda: (None, hook))  # type: ignore[assignment]
    runtime.step, runtime.checkpointer.last = 3, sealed.base
    runtime.checkpointer._committer._committed = (sealed, 0.1)
    runtime.finish()
    assert marked == [False] and read_manifest(directory).finished
