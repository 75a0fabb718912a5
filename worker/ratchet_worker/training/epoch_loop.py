"""Ordinary loops under a Session: ``for epoch in session.epochs(n): for batch in loader: ...``, one step per batch. Requesting a
further batch ends the open step. The step of an epoch's last batch stays open until the next epoch is requested, or
``checkpoint()`` ends it, so that an evaluation after the loop over batches belongs to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from ratchet_contract.errors import UserError
from ratchet_contract.phases import NoteType
from ratchet_worker.checkpoint.rank_state import is_plain
from ratchet_worker.data import enumerate_position, sampler_position
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.state import rng

if TYPE_CHECKING:
    from ratchet_worker.training.runtime import Runtime


class EpochLoop:
    """One rank's loop over epochs and batches. ``epoch``: the epoch that ``epochs`` has yielded last; None before the first and
    after the last."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.epoch: int | None = None
        self.start = 0  # number of the first batch of the epoch's pass
        self.all_done = False  # all epochs are done
        self.loader: Any = None  # the script's DataLoader
        self._data: SamplerPosition | StreamPosition | None = None
        self._make_pass: Callable[[EpochLoop], Pass] = Pass
        # The first pass over the loader in this epoch. A weak reference: when a loop is left, its pass is freed.
        self._pass: ref[Pass] | None = None
        self._values_to_reapply: tuple[dict[str, Any], dict[str, Any]] | None = (
            None  # generators, and the steering state
        )
        self._examined = set[tuple[CodeType, int] | None]()  # places of loops over the loader that were examined
        self._epochs_called = False  # ``epochs`` was called
        self._iteration_at_pass_end: int | None = None  # the hook's iteration count when the epoch's pass was over
        self._reported_outside = False

    # --- before the first step -----------------------------------------------------------------------------------------

    def prepare(self, objects: tuple[Any, ...]) -> list[Any]:
        """Wrap or register each of ``objects``; return the objects to use in their place. Raises ``UserError`` if that is not
        possible."""
        if self.runtime.restored:
            raise UserError("call prepare before the first step: the state has already been restored")
        return [self._prepare_one(item) for item in objects]

    def keep(self, kept: SimpleNamespace) -> SimpleNamespace:
        """Register ``kept``, whose attributes are variables that the loop carries, and return it. Raises ``UserError`` once the
        state is restored."""
        if self.runtime.restored:
            raise UserError("call keep before the first step: the state has already been restored")
        self.runtime.state.register(self._name("user:kept"), kept)
        return kept

    def _prepare_one(self, item: Any) -> Any:
        state = self.runtime.state
        if isinstance(item, DataLoader):
            self.train_on(item)
            return PreparedLoader(self, item)
        if isinstance(item, Optimizer):
            state.register(self._name("optimizer"), item)
        elif isinstance(item, LRScheduler):
            state.register(self._name("scheduler"), item)
        elif isinstance(item, torch.amp.GradScaler):
            state.register(self._name("scaler"), item)
        elif isinstance(item, nn.parallel.DistributedDataParallel):
            raise UserError(
                "prepare wraps the model in DDP, with the job's hook: pass the module without DDP. Arguments of DDP "
                "(find_unused_parameters, bucket_cap_mb) belong in `ddp` of the spec, or in Session(ddp={...})"
            )
        elif _is_trained(item):
            return self.runtime.wrap(item)
        elif hasattr(item, "state_dict") or rng.is_generator(item):
            if isinstance(item, nn.Module):
                item.to(self.runtime.device)
            state.register(self._name(f"user:{type(item).__name__.lower()}"), item)
        elif is_plain(item):
            state.register(self._name(f"user:{type(item).__name__.lower()}"), item)
        else:
            raise UserError(
                "prepare takes models, optimizers, schedulers, scalers, one training DataLoader, objects with state_dict and "
                f"load_state_dict, and dicts, lists and objects of your own; a {type(item).__name__} is none of these. Data that "
                "are no DataLoader: "
                "session.register(data=TrainStream(...)) and session.steps(...)"
            )
        return item

    def _name(self, kind: str) -> str:
        """Return a free name under which an object of ``kind`` is registered, such as ``user:optimizer_2``."""
        state = self.runtime.state
        taken = {*state.optimizers, *state.stateful, *state.plain}
        if kind not in taken:
            return kind
        name = kind.removeprefix("user:")
        return next(f"user:{name}_{n}" for n in range(2, len(taken) + 3) if f"user:{name}_{n}" not in taken)

    def train_on(self, loader: Any, make_pass: Callable[[EpochLoop], Pass] | None = None) -> None:
        """Make ``loader`` the training's DataLoader, whose batches are the steps. ``make_pass``: makes passes that load one batch
        ahead. Raises ``UserError`` for a second loader."""
        if self._data is not None:
            raise UserError(
                "prepare takes one training DataLoader, whose batches are the job's steps. Loaders of an evaluation stay as they "
                "are. Two for training: put both data sets into one, or use session.register(data=...) and session.steps(...)"
            )
        self.loader, self._make_pass = loader, make_pass or Pass
        ahead = make_pass is not None
        self._data = (
            SamplerPosition(loader, ahead=ahead) if sampler_position.is_supported(loader) else StreamPosition(loader)
        )
        self.runtime.state.register("data", self._data)

    # --- epochs --------------------------------------------------------------------------------------------------------

    def epochs(self, total: int, restore: Callable[[int | None], None]) -> Iterator[int]:
        """Yield the numbers of the epochs to do, then finish the job. ``restore``: called with the number of steps, if known,
        unless the state is restored. Raises ``UserError`` for wrong use, and the step boundary's errors."""
        runtime, data = self.runtime, self._data
        if data is None:
            raise UserError(
                "epochs() iterates over the loader passed to session.prepare(..., loader): prepare it first"
            )
        if total < 1:
            raise UserError(f"epochs must be at least 1, not {total}")
        length = data.steps_per_epoch
        steps = None if length is None else total * length
        runtime.check_loop_variables(inspect.currentframe())
        if not runtime.restored:
            restore(steps)
        runtime.check_not_ended()
        if self._epochs_called:
            raise UserError(
                "epochs() was called before: all epochs belong in one loop, and a loop within one uses range(...). Phases of a "
                "training are `if epoch < 5` in its body"
            )
        self._epochs_called, runtime.by_epochs = True, True
        runtime.set_total(steps)
        if runtime.done:
            runtime.mark_nothing_left()
            return
        if not data.position:
            self._reapply_restored()
        idle = data.epoch >= total
        for epoch in range(data.epoch, total):
            self.epoch, self.start, self._pass = epoch, data.position, None
            if not self.start:  # code before the first batch belongs to its step: a save here is before both
                runtime.end_step()
                runtime.begin_step()
            sampler_position.set_epoch(self.loader, epoch)
            self._iteration_at_pass_end = self._iteration
            yield epoch
            if self._pass is None and runtime.gradients_reduced:
                raise UserError(
                    f"epoch {epoch} trained without a batch of the prepared loader: iterate over that one, or pass "
                    "prepare the loader that the training uses"
                )
            self._report_outside(epoch)
            self._end_pass()
        self.epoch, self.all_done = None, True
        runtime.finish()  # also after checkpoint() has ended the last step
        if idle:
            runtime.mark_nothing_left()

    def on_state_restored(self) -> None:
        """Keep the restored states of process-wide generators, schedulers, scalers and hyperparameters, to put them back at the
        restored position."""
        # Up to that position the script's code repeats draws and scheduler steps that the checkpoint contains already.
        if self._data is not None and self.runtime.chosen.manifest is not None:
            self._values_to_reapply = rng.capture(self.runtime.device), self.runtime.state.control_states()

    def iterate(self) -> Iterator[Any]:
        """Return a new pass over the loader. Raises ``UserError`` before the first epoch, where batches would not be steps."""
        if self.epoch is None and not (self.all_done or self.runtime.finished or self.runtime.done):
            raise UserError(
                "the prepared loader is iterated outside of an epoch: write `for epoch in session.epochs(n):` around it. To "
                "inspect the data before the training use the DataLoader itself"
            )
        return self._make_pass(self)

    def is_training(self, current: Pass) -> bool:
        """True if ``current`` is this epoch's first pass, whose batches are the steps. The epoch's first call makes ``current``
        that pass."""
        if self._pass is None and self.epoch is not None:
            self._pass, self._iteration_at_pass_end = ref(current), None
        training = self._pass is not None and self._pass() is current
        if not training and self._iteration_at_pass_end is None:
            self._iteration_at_pass_end = self._iteration
        return training

    @property
    def _iteration(self) -> int:
        return self.runtime.state.require_wrapped()[1].iteration

    def _report_outside(self, epoch: int) -> None:
        """Report, once, that two or more backward passes followed the end of this epoch's first pass over the loader."""
        count = 0 if self._iteration_at_pass_end is None else self._iteration - self._iteration_at_pass_end
        if count < 2 or self._reported_outside:
            return
        # All of them belong to one step.
        self._reported_outside = True
        if self.runtime.rank == 0:
            self.runtime.reporter.note(
                NoteType.TRAINED_OUTSIDE_THE_LOADER,
                f"{count} backward passes of epoch {epoch} were outside of the first pass over the prepared loader, so they are "
                "one step: no checkpoint and no stop comes between them. The steps are the batches of the epoch's first `for "
                "batch in loader`: not of a second one, of next(iter(loader)), or of a list of the batches. For an "
                "evaluation before it use the DataLoader itself",
            )

    def next_batch(self, current: Pass) -> Any:
        """Return the next batch of ``current``, in a step of its own. Raises ``StopIteration`` at the epoch's end, ``UserError``
        for an epoch without a batch, and the step boundary's errors."""
        runtime, data = self.runtime, self._data
        assert data is not None and self.epoch is not None
        if not current.begun:
            current.on_begin()
        if current.begun or self.start:
            self._reapply_restored()
            with runtime.loading_ahead():
                has_more = not current.ended and data.has_more()
            if not has_more:
                if not current.ended:
                    self._end_pass()
                    current.on_end()
                    self._iteration_at_pass_end = self._iteration
                raise StopIteration
            runtime.end_step()
            runtime.begin_step()
        else:
            data.begin(self.epoch)
            if not data.has_more():
                raise UserError("the data gave no batch in a whole epoch: fewer samples than one batch needs?")
        if not current.begun:
            current.begun = True
            self._continue_numbers(current)
        batch = current.transform(data.take(), data.has_more)
        runtime.count_batch()
        return batch

    def _reapply_restored(self) -> None:
        """Put back the states that ``on_state_restored`` has kept, once."""
        if self._values_to_reapply is not None:
            generators, steering = self._values_to_reapply
            self.runtime.state.restore_control_states(steering)
            rng.restore(generators, self.runtime.device)
            self._values_to_reapply = None

    def on_checkpoint(self) -> None:
        """Before a save that the script requests: end the epoch if the script has left its pass by ``break``."""
        if self._pass is not None and self._pass() is None:
            self._end_pass()

    def _end_pass(self) -> None:
        """End the training's pass: the position in the data is then the beginning of the next epoch."""
        assert self._data is not None
        if self._pass is not None and (one := self._pass()) is not None:
            one.ended = True
        if self._data.epoch == self.epoch:
            self._data.end()

    # --- enumerate -----------------------------------------------------------------------------------------------------

    def enumerate_batches(self, batches: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, batch) for ``batches``. Numbers begin at ``start``; after a resume within an epoch, the training's pass
        continues them."""
        before = self._pass
        for batch in batches:
            yield start + (self.start if self._pass is not before else 0), batch
            start += 1

    def _continue_numbers(self, current: Pass) -> None:
        """Make ``enumerate`` around the loader continue its numbers after a resume, and report what its loop would lose. May
        raise ``UserError``."""
        for reader in enumerate_position.enumerate_readers(current) if self.start else ():
            current.placeholders = True
            enumerate_position.advance(reader, self.start)
            current.placeholders = False
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        place = None if frame is None else (frame.f_code, frame.f_lasti)
        # Each place only once: it takes a walk over all objects.
        if place in self._examined:
            return
        self._examined.add(place)
        self.runtime.check_loop_variables(frame, within_epoch=True)
        if (what := enumerate_position.find_restarted(current, frame)) is not None:
            self._report_renumbered(what)

    def _report_renumbered(self, what: str) -> None:
        runtime, data = self.runtime, self._data
        assert data is not None
        if runtime.launch.spec.determinism == "strict":
            raise UserError(f"determinism is strict, and {what}", code="state-unsaved")
        data.numbering_problem = what
        if runtime.rank == 0:
            runtime.reporter.note(NoteType.BATCHES_RENUMBERED, what)


def _is_trained(item: Any) -> bool:
    module = isinstance(item, nn.Module) and not isinstance(item, AveragedModel)
    return module and any(p.requires_grad for p in item.parameters())


class PreparedLoader:
    """The training ``DataLoader`` as ``Session.prepare`` returns it: its iteration marks the job's steps."""

    def __init__(self, loop: EpochLoop, loader: Any) -> None:
        self._loop, self._loader = loop, loader

    @property
    def start(self) -> int:
        """Number of the first batch of this epoch's pass: 0, except after a resume within the epoch."""
        return self._loop.start

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._loop.iterate()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)


class Pass:
    """One pass over the training's loader, which integration packages extend. The batches of an epoch's first pass are the
    steps."""

    def __init__(self, loop: EpochLoop) -> None:
        self.loop = loop
        self.begun = self.ended = self.placeholders = False
        self._plain: Iterator[Any] | None = None  # the iterator of a pass that marks no steps

    def on_begin(self) -> None:
        """Called before the training's pass yields its first batch, also if the pass continues within an epoch. Does nothing
        here."""

    def transform(self, batch: Any, more: Callable[[], bool]) -> Any:
        """Return what the training receives for ``batch``: the batch itself here. ``more`` returns True if another batch
        follows."""
        return batch

    def on_end(self) -> None:
        """Called when the training has requested a batch after the last one. Does nothing here."""

    def plain_iterator(self) -> Iterator[Any]:
        """Return the iterator over the plain loader, for a pass that is not the training's."""
        return iter(self.loop.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.placeholders:
            return None
        if self._plain is None and not self.loop.is_training(self):
            self._plain = self.plain_iterator()
        return next(self._plain) if self._plain is not None else self.loop.next_batch(self)
