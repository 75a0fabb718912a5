"""What a training does behind the boundary, while a save copies: what is written is what stood there, or the save fails."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from ratchet_contract.errors import StateError
from ratchet_worker.checkpoint.copy_sources import Lister
from ratchet_worker.state.live_memory import LiveTensors, SafeReader
from ratchet_worker.state.replica_digests import slice_digests
from tests.support.full_matrix import full
from tests.unit.worker.state.test_name_caches import Job

pytestmark = pytest.mark.usefixtures("no_small_tensors")


def _data(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.data = make(tensor.data)

    return change


def _given_back_and_fetched(tensor: torch.Tensor) -> None:
    """As those do who keep state elsewhere between two steps."""
    storage, nbytes = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    storage.resize_(0)
    taken = [torch.full((24,), 3.0) for _ in range(50)]
    storage.resize_(nbytes)
    del taken


KEPT: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda t: None,
    "other memory": _data(lambda t: torch.full_like(t, 7)),
    "another shape": _data(lambda t: torch.ones(2)),
    "no elements": _data(lambda t: torch.empty(0)),
    "another dtype": _data(lambda t: torch.ones(4, 6, dtype=torch.double)),
}
"""What the save does not mind."""
TOLD: dict[str, Callable[[torch.Tensor], object]] = {
    "memory from set_": lambda t: t.set_(torch.ones(4, 6)),  # type: ignore[call-overload]
    "in place": lambda t: t.add_(1),
    "through a view": lambda t: t.view(-1)[1].fill_(4),
    "detached": lambda t: t.detach().zero_(),
    "transposed": lambda t: t.t_(),
    "grown": lambda t: t.data.resize_(4000),
    "storage grown": lambda t: t.untyped_storage().resize_(40_000),
    "storage given back": lambda t: t.untyped_storage().resize_(0),
    "storage given back and fetched": _given_back_and_fetched,
}
"""What it cannot know, or has lost."""


@pytest.mark.parametrize("kind", [pytest.param("parameter", marks=full), "average"])
@pytest.mark.parametrize("name", [*KEPT, *TOLD])
def test_changes_during_copy_are_not_in_saved_checkpoint(name: str, kind: str) -> None:
    job = Job()
    weight = job.net.last[1].weight
    own, tensor = "model/last.1.weight", weight
    if kind == "average":
        own, tensor = "optimizer/last.1.weight/exp_avg", job.adam.state[weight]["exp_avg"]
    right = tensor.detach().clone().numpy().tobytes()  # a clone: what numpy has seen torch does not resize
    snapshot = job.kept.capture()
    assert isinstance(snapshot.shared, LiveTensors)
    plan = job.cuts.plan(snapshot.sizes(), 1)[0]
    slices = [one for one in plan if one.name == own]
    digests = slice_digests(slices, snapshot.shared)
    staged = job.staging.stage(Lister(0).list_sources(snapshot, plan))
    with torch.no_grad():
        ({**KEPT, **TOLD})[name](tensor)
    gc.collect()
    filler = [torch.full((24,), 9.0) for _ in range(2000)]  # in the memory that nobody else had needed
    if name in TOLD:
        with pytest.raises(StateError, match=own):
            staged.finish()
        if "storage" in name or name == "grown":
            for reader in (None, SafeReader()):
                with pytest.raises(StateError, match=rf"the storage of {own} was resized"):
                    slice_digests(slices, snapshot.shared, reader)
        return
    staged.finish()
    data = staged.data_to_write()[1]
    assert b"".join(bytes(data[begin:end]) for begin, end in staged.ranges("shared/", slices)) == right and filler
    assert slice_digests(slices, snapshot.shared) == digests == slice_digests(slices, snapshot.shared, SafeReader())
