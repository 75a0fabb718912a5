"""All state of one rank: what a checkpoint captures and a resume restores, component by component."""

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

from ratchet_contract.checkpoint.resume_report import ComponentReport, ComponentStatus
from ratchet_contract.errors import StateError, UserError
from ratchet_contract.plural import pluralize
from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_hooks.manage.managed_ddp import ManagedHook
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_hooks.state.encode import decode
from ratchet_hooks.state.files import DTYPE_NAMES
from ratchet_store.format.shard_slices import Slice
from ratchet_store.read.parallel import parallel_map
from ratchet_worker.data import data_generators
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.ipc.save_reports import part_digest
from ratchet_worker.state import (
    model,
    module_baseline,
    module_extras,
    replica_digests,
    replica_divergence,
    rng,
    state_dict_names,
)
from ratchet_worker.state import optimizer as optimizer_state
from ratchet_worker.state.hidden_state import NOT_VISITED, RAISES, HiddenState
from ratchet_worker.state.hook_transfer import HookState, StateTransfer, describe_batch_change, restore_hook
from ratchet_worker.state.model import MODEL
from ratchet_worker.state.module_baseline import Origin
from ratchet_worker.state.module_walk import Walk
from ratchet_worker.state.object_walk import Roots, is_user_class
from ratchet_worker.state.replica_divergence import Start
from ratchet_worker.state.replicated import EqualState
from ratchet_worker.state.snapshot import Snapshot, Until, tensor_addresses
from ratchet_worker.task import Stateful, TrainData

_GENERATORS: Final = "data_generators"
_HIDDEN: Final = "attributes"
_DDP: Final = "ddp"
_BUILT_IN_COMPONENTS: Final = frozenset({
    MODEL, "buffers", "modules", _DDP, "facts", "hook", "rng", _GENERATORS, _HIDDEN, model.COMPONENT
})  # fmt: skip


def _describe_unsaved(names: Sequence[str]) -> str:
    """Return a message, with advice, about changes that are not saved. ``names``: ``Changes.unsaved``, not empty."""
    *changed, last = names
    if not last.startswith(NOT_VISITED):
        return f"{', '.join(names[:5])} changed in training and cannot be saved. {_advice(names[0])}"
    path = last.removeprefix(NOT_VISITED)
    text = (
        f"{last}, were not looked at, and their changes are not saved. If training changes nothing there: "
        f"session.ignore({path!r}, 'why'), or checkpoint.ignore"
    )
    return f"{_describe_unsaved(changed)}; {text}" if changed else text


def _advice(path: str) -> str:
    """Return advice for the user about a change that no checkpoint holds. ``path``: an attribute, or a module's variable."""
    path = path.removesuffix(RAISES)
    name = path.rpartition(":")[2]
    kept = f"{name}=..." if ":" in path and name.isidentifier() else "..."
    cure = f"Keep it in an object, kept = session.keep({kept}), or in the model's state_dict"
    if path.startswith("user:"):
        cure = "No checkpoint can hold it: create it again from the step number, outside of what is kept or registered"
    return f"{cure}. If training does not depend on it: session.ignore({path!r}, 'why'), or checkpoint.ignore"


class JobState:
    """The registered objects of one rank, and the capture and restore of their state."""

    def __init__(self, rank: int, device: torch.device, *, code: Path | None = None, strict: bool = False) -> None:
        """``code``: the directory of the job's own modules. ``strict``: a save raises ``UserError`` for a change outside of
        ``state_dict`` that cannot be stored."""
        self.rank, self._device, self._strict = rank, device, strict
        self.ddp: ManagedDDP | None = None
        self.hook: ManagedHook | None = None
        self._origin = Origin({}, {})
        self.hidden = HiddenState(code)
        self.task: object = None
        self.unmatched_ignores: frozenset[str] = frozenset()  # ignored paths that matched nothing, from the checkpoint
        self._before_evaluation: Snapshot | None = None
        self._walk: Walk | None = None  # of the module, as of the last capture
        self._equal_state, self._modules, self._generators = EqualState(), module_extras.Capture(), rng.Capture(device)
        self.optimizers: dict[str, Optimizer] = {}
        self.stateful: dict[str, Stateful] = {}
        self.plain: dict[str, Any] = {}  # objects saved by their attributes or items
        self.data: TrainData | None = None
        self.start = Start({}, {})  # the model's

    def set_model(self, ddp: ManagedDDP, hook: ManagedHook) -> None:
        """Set the wrapped model and its hook. Later captures contain the changes of buffers since now."""
        self.ddp, self.hook, self._origin = ddp, hook, module_baseline.origin(ddp.module)
        self._walk = None

    def register(self, component: str, item: Any) -> None:
        """Register ``item`` under the name ``component``. The name ``data`` is for the training data. Raises ``UserError`` for an
        unusable name or object."""
        if not component or "/" in component:
            raise UserError(
                f"{component!r} is not a valid name of a registered object: it must not be empty or have a slash"
            )
        if component in (*self.optimizers, *self.stateful, *self.plain) or (
            component == "data" and self.data is not None
        ):
            raise UserError(f"{component} is registered twice; give each object a name of its own")
        if isinstance(item, Optimizer):
            optimizer_state.check_not_sharded(component, item)
            self.optimizers[component] = item
        elif component == "data":
            if not isinstance(item, TrainData):
                raise UserError(
                    f"data of type {type(item).__name__} cannot report its position; wrap it in "
                    "ratchet.TrainLoader (map-style) or ratchet.TrainStream (iterable); a DataLoader: session.prepare(loader)"
                )
            self.data = item
        elif item is self.ddp or (isinstance(item, DistributedDataParallel) and not isinstance(item, ManagedDDP)):
            raise UserError(f"{component}: a model is registered by wrap(), not by register()")
        elif is_plain(item):
            self.plain[component] = item
        else:
            self.stateful[component] = _as_stateful(component, item)

    def check_parameters_unchanged(self) -> None:
        """Raise ``UserError`` if a parameter of this rank's model was added, removed, replaced or unfrozen after the model was
        wrapped."""
        module_baseline.check_parameters_unchanged(self._updated_walk(self.require_wrapped()[0].module), self._origin)

    def check_parameters_covered(self) -> None:
        """Raise ``UserError`` if a registered optimizer has a parameter that is neither in the wrapped model nor, by address, in
        the ``state_dict()`` of a registered object."""
        names, held = (
            self._parameter_names(),
            {p for item in self.stateful.values() for p in tensor_addresses(item.state_dict())},
        )
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
        """Return this rank's state as views of live tensors; ``Snapshot.until`` says how long each stays unchanged. From
        ``on_evaluation_begin`` until ``on_step_begin``, part of the state is the copy made when the evaluation began. The first
        call after a step may be a collective, so all ranks must make it. Raises ``HookStateError``, ``StateError`` or
        ``UserError`` for state that cannot be stored, ``UserError`` for changed parameters (``check_parameters_unchanged``), and
        ``RuntimeError`` inside a backward pass."""
        ddp, hook = self.require_wrapped()
        hook_tensors, hook_data = hook.capture(copy=False)  # first, since no rank may fail before this collective
        out = Snapshot()
        with self._generators.fork() as generators:  # undoes what a state_dict() draws
            walk = self._updated_walk(ddp.module)
            module_baseline.check_parameters_unchanged(walk, self._origin)
            form = self._equal_state.capture(out, walk, self.optimizers, hook.replicas == "equal")
            buffers = {name: buffer.detach() for name, buffer in walk.named_buffers()}
            out.add_encoded("buffers", buffers, sorted(buffers))
            out.add_with(module_extras.COMPONENT, lambda: self._modules.capture_encoded(walk, self._origin))
            # does the next forward pass begin with rank 0's buffers?
            out.add(_DDP, {"buffers_next": ddp.require_forward_param_sync})
            out.state[model.COMPONENT] = model.capture(walk, form)
            own = self._before_evaluation or self._capture_own()
            out.private |= own.private
            out.state |= own.state
            if self.data is not None:
                out.add("data", self.data.state_dict())
                if states := data_generators.for_data(self.data).states():
                    out.add(_GENERATORS, states)
        out.add_encoded("hook", hook_tensors, hook_data)
        if hook_tensors:
            out.until = {**out.until, **{f"hook/{name}": Until.BACKWARD for name in hook_tensors}}
        out.add_with("rng", lambda: self._generators.encode(generators))
        return out

    def _capture_own(self) -> Snapshot:
        """Return the state of registered objects other than optimizers and data, and the state outside of ``state_dict``."""
        out = Snapshot()
        for component, item in self.stateful.items():
            out.add(component, _state_of(item))
        self._add_hidden(out)
        return out

    def on_evaluation_begin(self) -> None:
        """Copy the state that ``_capture_own`` returns, since an evaluation may change it. Does nothing if there is a copy
        already. Saves until ``on_step_begin`` contain the copy, because a job that resumes from them evaluates again."""
        if self._before_evaluation is None:
            with rng.fork_rng(self._device):
                own = self._capture_own()
            own.private = {name: tensor.detach().clone() for name, tensor in own.private.items()}
            self._before_evaluation = own

    def on_step_begin(self) -> None:
        """Drop the copy of ``on_evaluation_begin``: later saves contain the current state."""
        self._before_evaluation = None

    def require_storable(self) -> None:
        """Raise ``UserError`` if a save could not store parameters, buffers, registered objects or, under ``strict``, a change
        outside of ``state_dict``. Calls ``state_dict()`` of the objects."""
        out = self.capture_step_tensors()
        buffers = ((f"buffers/{name}", buffer) for name, buffer in self.require_wrapped()[0].module.named_buffers())
        for name, tensor in (*out.shared.items(), *out.private.items(), *buffers):
            if tensor.dtype not in DTYPE_NAMES:
                raise UserError(
                    f"{name}: {tensor.dtype} cannot be stored; for complex numbers use complex64, or torch.view_as_real",
                    code="state-unsaved",
                )
        with rng.fork_rng(self._device), data_generators.for_data(self.data).preserved():
            for component, item in self.stateful.items():
                out.add(component, _state_of(item))
            if self.data is not None:
                out.add("data", self.data.state_dict())
            self._add_hidden(out)

    def begin(self) -> None:
        """Record the beginning of training. Call it when everything is registered, before the first step."""
        self.start = replica_divergence.record_start(self.require_wrapped()[0].module)
        self.hidden.begin(self._roots())

    def note_built(self, *, undo: bool) -> None:
        """Note the registered objects as the script has built them; later changes are found by comparison. Call it before hooks
        of the script run. ``undo``: also copy contents, so that changes before ``begin`` can be undone."""
        self.hidden.note_built(self._roots(), undo=undo)

    def _roots(self) -> Roots:
        """Return the roots of the object walk: everything registered, by region. Calls ``state_dict()`` of registered objects."""
        ddp, _ = self.require_wrapped()
        data, generators = self.data, data_generators.for_data(self.data)
        own = {
            "model": ddp.module,
            **self.optimizers,
            **self.plain,
            **({"task": self.task} if self.task is not None else {}),
        }
        stateful = {c: _unwrap(item) for c, item in self.stateful.items()}
        with rng.fork_rng(self._device):
            parts = state_dict_names.stateful_parts(self.stateful)
            spoken = {path: state_dict_names.covered_attributes(item) for path, item in parts.items()}
        own |= parts | state_dict_names.buffer_tables(self.stateful)
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
        """Add the changes outside of ``state_dict`` to ``out``. Under ``strict``, raises ``UserError`` if one cannot be
        stored."""
        changes = self.hidden.changes()
        if changes.unsaved and self._strict:
            raise UserError(f"determinism is strict, and {_describe_unsaved(changes.unsaved)}", code="state-unsaved")
        told = {"unsaved": changes.unsaved, "ignored": self.hidden.ignored, "unmatched": self.hidden.unmatched}
        out.add(_HIDDEN, {"stored": changes.stored, "made": changes.made_before_begin, **told})

    def _updated_walk(self, module: nn.Module) -> Walk:
        """Return a walk of ``module`` as it is now. This is the previous walk if the module is known to have the same parts,
        parameters and buffers."""
        self._walk = (self._walk or Walk(module)).updated()
        return self._walk

    def capture_step_tensors(self) -> Snapshot:
        """Return only the parameters, and the optimizers' state, as views of live tensors. Not a collective."""
        out = Snapshot()
        ddp, hook = self.require_wrapped()
        self._equal_state.capture(out, self._updated_walk(ddp.module), self.optimizers, hook.replicas == "equal")
        return out

    def step_tensors_and_size(self) -> tuple[Snapshot, int]:
        """Return ``capture_step_tensors()``, and an estimate of the bytes of this rank's other state: buffers, and the hook's
        residuals."""
        ddp, hook = self.require_wrapped()
        parameters = sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad)
        residuals = isinstance(hook.spec, PowerSGDSpec | BatchedPowerSGDSpec) and hook.spec.use_error_feedback
        buffers = sum(b.nbytes for b in ddp.module.buffers())
        return self.capture_step_tensors(), buffers + int(residuals) * parameters * 5 // 4 + (1 << 20)

    def shared_digests(self, parts: int, threads: int) -> list[str]:
        """Divide the tensors that are equal on all ranks into parts, as a checkpoint made now would, and return one digest per
        part."""
        out = self.capture_step_tensors()
        plan = replica_digests.plan_parts(out.sizes(), parts) if out.shared else []

        def of(slices: Sequence[Slice]) -> str:
            return part_digest(replica_digests.slice_digests(slices, out.shared))

        return parallel_map(plan, lambda _: of, threads if self._device.type == "cpu" else 1)

    # --- restore -------------------------------------------------------------------------------------------------------

    def restore(self, saved: Snapshot, transfer: StateTransfer) -> list[ComponentReport]:
        """Restore ``saved``, which the same rank of a group of the same size has saved; return the reports on the components.
        Raises ``UserError`` if an object rejects its state, ``StateError`` if ``saved`` lacks a part."""
        reports = self._restore_common(saved, "exact", None, transfer)
        if self.data is not None and "data" in saved.state:
            states = saved.value(_GENERATORS) if _GENERATORS in saved.state else {}
            reports.append(self._restore_data(lambda data: data.load_state_dict(saved.value("data")), states))
        reports.append(self._restore_hook([saved.encoded("hook")], transfer, resized=False))
        reports.append(self._load_component("rng", lambda: rng.restore(saved.value("rng"), self._device)))
        return reports

    def restore_resized(
        self, own: Snapshot, old: Sequence[Snapshot], seed: int, transfer: StateTransfer
    ) -> list[ComponentReport]:
        """Restore, as far as possible, the state that a group of ``len(old)`` ranks has saved; return the reports. ``own``: the
        state of the old rank whose private state this rank takes. ``old``: states of all old ranks, of which only data and hook
        are used. The process-wide generators (torch, numpy, ``random``) are seeded from ``seed`` and the rank; no other generator
        is seeded. Raises as ``restore``."""
        reason = f"the group had {pluralize(len(old), 'rank')}; this is the state of one of them"
        reports = self._restore_common(own, "redistributed", reason, transfer)
        if self.data is not None and "data" in own.state:
            reports.append(self._resize_data([s.value("data") for s in old], len(old)))
        reports.append(self._restore_hook([s.encoded("hook") for s in old], transfer, resized=True))
        rng.seed_all(seed, self.rank)
        reports.append(self._report("rng", "reset", "the number of ranks changed; seeded again"))
        return reports

    def _restore_common(
        self, saved: Snapshot, status: ComponentStatus, reason: str | None, transfer: StateTransfer
    ) -> list[ComponentReport]:
        """Restore everything except data, hook and process-wide generators; return the reports. ``status`` and ``reason`` replace
        those of an ``exact`` report if each rank has its own state of the component."""
        ddp = self.require_wrapped()[0]
        module = ddp.module
        if _DDP in saved.state:  # older checkpoints have none
            ddp.require_forward_param_sync = saved.value(_DDP)["buffers_next"]
        reports = [self._load_component(MODEL, lambda: model.restore_parameters(module, saved))]
        equal, names = {**saved.shared, **saved.private}, self._parameter_names()
        replicas = set(model.model_parameters(saved.private))
        private = [self._load_component("buffers", lambda: model.restore_buffers(module, saved, transfer.relayout))]
        for component, optimizer in self.optimizers.items():
            if component in saved.state:
                rest = saved.value(component, exclude=replicas)
                load = partial(optimizer_state.restore, optimizer, component, names, equal, rest)
                reports.append(self._load_component(component, load))
        for component, item in self.stateful.items():
            if component in saved.state:
                private.append(self._load_component(component, partial(_load, item, saved.value(component))))
        private += self._restore_hidden(saved)
        reports += [
            r.model_copy(update={"status": status, "reason": reason}) if r.status == "exact" else r for r in private
        ]
        reports = [self._adapt_to_averaging(r, transfer) for r in reports]
        return reports + self._report_unsaved(saved) + self._report_absent(saved)

    def _restore_hidden(self, saved: Snapshot) -> list[ComponentReport]:
        """Restore the state outside of ``state_dict``; return a list with a report, empty if there is nothing to report."""
        if _HIDDEN not in saved.state:
            return []
        tensors, data = saved.encoded(_HIDDEN)
        found: Any = decode(tensors, data, device=self._device)
        left: dict[str, str] = {}
        reports = [
            self._load_component(_HIDDEN, lambda: left.update(self.hidden.restore(found["stored"], found["made"])))
        ]
        if left:
            text = "; ".join(f"{path}: {why}" for path, why in sorted(left.items())[:5])
            return [self._report(_HIDDEN, "not-exact", f"{text}. {_advice(min(left))}")]
        return reports if found["stored"] else []

    def _adapt_to_averaging(self, report: ComponentReport, transfer: StateTransfer) -> ComponentReport:
        """Return ``report``. Its status or reason is changed if ``transfer`` says that the component was averaged, or kept per
        rank."""
        component = report.component
        if component in transfer.averaged:
            return self._report(component, "redistributed", transfer.averaged[component])
        if component not in transfer.kept_per_rank:
            return report
        why = transfer.kept_per_rank[component]
        if report.status == "exact":
            return self._report(component, "not-exact", why)
        return self._report(component, report.status, f"{report.reason}; {why}")

    def _report_unsaved(self, saved: Snapshot) -> list[ComponentReport]:
        """Return reports about what training changed and the checkpoint does not have. Sets ``unmatched_ignores``."""
        modules, reasons = saved.value("modules"), []
        if names := modules.get("parted", []):
            reasons.append(
                f"buffer {', '.join(names[:5])} was moved into another tensor's memory in training, and is restored in its own: "
                "a write to one no longer changes the other"
            )
        reports = [self._report("modules", "not-exact", "; ".join(reasons))] if reasons else []
        hidden = saved.value(_HIDDEN) if _HIDDEN in saved.state else {}
        self.unmatched_ignores = frozenset(hidden.get("unmatched", ()))
        if names := hidden.get("unsaved"):
            reports.append(self._report(_HIDDEN, "not-exact", _describe_unsaved(names)))
        return reports

    def _report_absent(self, saved: Snapshot) -> list[ComponentReport]:
        """Return a report of status ``absent`` for each component that only the checkpoint or only this rank has. Objects saved
        by their attributes or items are left out."""
        here = {*self.optimizers, *self.stateful, *(["data"] if self.data is not None else [])}
        there = set(saved.state) - _BUILT_IN_COMPONENTS
        lost = [
            self._report(c, "absent", "recorded, but nothing of that name is registered") for c in sorted(there - here)
        ]
        new = [
            self._report(c, "absent", "the checkpoint has none; it keeps its initial state")
            for c in sorted(here - there)
        ]
        return lost + new

    def _restore_hook(self, states: Sequence[HookState], transfer: StateTransfer, *, resized: bool) -> ComponentReport:
        """Restore the hook from ``states``, one per old rank if ``resized``, else this rank's alone; return the report."""
        ddp, hook = self.require_wrapped()
        told: list[tuple[ComponentStatus, str | None]] = []
        self._load_component("hook", lambda: told.append(restore_hook(ddp, hook, states, transfer, resized=resized)))
        return self._report("hook", *told[0])

    def _restore_data(
        self, load: Callable[[TrainData], None], generators: dict[str, Any] | None = None
    ) -> ComponentReport:
        """Restore the position in the data by ``load``, and return the report. ``generators``: states of the generators that the
        data hold; they are restored only if the data are exact. The report is ``not-exact`` if position or generators could not
        be restored exactly."""
        assert self.data is not None
        data: TrainData = self.data
        lost: list[str] = []
        self._load_component("data", lambda: load(data))
        if data.exact and generators is not None:
            self._load_component("data", lambda: lost.extend(data_generators.for_data(data).load(generators)))
        if (reach := getattr(data, "reach", None)) is not None:
            self._load_component("data", reach)
        if not data.exact:
            lost = [str(getattr(data, "inexact_reason", None) or "the data cannot report their position"), *lost]
        return self._report("data", "not-exact" if lost else "exact", "; ".join(lost) or None)

    def _resize_data(self, states: list[Any], ranks: int) -> ComponentReport:
        """Continue the data after a change of the number of ranks; return the report. ``states``: the data's states on all old
        ranks. Data without ``load_resized`` are reported as reset. A loader (``SamplerPosition``, ``StreamPosition``) then begins
        its epoch again; other data begin at their initial position."""
        assert self.data is not None
        load: Any = getattr(self.data, "load_resized", None)
        if load is None:
            why = f"the group had {pluralize(ranks, 'rank')} and the data have no load_resized"
            if isinstance(self.data, SamplerPosition | StreamPosition):
                if not isinstance(states[0].get("epoch"), int):
                    self._load_component("data", partial(self.data.check_kind, states[0]))
                taken = self.data.restart_epoch(states[0])
                twice = ", so that its batches up to there are trained on twice" if taken else ""
                why += f"; epoch {self.data.epoch} begins again{twice}"
            return self._report("data", "reset", why)
        report = self._restore_data(lambda _: load(states))
        size = describe_batch_change(states[0], self.data.state_dict())
        reason = f"continued after the samples that {pluralize(ranks, 'rank')} had used" + (f"; {size}" if size else "")
        if own := sorted(data_generators.for_data(self.data).find()):
            reason += f"; {', '.join(own)}: its own generator starts again"
        return report if report.status == "not-exact" else self._report("data", "redistributed", reason)

    def _load_component(self, component: str, load: Callable[[], Any]) -> ComponentReport:
        """Run ``load``, and return a report of status ``exact``. Raises ``UserError`` if the object does not accept the recorded
        state."""
        try:
            load()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the device's fault: another attempt may succeed
            raise
        except (StateError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise UserError(
                f"{component} of rank {self.rank} cannot load the state of the checkpoint: {error}. Resume with the code, the "
                "spec and the arguments that made it. To continue from an earlier checkpoint fork the job; without a service "
                "move the later ones away",
                code="state-mismatch",
            ) from error
        return self._report(component, "exact", None)

    def _report(self, component: str, status: ComponentStatus, reason: str | None) -> ComponentReport:
        return ComponentReport(component=component, rank=self.rank, status=status, reason=reason)

    def group_components(self) -> list[str]:
        """Return the names of registered schedulers and gradient scalers, by class or by the name ``scheduler`` or ``scaler``.
        These control all ranks alike."""
        kinds = (torch.amp.GradScaler, LRScheduler)
        return [c for c, item in self.stateful.items() if c in ("scaler", "scheduler") or isinstance(item, kinds)]

    def user_components(self) -> list[str]:
        """Return the names of registered objects with a ``state_dict`` but for optimizers, data, generators and
        ``group_components``."""
        group = self.group_components()
        return [c for c, item in self.stateful.items() if c not in group and not isinstance(item, rng.GeneratorState)]

    def control_states(self) -> dict[str, Any]:
        """Return, by component, copies of the states of schedulers and gradient scalers, and of the optimizers'
        hyperparameters."""
        return {
            **{component: copy.deepcopy(_state_of(self.stateful[component])) for component in self.group_components()},
            **{
                component: copy.deepcopy(_hyperparameters(optimizer))
                for component, optimizer in self.optimizers.items()
            },
        }

    def restore_control_states(self, states: Mapping[str, Any]) -> None:
        """Restore ``states``, the result of ``control_states``."""
        for component in self.group_components():
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
        """The registered optimizers, and registered objects with ``param_groups`` like one."""
        around = [i.item for i in self.stateful.values() if isinstance(i, optimizer_state.AroundOptimizer)]
        return [*self.optimizers.values(), *around]

    # --- what belongs to what ------------------------------------------------------------------------------------------

    def require_wrapped(self) -> tuple[ManagedDDP, ManagedHook]:
        """Return the wrapped model and its hook. Raises ``UserError`` if no model was wrapped."""
        if self.ddp is None or self.hook is None:
            raise UserError(
                "there is no model: wrap() it before the first step, so that DDP and its hook can be managed"
            )
        return self.ddp, self.hook

    def _parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter of the wrapped model, by ``id``."""
        return {id(p): name for name, p in self.require_wrapped()[0].module.named_parameters()}


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group: everything except its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _state_of(item: Stateful) -> Any:
    """Return the ``state_dict`` of ``item``; for a scheduler, without the functions that it calls."""
    state = item.state_dict()
    return _without_functions(state) if isinstance(item, LRScheduler) else state


def _load(item: Stateful, state: Any) -> None:
    """Restore ``state``, the result of ``_state_of``, in ``item``. A scheduler keeps its own functions."""
    item.load_state_dict(_with_functions(state, item.state_dict()) if isinstance(item, LRScheduler) else state)


def _without_functions(state: Any) -> Any:
    """Return ``state`` without the functions that are values of dicts in it, at any depth of dicts and lists."""
    if type(state) is list:
        return [_without_functions(one) for one in state]
    if type(state) is not dict:
        return state
    return {
        key: _without_functions(one) for key, one in state.items() if not isinstance(one, state_dict_names.FUNCTIONS)
    }


def _with_functions(state: Any, live: Any) -> Any:
    """Return ``state``, with the functions of ``live`` put back into the same places of its dicts."""
    if type(state) is type(live) is list and len(state) == len(live):
        return [_with_functions(*pair) for pair in zip(state, live, strict=True)]
    if not type(state) is type(live) is dict:
        return state
    functions = {key: one for key, one in live.items() if isinstance(one, state_dict_names.FUNCTIONS)}
    return {key: _with_functions(one, live.get(key)) for key, one in state.items()} | functions


def _functions_of(schedulers: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by path, the functions that ``schedulers``, and schedulers in them, hold as attributes or in lists."""
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
    """True for a dict, a list, and an object of a user's class without ``state_dict`` and ``__iter__`` that is not a generator:
    their items or attributes are saved."""
    kind: type = type(item)
    if hasattr(item, "state_dict") or rng.is_generator(item):
        return False
    return kind in (dict, list) or (
        is_user_class(kind) and not hasattr(item, "__iter__")
    )  # excludes a loader of the user's


def _unwrap(item: Stateful) -> Any:
    """Return the object that the script has registered, without Ratchet's wrapper around it."""
    if isinstance(item, optimizer_state.AroundOptimizer):
        return item.item
    return item.generator if isinstance(item, rng.GeneratorState) else item


def _as_stateful(component: str, item: Any) -> Stateful:
    """Return ``item``, or a wrapper of it, with ``state_dict`` and ``load_state_dict``. Raises ``UserError`` for an object that
    cannot be restored."""
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        if isinstance(getattr(item, "param_groups", None), list) and hasattr(item, "__dict__"):
            return optimizer_state.AroundOptimizer(item)
        found: Stateful = item
        return found
    if rng.is_generator(item):
        return rng.GeneratorState(item)
    raise UserError(
        f"{component} of type {type(item).__name__} has no state_dict and load_state_dict, so it cannot be restored; add them "
        "(tensors, numbers, strings, lists, dicts), give it as a dict, or do not register it"
    )
