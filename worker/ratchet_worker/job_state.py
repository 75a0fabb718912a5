"""Everything with state in one rank, in one place: what a checkpoint captures and a resume puts back, component by component."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ratchet_contract.errors import StateError, UserError
from ratchet_contract.plural import counted
from ratchet_contract.resume import ComponentReport, ComponentStatus
from ratchet_hooks.build import ManagedHook
from ratchet_hooks.codec import decode
from ratchet_hooks.files import DTYPE_NAMES
from ratchet_hooks.layout import ManagedDDP
from ratchet_hooks.specs import BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_store.abreast import abreast
from ratchet_store.slices import Slice
from ratchet_worker import (
    divergence,
    fingerprint,
    model_state,
    module_origin,
    module_state,
    optimizer_state,
    rng,
    state_dict_names,
    state_names,
)
from ratchet_worker.data import own_generators
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.divergence import Start
from ratchet_worker.equal_state import EqualState
from ratchet_worker.hidden_state import HiddenState
from ratchet_worker.model_state import MODEL
from ratchet_worker.module_origin import Origin
from ratchet_worker.object_walk import Roots, is_users
from ratchet_worker.passage import HookState, Passage, batches, restore_hook
from ratchet_worker.snapshot import Snapshot, Until, addresses
from ratchet_worker.task import Stateful, TrainData
from ratchet_worker.walk import Walk

_GENERATORS: Final = "data_generators"
_HIDDEN: Final = "attributes"
_DDP: Final = "ddp"
_ALWAYS: Final = frozenset({
    MODEL, "buffers", "modules", _DDP, "facts", "hook", "rng", _GENERATORS, _HIDDEN, state_names.COMPONENT
})  # fmt: skip


def _cure(path: str) -> str:
    """Of what has changed at ``path``, a variable of a module (``train:BEST``) or an attribute."""
    name = path.rpartition(":")[2]
    kept = f"{name}=..." if ":" in path and name.isidentifier() else "..."
    return (
        f"Keep it in an object, kept = session.prepare(SimpleNamespace({kept})), or in the model's state_dict. If training does "
        f"not depend on it: session.ignore({path!r}, 'why'), or checkpoint.ignore"
    )


class JobState:
    """The registered objects of one rank. ``hook`` and ``ddp`` are set by ``wrapped``."""

    def __init__(self, rank: int, device: torch.device, *, code: Path | None = None, strict: bool = False) -> None:
        """``code``: the directory of the job's own modules. ``strict``: what cannot be stored is refused at a save, in place of
        named at a resume."""
        self.rank, self._device, self._strict = rank, device, strict
        self.ddp: ManagedDDP | None = None
        self.hook: ManagedHook | None = None
        self._origin = Origin({}, {})
        self.hidden = HiddenState(code)
        self.task: object = None
        self.not_found: frozenset[str] = frozenset()  # paths that were to be ignored, by the checkpoint
        self._before_evaluation: Snapshot | None = None
        self._walk: Walk | None = None  # of the module, as the last save found it
        self._equal, self._modules, self._generators = EqualState(), module_state.Capture(), rng.Capture(device)
        self.optimizers: dict[str, Optimizer] = {}
        self.stateful: dict[str, Stateful] = {}
        self.plain: dict[str, Any] = {}  # saved by their attributes or items
        self.data: TrainData | None = None
        self.start = Start({}, {})  # of the model

    def wrapped(self, ddp: ManagedDDP, hook: ManagedHook) -> None:
        """The model is wrapped: what it becomes from now on differs from how the next attempt will build it."""
        self.ddp, self.hook, self._origin = ddp, hook, module_origin.origin(ddp.module)
        self._walk = None

    def register(self, component: str, item: Any) -> None:
        """Add one object under a component's name. Raises ``UserError`` for what has no state that can be put back."""
        if not component or "/" in component:
            raise UserError(
                f"{component!r} is not a valid name of a registered object: it must not be empty or have a slash"
            )
        if component in (*self.optimizers, *self.stateful, *self.plain) or (
            component == "data" and self.data is not None
        ):
            raise UserError(f"{component} is registered twice; give each object a name of its own")
        if isinstance(item, Optimizer):
            optimizer_state.refuse_sharded(component, item)
            self.optimizers[component] = item
        elif component == "data":
            if not isinstance(item, TrainData):
                raise UserError(
                    f"data of type {type(item).__name__} cannot give its position back; wrap it in "
                    "ratchet.TrainLoader (map-style) or ratchet.TrainStream (iterable); a DataLoader: session.prepare(loader)"
                )
            self.data = item
        elif item is self.ddp or (isinstance(item, DistributedDataParallel) and not isinstance(item, ManagedDDP)):
            raise UserError(f"{component}: a model is registered by wrap(), not by register()")
        elif is_plain(item):
            self.plain[component] = item
        else:
            self.stateful[component] = _as_stateful(component, item)

    def refuse_changed(self) -> None:
        """Raises ``UserError`` for a parameter that the model has and DDP does not know. The same on every rank."""
        module_origin.refuse_changed_parameters(self._walked(self.hook_or_refuse()[0].module), self._origin)

    def refuse_uncovered(self) -> None:
        """Raises ``UserError`` for a parameter of an optimizer that nobody saves: neither the model nor a registered object."""
        names, held = self._names(), {p for item in self.stateful.values() for p in addresses(item.state_dict())}
        for component, optimizer in self.optimizers.items():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                if id(parameter) not in names and parameter.data_ptr() not in held:
                    raise UserError(
                        f"{component}: its parameter number {number} {list(parameter.shape)} is not in the wrapped model, so it "
                        "would be neither averaged over the ranks nor saved. Make it part of the model, or register its module"
                    )

    # --- capture -------------------------------------------------------------------------------------------------------

    def capture(self) -> Snapshot:
        """This rank's state now, as views of live tensors; ``Snapshot.until`` says how long they hold. A collective the first
        time (the hook may let DDP rebuild its buckets). Raises ``UserError`` as ``refuse_changed`` does."""
        ddp, hook = self.hook_or_refuse()
        hook_tensors, hook_data = hook.capture(copy=False)  # first: no rank may fail before this collective
        out = Snapshot()
        walk = self._walked(ddp.module)
        module_origin.refuse_changed_parameters(walk, self._origin)
        form = self._equal.capture(out, walk, self.optimizers, hook.replicas == "equal")
        buffers = {name: buffer.detach() for name, buffer in walk.named_buffers()}
        out.add_encoded("buffers", buffers, sorted(buffers))
        out.add_made(module_state.COMPONENT, lambda: self._modules.encoded(walk, self._origin))
        out.add(_DDP, {"buffers_next": ddp.require_forward_param_sync})  # does the next forward begin with rank 0's?
        out.state[state_names.COMPONENT] = state_names.capture(walk, form)
        own = self._before_evaluation or self._own()
        out.private |= own.private
        out.state |= own.state
        if self.data is not None:
            out.add("data", self.data.state_dict())
            if states := own_generators.of(self.data).states():
                out.add(_GENERATORS, states)
        out.add_encoded("hook", hook_tensors, hook_data)
        if hook_tensors:
            out.until = {**out.until, **{f"hook/{name}": Until.BACKWARD for name in hook_tensors}}
        out.add_made("rng", self._generators.encoded)
        return out

    def _own(self) -> Snapshot:
        """Of registered objects, and state outside ``state_dict``."""
        out = Snapshot()
        for component, item in self.stateful.items():
            out.add(component, _state_of(item))
        self._add_hidden(out)
        return out

    def evaluation_begins(self) -> None:
        """Between two steps: what an evaluation moves (a metric's sums, a module's own generator) is saved as it is now, since
        the evaluation runs again after a resume from any save until ``step_begins``."""
        if self._before_evaluation is None:
            own = self._own()
            own.private = {name: tensor.detach().clone() for name, tensor in own.private.items()}
            self._before_evaluation = own

    def step_begins(self) -> None:
        self._before_evaluation = None

    def require_storable(self) -> None:
        """Raises ``UserError`` naming what is registered and cannot be stored. What a ``state_dict()`` draws leaves no trace."""
        out = self.capture_late()
        for name, tensor in (*out.shared.items(), *out.private.items()):
            if tensor.dtype not in DTYPE_NAMES:
                raise UserError(
                    f"{name}: {tensor.dtype} cannot be stored; for complex numbers use complex64, or torch.view_as_real",
                    code="state-unsaved",
                )
        with rng.forked(self._device), own_generators.of(self.data).kept():
            for component, item in self.stateful.items():
                out.add(component, _state_of(item))
            if self.data is not None:
                out.add("data", self.data.state_dict())
            self._add_hidden(out)

    def begin(self) -> None:
        """Everything is registered and as the script has built it."""
        self.start = divergence.start(self.hook_or_refuse()[0].module)
        self.hidden.begin(self._roots())

    def note_built(self, *, undo: bool) -> None:
        """What is registered is as the script has built it, and hooks of the script's run before ``begin``; see
        ``HiddenState.note_built``. Again with what is registered later, and with other data."""
        self.hidden.note_built(self._roots(), undo=undo)

    def _roots(self) -> Roots:
        ddp, _ = self.hook_or_refuse()
        data, generators = self.data, own_generators.of(self.data)
        own = {
            "model": ddp.module,
            **self.optimizers,
            **self.plain,
            **({"task": self.task} if self.task is not None else {}),
        }
        stateful = {
            c: item.item if isinstance(item, optimizer_state.AroundOptimizer) else item
            for c, item in self.stateful.items()
        }
        with rng.forked(self._device):
            parts = state_dict_names.parts_of(self.stateful)
            spoken = {path: state_dict_names.spoken_of(item) for path, item in parts.items()}
        own |= parts | state_dict_names.buffers_of(self.stateful)
        registered = {
            **{c: item for c, item in stateful.items() if c not in spoken},
            "ddp": ddp,
            "data": data,
            **{f"data:{p}": g for p, g in generators.find().items()},
        }
        if isinstance(data, TrainLoader | SamplerPosition):
            own |= generators.roots
        else:
            registered |= generators.roots
        schedulers = {c: item for c, item in self.stateful.items() if isinstance(item, LRScheduler)}
        return Roots(own, registered, _functions_of(schedulers), spoken)

    def _add_hidden(self, out: Snapshot) -> None:
        changes = self.hidden.changes()
        if changes.unsaved and self._strict:
            raise UserError(
                f"determinism is strict, and this has changed in training and cannot be saved: {', '.join(changes.unsaved[:5])}. "
                + _cure(changes.unsaved[0]),
                code="state-unsaved",
            )
        told = {"unsaved": changes.unsaved, "ignored": self.hidden.ignored, "unmatched": self.hidden.unmatched}
        out.add(_HIDDEN, {"stored": changes.stored, "made": changes.made, **told})

    def _walked(self, module: nn.Module) -> Walk:
        self._walk = (self._walk or Walk(module)).again()
        return self._walk

    def capture_late(self) -> Snapshot:
        """The parameters and the optimizers' tensors alone, as views. No collective."""
        out = Snapshot()
        ddp, hook = self.hook_or_refuse()
        self._equal.capture(out, self._walked(ddp.module), self.optimizers, hook.replicas == "equal")
        return out

    def late(self) -> tuple[Snapshot, int]:
        """``capture_late``, and about how many bytes a rank's own state has."""
        ddp, hook = self.hook_or_refuse()
        parameters = sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad)
        residuals = isinstance(hook.spec, PowerSGDSpec | BatchedPowerSGDSpec) and hook.spec.use_error_feedback
        buffers = sum(b.nbytes for b in ddp.module.buffers())
        return self.capture_late(), buffers + int(residuals) * parameters * 5 // 4 + (1 << 20)

    def shared_digests(self, parts: int, threads: int) -> list[str]:
        """Digests of what is equal on all ranks, cut into ``parts``, as a checkpoint taken now would have them; [] when nothing
        is. Up to ``threads`` threads have a part each, on the CPU."""
        out = self.capture_late()
        plan = fingerprint.cut(out.sizes(), parts) if out.shared else []

        def of(slices: Sequence[Slice]) -> str:
            return fingerprint.part_digest(fingerprint.slice_digests(slices, out.shared))

        return abreast(plan, lambda _: of, threads if self._device.type == "cpu" else 1)

    # --- restore -------------------------------------------------------------------------------------------------------

    def restore(self, saved: Snapshot, how: Passage) -> list[ComponentReport]:
        """Put back the state of a group of the same size, bit for bit but for what ``how`` says. Raises ``UserError`` when the
        objects do not fit."""
        reports = self._restore_common(saved, "exact", None, how)
        if self.data is not None and "data" in saved.state:
            states = saved.value(_GENERATORS) if _GENERATORS in saved.state else {}
            reports.append(self._restore_data(lambda data: data.load_state_dict(saved.value("data")), states))
        reports.append(self._restore_hook([saved.encoded("hook")], how, resized=False))
        reports.append(self._fits("rng", lambda: rng.restore(saved.value("rng"), self._device)))
        return reports

    def restore_resized(
        self, mine: Snapshot, old: Sequence[Snapshot], seed: int, how: Passage
    ) -> list[ComponentReport]:
        """Put back the state of a group of ``len(old)`` ranks as well as it can be. ``mine``: the old rank that this rank takes
        private state from; ``old``: data and hook of all old ranks. The generators are seeded anew from ``seed``."""
        reason = f"the group had {counted(len(old), 'rank')}; this is one of theirs"
        reports = self._restore_common(mine, "redistributed", reason, how)
        if self.data is not None and "data" in mine.state:
            reports.append(self._resize_data([s.value("data") for s in old], len(old)))
        reports.append(self._restore_hook([s.encoded("hook") for s in old], how, resized=True))
        rng.seed_all(seed, self.rank)
        reports.append(self._report("rng", "reset", "the number of ranks changed; seeded anew"))
        return reports

    def _restore_common(
        self, saved: Snapshot, status: ComponentStatus, reason: str | None, how: Passage
    ) -> list[ComponentReport]:
        """Model, optimizers, buffers and further objects. ``status``: of what is private; the rest is exact, or averaged."""
        ddp = self.hook_or_refuse()[0]
        module = ddp.module
        if _DDP in saved.state:  # a checkpoint of before has none
            ddp.require_forward_param_sync = saved.value(_DDP)["buffers_next"]
        reports = [self._fits(MODEL, lambda: model_state.restore_parameters(module, saved))]
        equal, names = {**saved.shared, **saved.private}, self._names()
        replicas = set(model_state.parameters_of(saved.private))
        private = [self._fits("buffers", lambda: model_state.restore_buffers(module, saved, how.relayout))]
        for component, optimizer in self.optimizers.items():
            if component in saved.state:
                rest = saved.value(component, apart=replicas)
                load = partial(optimizer_state.restore, optimizer, component, names, equal, rest)
                reports.append(self._fits(component, load))
        for component, item in self.stateful.items():
            if component in saved.state:
                private.append(self._fits(component, partial(_load, item, saved.value(component))))
        private += self._restore_hidden(saved)
        reports += [
            r.model_copy(update={"status": status, "reason": reason}) if r.status == "exact" else r for r in private
        ]
        reports = [self._of_replicas(r, how) for r in reports]
        return reports + self._unsaved(saved) + self._absent(saved)

    def _restore_hidden(self, saved: Snapshot) -> list[ComponentReport]:
        if _HIDDEN not in saved.state:
            return []
        tensors, data = saved.encoded(_HIDDEN)
        found: Any = decode(tensors, data, device=self._device)
        left: dict[str, str] = {}
        reports = [self._fits(_HIDDEN, lambda: left.update(self.hidden.restore(found["stored"], found["made"])))]
        if left:
            text = "; ".join(f"{path}: {why}" for path, why in sorted(left.items())[:5])
            return [self._report(_HIDDEN, "not-exact", f"{text}. {_cure(min(left))}")]
        return reports if found["stored"] else []

    def _of_replicas(self, report: ComponentReport, how: Passage) -> ComponentReport:
        """``report``, where replicas became one."""
        component = report.component
        if component in how.averaged:
            return self._report(component, "redistributed", how.averaged[component])
        if component not in how.kept:
            return report
        why = how.kept[component]
        if report.status == "exact":
            return self._report(component, "not-exact", why)
        return self._report(component, report.status, f"{report.reason}; {why}")

    def _unsaved(self, saved: Snapshot) -> list[ComponentReport]:
        """What the model carried from step to step where no checkpoint looks."""
        modules, reasons = saved.value("modules"), []
        if names := modules.get("parted", []):
            reasons.append(
                f"buffer {', '.join(names[:5])} was put into another tensor's memory in training, and comes back in its own: "
                "what is written into one is not seen in the other any more"
            )
        reports = [self._report("modules", "not-exact", "; ".join(reasons))] if reasons else []
        hidden = saved.value(_HIDDEN) if _HIDDEN in saved.state else {}
        self.not_found = frozenset(hidden.get("unmatched", ()))
        if names := hidden.get("unsaved"):
            text = f"{', '.join(names[:5])} changed in training and cannot be saved. {_cure(names[0])}"
            reports.append(self._report(_HIDDEN, "not-exact", text))
        return reports

    def _absent(self, saved: Snapshot) -> list[ComponentReport]:
        """What only one side has: told, never passed over."""
        here = {*self.optimizers, *self.stateful, *(["data"] if self.data is not None else [])}
        there = set(saved.state) - _ALWAYS
        lost = [
            self._report(c, "absent", "recorded, but nothing of that name is registered") for c in sorted(there - here)
        ]
        new = [self._report(c, "absent", "the checkpoint has none; it starts anew") for c in sorted(here - there)]
        return lost + new

    def _restore_hook(self, states: Sequence[HookState], how: Passage, *, resized: bool) -> ComponentReport:
        ddp, hook = self.hook_or_refuse()
        told: list[tuple[ComponentStatus, str | None]] = []
        self._fits("hook", lambda: told.append(restore_hook(ddp, hook, states, how, resized=resized)))
        return self._report("hook", *told[0])

    def _restore_data(
        self, load: Callable[[TrainData], None], generators: dict[str, Any] | None = None
    ) -> ComponentReport:
        assert self.data is not None
        data: TrainData = self.data
        lost: list[str] = []
        self._fits("data", lambda: load(data))
        if data.exact and generators is not None:
            self._fits("data", lambda: lost.extend(own_generators.of(data).load(generators)))
        if (reach := getattr(data, "reach", None)) is not None:
            self._fits("data", reach)
        if not data.exact:
            lost = [str(getattr(data, "inexact_reason", None) or "the data cannot give their position back"), *lost]
        return self._report("data", "not-exact" if lost else "exact", "; ".join(lost) or None)

    def _resize_data(self, states: list[Any], ranks: int) -> ComponentReport:
        assert self.data is not None
        load: Any = getattr(self.data, "load_resized", None)
        if load is None:
            why = f"the group had {counted(ranks, 'rank')} and the data have no load_resized"
            if isinstance(self.data, SamplerPosition | StreamPosition):
                taken = self.data.begin_again(states[0])
                twice = ", so that its batches up to there are trained on twice" if taken else ""
                why += f"; epoch {self.data.epoch} begins again{twice}"
            return self._report("data", "reset", why)
        report = self._restore_data(lambda _: load(states))
        size = batches(states[0], self.data.state_dict())
        reason = f"continued behind what {counted(ranks, 'rank')} had used up" + (f"; {size}" if size else "")
        if own := sorted(own_generators.of(self.data).find()):
            reason += f"; {', '.join(own)}: its own generator begins anew"
        return report if report.status == "not-exact" else self._report("data", "redistributed", reason)

    def _fits(self, component: str, load: Callable[[], Any]) -> ComponentReport:
        """Run ``load``; an object that does not take the recorded state is a user's error that no retry heals."""
        try:
            load()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the device's fault, which another attempt may heal
            raise
        except (StateError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"{component} of rank {self.rank} cannot take the state of the checkpoint: {error}. Resume with the code, the "
                "spec and the arguments that made it. To go on from an earlier checkpoint fork the job; without a service move "
                "the later ones away",
                code="state-mismatch",
            ) from error
        return self._report(component, "exact", None)

    def _report(self, component: str, status: ComponentStatus, reason: str | None) -> ComponentReport:
        return ComponentReport(component=component, rank=self.rank, status=status, reason=reason)

    def of_the_group(self) -> list[str]:
        """Components that steer all ranks alike, unlike objects of the user's own, which may well be each rank's."""
        kinds = (torch.amp.GradScaler, LRScheduler)
        return [c for c, item in self.stateful.items() if c in ("scaler", "scheduler") or isinstance(item, kinds)]

    def of_the_user(self) -> list[str]:
        """The other registered objects, but for generators: what these draw is each rank's, whatever the replicas are."""
        group = self.of_the_group()
        return [c for c, item in self.stateful.items() if c not in group and not isinstance(item, rng.GeneratorState)]

    def steering(self) -> dict[str, Any]:
        """Copies of the schedulers' and the scaler's states, and of the optimizers' numbers: learning rates and the like."""
        return {
            **{component: copy.deepcopy(_state_of(self.stateful[component])) for component in self.of_the_group()},
            **{component: copy.deepcopy(_numbers(optimizer)) for component, optimizer in self.optimizers.items()},
        }

    def put_steering(self, states: Mapping[str, Any]) -> None:
        """Inverse of ``steering``."""
        for component in self.of_the_group():
            _load(self.stateful[component], states[component])
        for component, optimizer in self.optimizers.items():
            for group, numbers in zip(optimizer.param_groups, states[component], strict=True):
                for name, value in numbers.items():
                    if isinstance(value, torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value

    @property
    def all_optimizers(self) -> list[Any]:
        """The registered ones, and what holds one and is none."""
        around = [i.item for i in self.stateful.values() if isinstance(i, optimizer_state.AroundOptimizer)]
        return [*self.optimizers.values(), *around]

    # --- what belongs to what ------------------------------------------------------------------------------------------

    def hook_or_refuse(self) -> tuple[ManagedDDP, ManagedHook]:
        """The wrapped model and its hook. Raises ``UserError`` when nothing was wrapped."""
        if self.ddp is None or self.hook is None:
            raise UserError(
                "there is no model: wrap() it before the first step, so that DDP and its hook can be managed"
            )
        return self.ddp, self.hook

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.hook_or_refuse()[0].module.named_parameters()}


def _numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _state_of(item: Stateful) -> Any:
    """Its ``state_dict``; a scheduler's without the functions that it calls: these are there again as the code builds it."""
    state = item.state_dict()
    return _without_functions(state) if isinstance(item, LRScheduler) else state


def _load(item: Stateful, state: Any) -> None:
    """Inverse of ``_state_of``."""
    item.load_state_dict(_with_functions(state, item.state_dict()) if isinstance(item, LRScheduler) else state)


def _without_functions(state: Any) -> Any:
    if type(state) is list:
        return [_without_functions(one) for one in state]
    if type(state) is not dict:
        return state
    return {
        key: _without_functions(one) for key, one in state.items() if not isinstance(one, state_dict_names.FUNCTIONS)
    }


def _with_functions(state: Any, live: Any) -> Any:
    """``state`` with those of ``live``."""
    if type(state) is type(live) is list and len(state) == len(live):
        return [_with_functions(*pair) for pair in zip(state, live, strict=True)]
    if not type(state) is type(live) is dict:
        return state
    functions = {key: one for key, one in live.items() if isinstance(one, state_dict_names.FUNCTIONS)}
    return {key: _with_functions(one, live.get(key)) for key, one in state.items()} | functions


def _functions_of(schedulers: Mapping[str, Any]) -> dict[str, Any]:
    """By path, what schedulers call, of which their ``state_dict`` leaves out what it keeps from call to call."""
    found: dict[str, Any] = {}
    for path, scheduler in schedulers.items():
        for name, value in vars(scheduler).items():
            items = {f"{path}.{name}": value}
            if isinstance(value, (list, tuple)):
                items = {f"{path}.{name}[{number}]": one for number, one in enumerate(value)}
            found |= {at: one for at, one in items.items() if isinstance(one, state_dict_names.FUNCTIONS)}
            found |= _functions_of({at: one for at, one in items.items() if isinstance(one, LRScheduler)})
    return found


def is_plain(item: Any) -> bool:
    """Has it no ``state_dict``, and attributes or items that the walk saves and puts back?"""
    kind: type = type(item)
    if hasattr(item, "state_dict") or rng.is_generator(item):
        return False
    return kind in (dict, list) or (is_users(kind) and not hasattr(item, "__iter__"))  # no loader of the user's


def _as_stateful(component: str, item: Any) -> Stateful:
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        if isinstance(getattr(item, "param_groups", None), list) and hasattr(item, "__dict__"):
            return optimizer_state.AroundOptimizer(item)
        found: Stateful = item
        return found
    if rng.is_generator(item):
        return rng.GeneratorState(item)
    raise UserError(
        f"{component} of type {type(item).__name__} has no state_dict and load_state_dict, so it cannot be put back; add them "
        "(tensors, numbers, strings, lists, dicts), give it as a dict or a SimpleNamespace, or do not register it"
    )
