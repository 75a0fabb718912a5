"""What takes the place of a private part of torch that is not there: the same bits, or an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.multiprocessing.reductions import StorageWeakRef

from ratchet_hooks import torch_compat
from ratchet_hooks.torch_compat import TorchUnsupported
from ratchet_hooks.torch_versions import OLDEST, TESTED
from ratchet_worker.host import determinism

CPU = torch.device("cpu")


def absent(part: str) -> str:
    return rf"^torch {torch.__version__.replace('+', '[+]')} has no {part}, which Ratchet needs: install .*{TESTED[-1]}"


def test_torch_too_old_is_refused_naming_oldest_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_compat.check_torch_version()
    for version in ("2.8.0+cu126", "1.13.1"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(
            TorchUnsupported, match=rf"torch {version.split('+')[0]}.* too old .*install .*torch {OLDEST}"
        ):
            torch_compat.check_torch_version()
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git1234")
    torch_compat.check_torch_version()


@pytest.mark.parametrize(
    ("owner", "part"),
    [
        (dist.Reducer, "Reducer._rebuild_buckets"),  # type: ignore[attr-defined]
        (torch.nn.parallel.DistributedDataParallel, "DistributedDataParallel._ddp_init_helper"),
    ],
)
def test_torch_without_required_ddp_part_is_refused(monkeypatch: pytest.MonkeyPatch, owner: type, part: str) -> None:
    monkeypatch.delattr(owner, part.partition(".")[2])
    with pytest.raises(TorchUnsupported, match=absent(part)):
        torch_compat.check_torch_version()


def test_a_ddp_without_an_attribute_that_is_assigned_is_refused() -> None:
    with pytest.raises(TorchUnsupported, match=absent(r"DistributedDataParallel\(\)\._comm_hooks")):
        torch_compat.check_ddp_attributes(SimpleNamespace())  # type: ignore[arg-type]


WITHOUT: list[tuple[object, str, Callable[[], object]]] = [
    (torch, "_neg_view", lambda: torch_compat.negative_view(torch.ones(1))),
    (torch._C, "_current_graph_task_id", torch_compat.in_backward),
    (dist, "_DEFAULT_FIRST_BUCKET_BYTES", torch_compat.first_bucket_bytes),
    (dist, "_compute_bucket_assignment_by_size", lambda: torch_compat.assign_buckets([torch.ones(1)], [1], [0])),
    (powerSGD_hook, "_should_compress", lambda: torch_compat.should_compress(4, 4, 1, 2.0)),
    (powerSGD_hook, "_report_compression_stats", lambda: torch_compat.report_compression(None, None)),
    (dist.distributed_c10d, "_world", torch_compat.abort_groups),
    (dist.distributed_c10d, "_abort_process_group", torch_compat.abort_groups),
    (torch.nn.Module, "_compiled_call_impl", lambda: torch_compat.is_compiled(torch.nn.Linear(1, 1))),
]


@pytest.mark.parametrize(("owner", "name", "call"), WITHOUT, ids=[name for _, name, _ in WITHOUT])
def test_missing_torch_function_without_fallback_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: Callable[[], object]
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(TorchUnsupported, match=absent(f".*{name}")):
        call()


@pytest.mark.parametrize(
    "name", ["_version", "_state_dict_hooks", "_non_persistent_buffers_set", "_buffers", "_get_backend", "_iterator"]
)
def test_missing_torch_attribute_without_fallback_is_named(name: str) -> None:
    calls: dict[str, Callable[[Any], object]] = {
        "_version": torch_compat.version_of,
        "_state_dict_hooks": torch_compat.state_dict_hooks,
        "_non_persistent_buffers_set": lambda bare: torch_compat.is_persistent(bare, "x"),
        "_buffers": torch_compat.own_buffers,
        "_get_backend": lambda bare: torch_compat.timeout_of(bare, CPU),
        "_iterator": torch_compat.forget_workers,
    }
    with pytest.raises(TorchUnsupported, match=absent(f".*{name}")):
        calls[name](SimpleNamespace(is_inference=lambda: False))


def test_graphsafe_rng_functionalization_is_disabled_in_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a GPU then resumes such a model with the same bits is for ``make gpu`` (jobs, hooks-mixed): a CPU has none."""
    from torch._functorch import config

    name: Any = "graphsafe_rng_functionalization"
    monkeypatch.setattr(config._config[name], "default", True)
    determinism.apply("off", torch.get_num_threads())
    with ThreadPoolExecutor(1) as thread:
        assert getattr(config, name) is thread.submit(getattr, config, name).result() is False


def test_foreach_copy_is_same_with_and_without_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied() -> list[torch.Tensor]:
        sources = [torch.arange(12.0).view(3, 4).t(), torch.ones(2, dtype=torch.float64) / 3, torch.ones(0)]
        targets = [torch.zeros(4, 3), torch.zeros(2), torch.zeros(0)]
        torch_compat.foreach_copy_(targets, sources)
        torch_compat.foreach_copy_([], [])
        return targets

    first = copied()
    assert first[0][1, 2] == 9 and first[1][0] == torch.tensor(1 / 3)
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert all(map(torch.equal, first, copied()))


@pytest.mark.parametrize("order", [2, float("inf")])
def test_foreach_norms_are_same_with_and_without_private_function(
    monkeypatch: pytest.MonkeyPatch, order: float
) -> None:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 7, 4096, 100_003)]
    first = torch_compat.norms(tensors, order)
    assert torch_compat.norms([], order) == []
    monkeypatch.delattr(torch, "_foreach_norm")
    assert all(map(torch.equal, first, torch_compat.norms(tensors, order)))


def test_tensor_version_counts_in_place_changes() -> None:
    tensor = torch.zeros(2)
    before = torch_compat.version_of(tensor)
    tensor[0].add_(1)
    assert before is not None and torch_compat.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert torch_compat.version_of(torch.zeros(2)) is None


def test_storage_id_is_same_for_views_and_after_resize() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    number = torch_compat.storage_id(tensor)
    assert torch_compat.storage_id(tensor[1:].view(3, 1)) == number != torch_compat.storage_id(other)
    assert StorageWeakRef(tensor.untyped_storage()).cdata == number  # type: ignore[no-untyped-call]  # the substitute
    tensor.resize_(100_000)
    assert torch_compat.storage_id(tensor) == number


def test_bucket_limits_of_older_torch_are_read() -> None:
    chosen: Any = SimpleNamespace(bucket_bytes_cap=100, bucket_bytes_cap_default=False)
    default: Any = SimpleNamespace(bucket_bytes_cap=25 << 20, bucket_bytes_cap_default=True)
    assert torch_compat.bucket_limits(chosen) == (100, 100)
    assert torch_compat.bucket_limits(default) == (1 << 20, 25 << 20)
