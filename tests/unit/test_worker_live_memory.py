"""Reads of tensors whose memory user code frees: an error by kind, never other bytes and never the end of the process."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest
import torch

from ratchet_contract.errors import StateError
from ratchet_hooks.torch_compat import negative_view
from ratchet_worker import staging
from ratchet_worker.live_memory import ChangedTooEarly, LiveTensors, SafeReader, address, live_bytes
from ratchet_worker.snapshot import Until
from ratchet_worker.sources import Source, Sources
from ratchet_worker.staging import Staged, Staging


class Named(torch.Tensor):
    """A subclass with memory of its own."""


KINDS = {
    "contiguous": lambda: torch.randn(300_000),
    "channels last": lambda: torch.randn(32, 32, 16, 16).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(500, 600).t(),
    "a subclass": lambda: torch.randn(300_000).as_subclass(Named),
}


def staged(tensor: torch.Tensor) -> Staged:
    """Handed over at a boundary, to be copied before ``optimizer.step()``."""
    source = Source("model/weight", tensor, 0, tensor.numel(), Until.STEP)
    return Staging(torch.device("cpu")).stage(Sources([source]))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_tensor_that_is_freed_between_boundary_and_copy_fails_its_save_by_name(kind: str) -> None:
    tensor = KINDS[kind]()
    copy = staged(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ChangedTooEarly, match="the storage of model/weight was resized"):
        copy.finish()


@pytest.mark.parametrize("kind", ["channels last", "transposed"])
def test_one_that_is_freed_between_the_look_at_its_address_and_the_read_does_so_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, real = KINDS[kind](), SafeReader.private

    def freed_now(reader: SafeReader, one: torch.Tensor) -> torch.Tensor:
        tensor.untyped_storage().resize_(0)
        return real(reader, one)

    copy = staged(tensor)
    monkeypatch.setattr(SafeReader, "private", freed_now)
    with pytest.raises(ChangedTooEarly, match="model/weight"):
        copy.finish()


def test_a_small_tensor_that_has_no_memory_at_the_boundary_fails_its_save_by_name() -> None:
    tensor = torch.randn(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="model/weight has no memory"):
        staged(tensor)


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_left_alone_is_copied(kind: str) -> None:
    tensor = KINDS[kind]()
    copy = staged(tensor)
    copy.finish()
    assert torch.equal(copy.tensors("model/")["weight"], torch.Tensor(tensor.detach()).contiguous().view(-1))


def test_deferred_negation_and_conjugation_are_kept() -> None:
    plain = torch.randn(64, 2)
    for tensor in (negative_view(plain), torch.view_as_complex(plain).conj(), torch.view_as_complex(plain).conj().imag):
        copy = SafeReader().private(tensor)
        assert torch.equal(copy, tensor) and copy.is_neg() == tensor.is_neg() and copy.is_conj() == tensor.is_conj()
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_freed_memory_has_no_bytes_and_a_freed_subclass_another_address() -> None:
    tensor = torch.randn(100_000).as_subclass(Named)
    before, live = address(tensor), LiveTensors(["weight"], [tensor])
    tensor.untyped_storage().resize_(0)
    assert before != address(tensor)
    with pytest.raises(BufferError):
        live_bytes(tensor)
    with pytest.raises(ChangedTooEarly, match="weight"):
        live.require_all_intact()


class Alarm(Exception):
    """A script's time limit."""


def test_a_handler_that_raises_leaves_no_wait_while_another_thread_reads_the_memory_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What follows the handler may free the memory."""
    begun, reading, alarm = threading.Event(), threading.Lock(), threading.Event()

    def slow(memory: object, target: object, reader: SafeReader | None) -> None:
        assert reader is None, "the loop waits"
        with reading:
            begun.set()
            alarm.wait(10)
            time.sleep(0.3)

    def raises(_: int, __: FrameType | None) -> None:
        alarm.set()
        raise Alarm

    monkeypatch.setattr(staging, "_copy_bytes", slow)
    copy = Staging(torch.device("cpu"), 2)
    tensor = torch.randn(300_000)
    one = copy.stage(Sources([Source("model/weight", tensor, 0, tensor.numel(), Until.STEP)]))
    one._waited.add(Until.STEP)  # as ``wait`` does first; the saving thread is quicker than its own copies
    saver = threading.Thread(target=one.finish)
    saver.start()
    assert begun.wait(10)
    before = signal.signal(signal.SIGALRM, raises)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            one.wait(Until.STEP)
        assert not reading.locked(), "a read goes on"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        saver.join()
