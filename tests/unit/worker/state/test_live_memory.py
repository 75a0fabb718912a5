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
from ratchet_worker.checkpoint import host_copy
from ratchet_worker.checkpoint.copy_sources import Source, Sources
from ratchet_worker.checkpoint.host_copy import Staged, Staging
from ratchet_worker.state.live_memory import ChangedTooEarly, LiveTensors, SafeReader, address, live_bytes
from ratchet_worker.state.snapshot import Until


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
def test_tensor_freed_before_copy_fails_save_by_name(kind: str) -> None:
    tensor = KINDS[kind]()
    copy = staged(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ChangedTooEarly, match="the storage of model/weight was resized"):
        copy.finish()


@pytest.mark.parametrize("kind", ["channels last", "transposed"])
def test_tensor_freed_between_address_lookup_and_read_fails_save(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, real = KINDS[kind](), SafeReader.private_copy

    def freed_now(reader: SafeReader, one: torch.Tensor) -> torch.Tensor:
        tensor.untyped_storage().resize_(0)
        return real(reader, one)

    copy = staged(tensor)
    monkeypatch.setattr(SafeReader, "private_copy", freed_now)
    with pytest.raises(ChangedTooEarly, match="model/weight"):
        copy.finish()


def test_small_tensor_without_memory_fails_save_by_name() -> None:
    tensor = torch.randn(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="model/weight has no memory"):
        staged(tensor)


@pytest.mark.parametrize("kind", list(KINDS))
def test_unchanged_tensor_is_copied(kind: str) -> None:
    tensor = KINDS[kind]()
    copy = staged(tensor)
    copy.finish()
    assert torch.equal(copy.tensors("model/")["weight"], torch.Tensor(tensor.detach()).contiguous().view(-1))


def test_safe_reader_keeps_lazy_negation_and_conjugation() -> None:
    plain = torch.randn(64, 2)
    for tensor in (negative_view(plain), torch.view_as_complex(plain).conj(), torch.view_as_complex(plain).conj().imag):
        copy = SafeReader().private_copy(tensor)
        assert torch.equal(copy, tensor) and copy.is_neg() == tensor.is_neg() and copy.is_conj() == tensor.is_conj()
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_live_bytes_of_freed_tensor_raise() -> None:
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


def test_raising_signal_handler_does_not_leave_direct_read_running(
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

    monkeypatch.setattr(host_copy, "_copy_bytes", slow)
    copy = Staging(torch.device("cpu"), 2)
    tensor = torch.randn(300_000)
    one = copy.stage(Sources([Source("model/weight", tensor, 0, tensor.numel(), Until.STEP)]))
    one._awaited.add(Until.STEP)  # as ``wait`` does first; the saving thread is quicker than its own copies
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
