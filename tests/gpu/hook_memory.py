"""Row ``hook-memory``: what each hook holds beside model and optimizer, against what pre-flight promises for it.

On CUDA the allocator is asked: the difference to plain all-reduce of what is allocated between two steps, and of the most that
was allocated within a step, before it rounds sizes up. Beside the promise, which is of state, stands what the hook works in and
torch frees late (``working``). On the CPU the hook's own report of its state, against the promise alone. The promise for batched
PowerSGD is that of one bucket, so it has one here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, Final

from ratchet_hooks.specs.memory_estimate import hook_memory, needs_shapes
from tests.gpu.work import Work
from tests.support.exact_matrix import hook_labels, hook_spec
from tests.support.gloo_ranks import Named, Ranks

_USES: Final[Any] = Named("tests.gpu.hook_memory_runs")


_FEW: Final = 4096
"""Bytes of scalars and offsets."""


@dataclass(frozen=True)
class Model:
    """Square layers with a bias, so that buckets hold matrices and vectors."""

    width: int
    depth: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.width, self.width), (self.width,)] * self.depth


def run(work: Work) -> str:
    model = Model(work.sized(4096, 512, 64), work.sized(8, 8, 3))
    labels = [label for label in hook_labels() if needs_shapes(hook_spec(label, 2))]
    if work.size == "cheap":
        labels = ["powerSGD", "powerSGD+bf16"]
    over = []
    with Ranks(1, deadline=work.left, backend="nccl" if work.device == "cuda" else "gloo") as ranks:
        base = _use(ranks, "allreduce", model, work)
        for label in labels:
            promise = hook_memory(hook_spec(label, 1), model.shapes)
            assert promise is not None, f"{label}: pre-flight promises nothing"
            used = _use(ranks, label, model, work)
            held, most = used.held - base.held, used.most - base.most
            seen = f"promised {_mb(promise)}, held {_mb(held)}"
            if work.device == "cuda":
                promise += working(label, model)
                seen += f" ({_mb(promise)} with what it works in)"
                seen += (
                    f", at most {_mb(most)} within a step; {_mb(used.cublas - base.cublas)} of cuBLAS's for its stream"
                )
            if max(held, most) > promise:
                over.append(label)
                work.red(label, f"more than promised: {seen}")
            else:
                work.green(label, seen)
    gradients = 4 * sum(prod(shape) for shape in model.shapes)
    return f"{len(labels) - len(over)} of {len(labels)} hooks within the promise; {_mb(gradients)} of gradients"


def working(label: str, model: Model) -> int:
    """Bytes on their way in one step: vectors, P and Q of rank 1, and a copy of all gradients where matrices are stacked, padded
    to a square or sent in 16 bits."""
    vectors, factors = model.width * model.depth, 2 * model.width * model.depth
    whole = sum(prod(shape) for shape in model.shapes)
    if label.startswith("batched"):
        whole = (isqrt(whole - 1) + 1) ** 2
    if "+" in label:
        return 2 * whole + _FEW
    copied = label.startswith("batched") or label.endswith((":stacked", ":all"))
    return 4 * (vectors + factors + whole * copied) + _FEW


def _use(ranks: Ranks, label: str, model: Model, work: Work) -> Any:
    return ranks.run(_USES.use, label, model.width, model.depth, work.device)[0]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f} MB"
