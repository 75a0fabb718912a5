"""How the parts of torch behave that recorded layouts and hooks build on, on the installed torch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks import torch_compat
from ratchet_hooks.algorithms.half_precision_wrapper import CastBucket
from ratchet_hooks.algorithms.plain import divide
from ratchet_hooks.algorithms.powersgd import state_by_name
from ratchet_hooks.ddp.numeric_warnings import _ROUNDS_TO_INF
from ratchet_hooks.specs.hook_specs import WRAPPERS, PowerSGDSpec, QuantizationPerchannelSpec
from tests.support.gloo_ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_divide_has_same_bits_as_torch_for_every_16_bit_number(dtype: torch.dtype) -> None:
    """By a product with the inverse where that has the same bits: every number of 16 bits there is. (By 14 it has others.)"""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for size in [*range(1, 33), *(2**n for n in range(6, 13))]:
        quotients, ours = every.clone().div_(size), divide(every.clone(), size)
        assert torch.equal(quotients.view(torch.int16)[~every.isnan()], ours.view(torch.int16)[~every.isnan()])
        assert bool(ours[every.isnan()].isnan().all())


def test_torch_ddp_private_methods_keep_their_signatures() -> None:
    assert list(inspect.signature(DistributedDataParallel._build_params_for_reducer).parameters) == ["self"]
    assert list(inspect.signature(DistributedDataParallel._pre_forward).parameters) == ["self", "inputs", "kwargs"]


def test_torch_powersgd_state_has_exactly_the_stored_slots() -> None:
    expected = {
        "process_group", *state_by_name.HYPERPARAMETERS, "rng", "error_dict", "p_memory_dict", "q_memory_dict", "iter",
        "total_numel_before_compression", "total_numel_after_compression", "compression_stats_logging_frequency",
        "next_stats_report",
    }  # fmt: skip
    assert set(torch_powersgd.PowerSGDState.__slots__) == expected


def test_powersgd_spec_defaults_equal_torch_state_defaults() -> None:
    parameters = inspect.signature(torch_powersgd.PowerSGDState.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if name not in ("self", "process_group")}
    assert defaults == PowerSGDSpec().parameters()


def test_overflow_limits_are_where_16_bit_cast_rounds_to_inf() -> None:
    for dtype, (_, limit) in _ROUNDS_TO_INF.items():
        below = torch.tensor(limit).nextafter(torch.tensor(0.0))
        assert torch.tensor(limit).to(dtype).isinf() and below.to(dtype) == torch.finfo(dtype).max


def test_cast_bucket_has_every_attribute_of_grad_bucket() -> None:
    offered = {name for name in dir(dist.GradBucket) if not name.startswith("_")}
    assert offered == {"index", "buffer", "gradients", "parameters", "is_last", "set_buffer"}
    assert offered == {name for name in dir(CastBucket) if not name.startswith("_")}


def test_torch_compress_wrappers_take_a_hook_and_call_set_buffer() -> None:
    for name in WRAPPERS:
        wrapper = getattr(default_hooks, name)
        assert list(inspect.signature(wrapper).parameters) == ["hook"]
        assert list(inspect.signature(wrapper(default_hooks.allreduce_hook)).parameters) == ["hook_state", "bucket"]
        assert "set_buffer" in inspect.getsource(wrapper)


def test_torch_ddp_checks_bf16_hooks_by_function_name() -> None:
    """Ours has another; a DDP that looks at something else may refuse it too."""
    source = inspect.getsource(DistributedDataParallel._check_comm_hook)
    assert 'hook.__name__ in ["bf16_compress_hook", "bf16_compress_wrapper_hook"]' in source


def test_torch_quantization_hooks_keep_signatures_and_observer_ranges() -> None:
    tensor = inspect.signature(quantization_hooks.quantization_pertensor_hook).parameters
    channel = inspect.signature(quantization_hooks.quantization_perchannel_hook).parameters
    assert list(tensor) == ["process_group", "bucket"] and list(channel) == ["process_group", "bucket", "bucket_size"]
    assert channel["bucket_size"].default == QuantizationPerchannelSpec().bucket_size
    for observer in (torch.ao.quantization.MinMaxObserver(), torch.ao.quantization.PerChannelMinMaxObserver()):
        assert (observer.dtype, observer.quant_min, observer.quant_max) == (torch.quint8, 0, 255)
        assert observer.eps.item() == torch.finfo(torch.float32).eps
    for name in ("_quantize_per_tensor_backend", "_dequantize_per_tensor_backend"):
        assert callable(getattr(quantization_hooks, name))


def test_torch_noop_hook_returns_the_bucket_buffer() -> None:
    flat = torch.ones(3)
    assert debugging_hooks.noop_hook(None, SimpleNamespace(buffer=lambda: flat)).wait() is flat  # type: ignore[arg-type]


def test_assign_buckets_fills_per_dtype_up_to_the_size_limit() -> None:
    tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(4), torch.zeros(4)]
    buckets = torch_compat.assign_buckets(tensors, [32, 16], [3, 2, 1, 0])
    assert buckets == [[2], [3, 1], [0]]  # float64: 32 bytes at once; float32: 32 bytes, then 16


def gathered(rank: int, name: str) -> list[torch.Tensor]:
    """What ``all_gather_single`` gives, with and without torch's function ``name``."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            ranks = torch.zeros(6, dtype=torch.uint8)
            sent = torch.arange(3, dtype=torch.uint8) + 10 * rank
            torch_compat.all_gather_single(ranks, sent, dist.group.WORLD).wait()  # type: ignore[arg-type]
            made.append(ranks)
            patch.delattr(dist, name, raising=False)
    return made


def test_all_gather_gives_equal_results_under_both_collective_names(two_ranks: Ranks) -> None:
    for made in two_ranks.run(gathered, "all_gather_single"):
        assert [one.tolist() for one in made] == [[0, 1, 2, 10, 11, 12]] * 2


class Path(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(40, 4), nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        return out


def observe(rank: int, options: dict[str, Any]) -> list[list[tuple[int, bool, list[str]]]]:
    """(index, is_last, parameters) of every bucket in each of four iterations of plain DDP."""
    module = Path()
    names = {id(p): name for name, p in module.named_parameters()}
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0005, **options)  # type: ignore[arg-type]
    seen: list[tuple[int, bool, list[str]]] = []

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]
        seen.append((bucket.index(), bucket.is_last(), [names[id(p)] for p in bucket.parameters()]))
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    ddp.register_comm_hook(None, hook)
    iterations = []
    for _ in range(4):
        ddp(torch.ones(2, 8)).sum().backward()
        iterations.append(list(seen))
        seen.clear()
    read = [[names[id(p)] for p in bucket] for bucket in torch_compat.bucket_parameters(ddp.reducer)]
    assert read == [bucket for _, _, bucket in iterations[-1]]
    assert dist.get_world_size() == 2
    return iterations


READY = {"last.bias", "last.weight", "first.bias", "first.weight"}


def test_ddp_rebuilds_buckets_depending_on_graph_options(two_ranks: Ranks) -> None:
    plain = two_ranks.run(observe, {})[0]
    static = two_ranks.run(observe, {"static_graph": True})[0]
    unused = two_ranks.run(observe, {"find_unused_parameters": True})[0]
    assert [len(i) for i in plain] == [1, 2, 2, 2]
    assert {name for _, _, names in plain[1] for name in names} == READY and plain[1] == plain[3]
    assert [(index, last) for index, last, _ in plain[1]] == [(0, False), (1, True)]
    assert [len(i) for i in static] == [1, 1, 2, 2]
    assert [len(i) for i in unused] == [3, 3, 3, 3] and unused[0] == unused[3]
