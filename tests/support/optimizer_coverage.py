"""Every optimizer and every scheduler that torch and schedulefree export, trained, put back into new objects and trained on, in
the ranks of a group. The classes are found, not listed: one of a newer version is tried by its default arguments.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state.hook_transfer import StateTransfer
from ratchet_worker.training.evaluation import preserving_state
from tests.support.exact_runs import CPU, Saved, differences, row_major_copies

SAVED, TOTAL = 4, 9
"""Steps before the save, and of the whole run."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(self.embedding(x))
        return found

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.layers.parameters() if p.ndim == 2]


@dataclass
class Parts:
    """What a script registers, by name. ``stepped``: called once in each step, behind the optimizers, with the loss."""

    objects: dict[str, Any]
    stepped: Callable[[float], object] = lambda loss: None
    sparse: bool = False

    @property
    def optimizers(self) -> list[Any]:
        return [item for item in self.objects.values() if hasattr(item, "param_groups")]


Build = Callable[[Net, Any], Parts]


class Training:
    """One rank's run: from scratch, or from ``saved`` as a new process would."""

    def __init__(self, rank: int, build: Build, saved: Saved | None = None) -> None:
        torch.manual_seed(11 if saved is None else 12)
        self.rank, self.step, self.net = rank, 0, Net()
        self.ddp, self.hook = managed_ddp(
            self.net, AllreduceSpec(), ddp={}, device=CPU, recorded_layout=None if saved is None else saved.layout
        )
        self.parts = build(self.net, self.ddp)
        self.state = JobState(rank, CPU, strict=True)
        self.state.set_model(self.ddp, self.hook)
        for name, item in self.parts.objects.items():
            self.state.register(name, item)
        self.state.check_parameters_covered()
        self.state.begin()
        if saved is not None:
            reports = self.state.restore(saved.snapshot(), StateTransfer())
            assert all(report.status == "exact" for report in reports), reports
            self.step = saved.step
        self.state.require_storable()

    def save(self) -> Saved:
        layout, found = self.hook.layout(), self.state.capture()
        return Saved(
            self.step, row_major_copies(found.shared), row_major_copies(found.private), json.dumps(found.state), layout
        )

    def train(self, until: int) -> list[torch.Tensor]:
        """The parameters afterwards."""
        while self.step < until:
            self._train_step()
            self.step += 1
        return [p.detach().clone() for p in self.net.parameters()]

    def _train_step(self) -> None:
        optimizers = self.parts.optimizers
        for optimizer in optimizers:
            if hasattr(optimizer, "train"):  # schedulefree
                optimizer.train()
        loss = 0.0
        for optimizer in optimizers:
            if _wants_closure(optimizer):
                loss = float(optimizer.step(self._loss))
        if not all(map(_wants_closure, optimizers)):
            loss = self._loss()
            for parameter in self.net.embedding.parameters() if self.parts.sparse else ():
                parameter.grad = parameter.grad.to_sparse() if parameter.grad is not None else None
            for optimizer in optimizers:
                optimizer.step()
        self.parts.stepped(loss)
        for optimizer in optimizers:
            optimizer.zero_grad()
            if self.step % 3 == 2 and hasattr(optimizer, "eval"):  # an evaluation, whose switch rounds the weights
                optimizer.eval()

    def _loss(self) -> float:
        self.ddp.zero_grad()
        seeds = torch.Generator().manual_seed(100 * self.step + self.rank)
        x, y = torch.randint(7, (6,), generator=seeds), torch.randint(3, (6,), generator=seeds)
        loss = nn.functional.cross_entropy(self.ddp(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def _wants_closure(optimizer: Any) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluation_differences_by_class(rank: int) -> dict[str, list[str]]:
    """What an evaluation between two steps leaves of its switching to the averages and back, by the optimizer's name."""
    out = {}
    for name, build in _schedulefree().items():
        run = Training(rank, build)
        before = run.train(SAVED)
        rounded = False
        with preserving_state(run.ddp, run.hook, None, CPU, run.state.all_optimizers, broadcast=True):
            for optimizer in run.parts.optimizers:
                if hasattr(optimizer, "eval"):
                    optimizer.eval()
                    run.net(torch.arange(6))
                    optimizer.train()
                    rounded = any(not torch.equal(a, p) for a, p in zip(before, run.net.parameters(), strict=True))
                    optimizer.eval()
        told = [] if all(map(torch.equal, before, run.net.parameters())) else ["a trace in the weights"]
        trained, other = run.train(TOTAL), Training(rank, build).train(TOTAL)
        out[name] = told + ([] if all(map(torch.equal, trained, other)) else ["another training"])
        out["rounding"] = out.get("rounding", []) + ([name] if rounded else [])
    return out


def resume_differences_by_class(rank: int, package: str) -> dict[str, list[str]]:
    """What differs between an undisturbed run and one that was saved and put back, or what went wrong, by the class's name."""
    out = {}
    for name, build in CASES[package]().items():
        try:
            out[name] = _compared(rank, build)
        except Exception as error:
            out[name] = [f"{type(error).__name__}: {error}"]
    return out


def _compared(rank: int, build: Build) -> list[str]:
    whole = Training(rank, build)
    first = whole.train(0)
    whole.train(SAVED)
    saved = whole.save()
    trained = whole.train(TOTAL)
    resumed = Training(rank, build, saved)
    again = resumed.train(TOTAL)
    told = differences(whole.save(), resumed.save())
    told += [] if all(map(torch.equal, trained, again)) else ["parameters"]
    return told + (["no weight moved"] if all(map(torch.equal, first, trained)) else [])


# --- what torch exports ------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
    "LBFGS": {"max_iter": 3, "history_size": 4},
    "ASGD": {"t0": 2},
}
"""Arguments by which a class keeps more state than by its defaults."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam, capturable rate": ("Adam", {"lr": torch.tensor(0.01), "capturable": False}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "Adagrad, decaying": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "SGD, foreach": ("SGD", {"momentum": 0.9, "foreach": True}),
}


def _optimizers() -> dict[str, Build]:
    kinds = _classes(torch.optim, Optimizer)
    found: dict[str, Build] = {name: partial(_with, kind, OPTIONS.get(name, {})) for name, kind in kinds.items()}
    return found | {name: partial(_with, kinds[kind], options) for name, (kind, options) in MORE.items()}


def _with(kind: Any, options: dict[str, Any], net: Net, ddp: Any) -> Parts:
    needed = {"lr": 0.01} if _is_needed(kind, "lr") else {}
    options = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    apart = {"Muon": net.matrices, "SparseAdam": [*net.embedding.parameters()]}.get(kind.__name__)
    if apart is None:
        return Parts({"optimizer": kind(net.parameters(), **needed, **options)})
    others = [p for p in net.parameters() if all(p is not one for one in apart)]
    objects = {"optimizer": kind(apart, **needed, **options), "others": torch.optim.SGD(others, 0.01)}
    return Parts(objects, sparse=kind.__name__ == "SparseAdam")


def _is_needed(kind: Any, name: str) -> bool:
    parameter = inspect.signature(kind.__init__).parameters.get(name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


class Warm:
    """A callable with state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**epoch + self.calls / 100


SCHEDULERS: dict[str, Callable[[Any, Any], Any]] = {
    "LambdaLR": lambda kind, o: kind(o, Warm()),
    "MultiplicativeLR": lambda kind, o: kind(o, lambda epoch: 0.95),
    "StepLR": lambda kind, o: kind(o, 2),
    "MultiStepLR": lambda kind, o: kind(o, [2, 5, 5, 7]),
    "ExponentialLR": lambda kind, o: kind(o, 0.9),
    "SequentialLR": lambda kind, o: kind(o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [1, 3])], [3]),
    "ChainedScheduler": lambda kind, o: kind([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [5])]),
    "CosineAnnealingLR": lambda kind, o: kind(o, 6),
    "CosineAnnealingWarmRestarts": lambda kind, o: kind(o, 3),
    "ReduceLROnPlateau": lambda kind, o: kind(o, patience=0, threshold=0.02, cooldown=1),
    "CyclicLR": lambda kind, o: kind(o, 0.01, 0.1, 2, scale_fn=Warm()),
    "OneCycleLR": lambda kind, o: kind(o, 0.1, total_steps=20),
    "SWALR": lambda kind, o: kind(o, 0.05, anneal_epochs=6),
}
"""How those are made that take more than an optimizer."""


class ByRule(lr_scheduler.LRScheduler):
    """Keeps a function, as SWALR does in older torch; the ``state_dict`` that it inherits has it among the numbers."""

    def __init__(self, optimizer: Optimizer, rule: Callable[[int], float]) -> None:
        self.rule = rule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * self.rule(self.last_epoch) for base in self.base_lrs]


def _schedulers() -> dict[str, Build]:
    kinds = {**_classes(lr_scheduler, lr_scheduler.LRScheduler), **_classes(swa_utils, lr_scheduler.LRScheduler)}
    makers = {name: SCHEDULERS.get(name, lambda kind, o: kind(o)) for name in kinds}
    kinds |= {"a scheduler with a function": ByRule, "one in another": lr_scheduler.SequentialLR}
    makers["a scheduler with a function"] = lambda kind, o: kind(o, math.cos)
    makers["one in another"] = lambda kind, o: kind(o, [ByRule(o, lambda n: 0.9**n), lr_scheduler.StepLR(o, 2)], [3])
    return {name: partial(_scheduled, kinds[name], makers[name]) for name in kinds}


def _scheduled(kind: Any, make: Callable[[Any, Any], Any], net: Net, ddp: Any) -> Parts:
    optimizer = torch.optim.SGD(
        [{"params": net.embedding.parameters()}, {"params": net.layers.parameters(), "lr": 0.2}], 0.1, 0.9
    )
    scheduler = make(kind, optimizer)

    def step(loss: float) -> None:
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()

    return Parts({"optimizer": optimizer, "scheduler": scheduler}, step)


def _averages() -> dict[str, Build]:
    """All that ``swa_utils`` exports to average by, on the module and on the wrapped model."""
    ways: dict[str, dict[str, Any]] = {"AveragedModel": {}, "AveragedModel, buffers": {"use_buffers": True}}
    for name in swa_utils.__all__:
        if name.startswith("get_"):
            ways[name] = {
                name.removeprefix("get_").removeprefix("swa_").removeprefix("ema_"): getattr(swa_utils, name)()
            }
    found: dict[str, Build] = {name: partial(_averaged, options, False) for name, options in ways.items()}
    return {**found, "AveragedModel of the wrapped model": partial(_averaged, {}, True)}


def _averaged(options: dict[str, Any], wrapped: bool, net: Net, ddp: Any) -> Parts:
    average = swa_utils.AveragedModel(ddp if wrapped else net, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    return Parts(
        {"optimizer": optimizer, "average": average}, lambda loss: average.update_parameters(ddp if wrapped else net)
    )


# --- what schedulefree exports -----------------------------------------------------------------------------------------


def _schedulefree() -> dict[str, Build]:
    module = importlib.import_module("schedulefree")
    kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
    found: dict[str, Build] = {
        name: partial(_with, kind, {"warmup_steps": 3} if "warmup_steps" in inspect.signature(kind).parameters else {})
        for name, kind in kinds.items()
        if issubclass(kind, Optimizer)
    }
    return found | {name: partial(_around, kind) for name, kind in kinds.items() if name not in found}


def _around(kind: Any, net: Net, ddp: Any) -> Parts:
    return Parts({"optimizer": kind(torch.optim.SGD(net.parameters(), 0.05, 0.5), momentum=0.8)})


def _classes(module: Any, base: type) -> dict[str, Any]:
    """Public ones that can be made."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and not name.startswith("_")
    }


CASES: dict[str, Callable[[], dict[str, Build]]] = {
    "optimizers": _optimizers,
    "schedulers": _schedulers,
    "averages": _averages,
    "schedulefree": _schedulefree,
}
