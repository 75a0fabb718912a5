"""Every private part of torch that Ratchet uses, with what takes its place where the installed torch does not have it.

No other module names a private function, class or attribute of torch (``tests/architecture/test_torch_private.py``). Each is
looked up when it is used, so that importing Ratchet works on every torch. A substitute gives the same bits; where there is none,
the function raises ``TorchUnsupported``, which names the missing part, torch's version and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

OLDEST: Final = "2.9"
"""Below this version nothing is promised."""
TESTED: Final = ("2.13",)
"""Minor versions of torch on which every test of ``make test-torch`` has passed (docs/torch-versions.md)."""


class TorchUnsupported(RuntimeError):
    """The installed torch lacks a part that has no substitute."""


def untested() -> str | None:
    """A sentence for the user when the installed torch is none of ``TESTED``; None when it is one of them."""
    if _minor(torch.__version__) in map(_minor, TESTED):
        return None
    return (
        f"torch {torch.__version__} is not one of the versions that Ratchet was tested on ({', '.join(TESTED)}): "
        "install one of these, or run `make test-torch TORCH=VERSION` with yours"
    )


def missing(part: str) -> TorchUnsupported:
    """The error for a part that the installed torch does not have."""
    return TorchUnsupported(
        f"torch {torch.__version__} has no {part}, which Ratchet needs: install torch {TESTED[-1]} "
        "(docs/torch-versions.md lists the versions that work)"
    )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


# Tensors


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target at its place; the lists are equally long."""
    if not targets:
        return
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often ``tensor`` was changed in place; None for an inference tensor, which does not count."""
    if tensor.is_inference():
        return None
    version: int | None = getattr(tensor, "_version", None)
    if version is None:
        raise missing("Tensor._version")
    return version


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of the memory that a strided ``tensor`` lies in: the same for all its views, and after the memory grew. Valid
    for as long as the memory is in use."""
    storage = tensor.untyped_storage()
    number: int | None = getattr(storage, "_cdata", None)
    if number is None:
        from torch.multiprocessing.reductions import StorageWeakRef

        number = StorageWeakRef(storage).cdata  # type: ignore[no-untyped-call]
    assert number is not None
    return number
