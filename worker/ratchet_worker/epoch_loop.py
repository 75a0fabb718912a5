"""Ordinary loops under a Session: ``for epoch in session.epochs(n): for batch in loader: ...``, a step for each batch.

``session.prepare`` gives back what a script has made, in the same order: the model in DDP under the job's hook, everything with
state registered, and the training ``DataLoader`` as one whose iteration marks the steps. Asking for the next batch ends the open
step and begins another. The step of an epoch's last batch stays open until the next epoch is asked for: an evaluation,
``scheduler.step()`` and whatever else stands behind the loop over batches belongs to it; what stands before that loop belongs to
the step of the epoch's first batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from ratchet_contract.errors import UserError
from ratchet_worker import rng
from ratchet_worker.data import enumerated, sampler_position
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.job_state import is_plain

if TYPE_CHECKING:
    from ratchet_worker.runtime import Runtime


class EpochLoop:
    """One per rank. ``epoch``: the one that ``epochs`` has given out, None outside of them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.epoch: int | None = None
        self.start = 0  # number of the first batch of the epoch's pass
        self.over = False  # all epochs are done
        self.loader: Any = None  # the DataLoader itself
        self._data: SamplerPosition | StreamPosition | None = None
        self._passes: Callable[[EpochLoop], Pass] = Pass
        # The first one over the loader in this epoch. A loop that is left lets go of it.
        self._pass: ref[Pass] | None = None
        self._restored: tuple[dict[str, Any], dict[str, Any]] | None = None  # generators, and what steers
        self._looked = set[tuple[CodeType, int] | None]()  # at loops over the loader
        self._asked = False  # for epochs
        self._left: int | None = None  # iterations of the hook when the epoch's pass was over
        self._told_outside = False

    # --- before the first step -----------------------------------------------------------------------------------------

    def prepare(self, objects: tuple[Any, ...]) -> list[Any]:
        """See ``Session.prepare``."""
        if self.runtime.restored:
            raise UserError("prepare before the first step: the state has been put back already")
        return [self._prepared(item) for item in objects]

    def _prepared(self, item: Any) -> Any:
        state = self.runtime.state
        if isinstance(item, DataLoader):
            self.train_on(item)
            return PreparedLoader(self, item)
        if isinstance(item, Optimizer):
            state.register(self._name("optimizer", state.optimizers), item)
        elif isinstance(item, LRScheduler):
            state.register(self._name("scheduler", state.stateful), item)
        elif isinstance(item, torch.amp.GradScaler):
            state.register(self._name("scaler", state.stateful), item)
        elif isinstance(item, nn.parallel.DistributedDataParallel):
            raise UserError(
                "prepare puts the model into DDP, under the job's hook: give it the module without DDP. What DDP was given "
                "(find_unused_parameters, bucket_cap_mb) goes to `ddp` of the spec, or to Session(ddp={...})"
            )
        elif _is_trained(item):
            return self.runtime.wrap(item)
        elif hasattr(item, "state_dict") or rng.is_generator(item):
            if isinstance(item, nn.Module):
                item.to(self.runtime.device)
            state.register(self._name(f"user:{type(item).__name__.lower()}", state.stateful), item)
        elif is_plain(item):
            state.register(self._name(f"user:{type(item).__name__.lower()}", state.plain), item)
        else:
            raise UserError(
                "prepare takes models, optimizers, schedulers, scalers, one training DataLoader, what has state_dict and "
                f"load_state_dict, and dicts, lists and objects of your own; a {type(item).__name__} is none of these. Data that "
                "are no DataLoader: "
                "session.register(data=TrainStream(...)) and session.steps(...)"
            )
        return item

    @staticmethod
    def _name(kind: str, taken: Any) -> str:
        """The second ``optimizer`` is ``user:optimizer_2``."""
        if kind not in taken:
            return kind
        name = kind.removeprefix("user:")
        return next(f"user:{name}_{n}" for n in range(2, len(taken) + 3) if f"user:{name}_{n}" not in taken)

    def train_on(self, loader: Any, passes: Callable[[EpochLoop], Pass] | None = None) -> None:
        """``iterate`` goes over ``loader``, a DataLoader whose batches are the steps. ``passes``: another package's way to do it,
        which loads each batch before the one in front of it is handed out. Raises ``UserError`` for a second one."""
        if self._data is not None:
            raise UserError(
                "prepare takes one training DataLoader, whose batches are the job's steps. Loaders of an evaluation stay as they "
                "are. Two for training: put both data sets into one, or use session.register(data=...) and session.steps(...)"
            )
        self.loader, self._passes = loader, passes or Pass
        ahead = passes is not None
        self._data = SamplerPosition(loader, ahead=ahead) if sampler_position.fits(loader) else StreamPosition(loader)
        self.runtime.state.register("data", self._data)

    # --- epochs --------------------------------------------------------------------------------------------------------

    def epochs(self, total: int, restore: Callable[[int | None], None]) -> Iterator[int]:
        """See ``Session.epochs``. ``restore``: the Session's."""
        runtime, data = self.runtime, self._data
        if data is None:
            raise UserError(
                "epochs() goes over the loader that session.prepare(..., loader) was given: prepare it first"
            )
        if total < 1:
            raise UserError(f"epochs must be at least 1, not {total}")
        length = data.steps_per_epoch
        steps = None if length is None else total * length
        runtime.look_at_loop(inspect.currentframe())
        if not runtime.restored:
            restore(steps)
        runtime.refuse_after_the_end()
        if self._asked:
            raise UserError(
                "epochs() was asked for before: all epochs belong in one loop, and a loop within one has range(...). Phases of a "
                "training are `if epoch < 5` in its body"
            )
        self._asked, runtime.by_epochs = True, True
        runtime.ask_for(steps)
        if runtime.done:
            runtime.nothing_left()
            return
        if not data.position:
            self._put_back()
        idle = data.epoch >= total
        for epoch in range(data.epoch, total):
            self.epoch, self.start, self._pass = epoch, data.position, None
            if not self.start:  # what stands before the first batch belongs to its step: a save here is before both
                runtime.end_step()
                runtime.begin_step()
            sampler_position.set_epoch(self.loader, epoch)
            self._left = self._iteration
            yield epoch
            if self._pass is None and runtime.gradients_reduced:
                raise UserError(
                    f"epoch {epoch} trained without a batch of the loader that prepare was given: go over that one, or give "
                    "prepare the one that the training goes over"
                )
            self._tell_outside(epoch)
            self._end_pass()
        self.epoch, self.over = None, True
        runtime.finish()  # also where checkpoint() has ended the last step
        if idle:
            runtime.nothing_left()

    def state_restored(self) -> None:
        """What the script draws and steps from here to where the interrupted attempt stood, it did before that attempt's kill."""
        if self._data is not None and self.runtime.chosen.manifest is not None:
            self._restored = rng.capture(self.runtime.device), self.runtime.state.steering()

    def iterate(self) -> Iterator[Any]:
        """Raises ``UserError`` before the first epoch: nothing would be a step."""
        if self.epoch is None and not (self.over or self.runtime.finished or self.runtime.done):
            raise UserError(
                "the prepared loader is iterated outside of an epoch: write `for epoch in session.epochs(n):` around it. For a "
                "look at the data before the training take the DataLoader itself"
            )
        return self._passes(self)

    def is_training(self, one: Pass) -> bool:
        """The first pass over the loader in an epoch is. Further ones, an evaluation on the training data say, belong to the step
        that is open."""
        if self._pass is None and self.epoch is not None:
            self._pass, self._left = ref(one), None
        training = self._pass is not None and self._pass() is one
        if not training and self._left is None:
            self._left = self._iteration
        return training

    @property
    def _iteration(self) -> int:
        return self.runtime.state.hook_or_refuse()[1].iteration

    def _tell_outside(self, epoch: int) -> None:
        """Whatever is trained where no batch of the epoch's pass is asked for belongs to one step."""
        count = 0 if self._left is None else self._iteration - self._left
        if count < 2 or self._told_outside:
            return
        self._told_outside = True
        if self.runtime.rank == 0:
            self.runtime.reporter.note(
                "trained-outside-the-loader",
                f"{count} backward passes of epoch {epoch} were outside of the first pass over the prepared loader, so they are "
                "one step: no checkpoint and no stop comes between them. The steps are the batches of the epoch's first `for "
                "batch in loader`: not of a second one, of next(iter(loader)), or of a list of the batches. An evaluation in "
                "front of it takes the DataLoader itself",
            )

    def next(self, one: Pass) -> Any:
        """The next batch: the open step ends, and another begins. Raises ``StopIteration`` at the end of the epoch, and what the
        step boundary raises."""
        runtime, data = self.runtime, self._data
        assert data is not None and self.epoch is not None
        if not one.begun:
            one.begins()
        if one.begun or self.start:
            self._put_back()
            if one.ended or not data.more():
                if not one.ended:
                    self._end_pass()
                    one.ends()
                    self._left = self._iteration
                raise StopIteration
            runtime.end_step()
            runtime.begin_step()
        else:
            data.begin(self.epoch)
            if not data.more():
                raise UserError("the data gave no batch in a whole epoch: fewer samples than one batch needs?")
        if not one.begun:
            one.begun = True
            self._number(one)
        batch = one.of(data.take(), data.more)
        runtime.taken()
        return batch

    def _put_back(self) -> None:
        """See ``state_restored``."""
        if self._restored is not None:
            generators, steering = self._restored
            self.runtime.state.put_steering(steering)
            rng.restore(generators, self.runtime.device)
            self._restored = None

    def saves(self) -> None:
        """The script saves: behind a pass that it has left by ``break`` the epoch is over."""
        if self._pass is not None and self._pass() is None:
            self._end_pass()

    def _end_pass(self) -> None:
        """From here on the position is the beginning of the next epoch."""
        assert self._data is not None
        if self._pass is not None and (one := self._pass()) is not None:
            one.ended = True
        if self._data.epoch == self.epoch:
            self._data.end()

    # --- enumerate -----------------------------------------------------------------------------------------------------

    def numbered(self, batches: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
        """See ``Session.enumerate``. Only the training's pass goes on within an epoch."""
        before = self._pass
        for batch in batches:
            yield start + (self.start if self._pass is not before else 0), batch
            start += 1

    def _number(self, one: Pass) -> None:
        """``enumerate`` goes on with the number of the batch; where it cannot, that is told. It is looked for once at each place
        of the code, since that takes a walk over all objects."""
        for reader in enumerated.readers(one) if self.start else ():
            one.placeholders = True
            enumerated.advance(reader, self.start)
            one.placeholders = False
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        place = None if frame is None else (frame.f_code, frame.f_lasti)
        if place in self._looked:
            return
        self._looked.add(place)
        self.runtime.look_at_loop(frame, within_epoch=True)
        if (what := enumerated.anew(one, frame)) is not None:
            self._tell_anew(what)

    def _tell_anew(self, what: str) -> None:
        runtime, data = self.runtime, self._data
        assert data is not None
        if runtime.launch.spec.determinism == "strict":
            raise UserError(f"determinism is strict, and {what}", code="state-unsaved")
        data.numbers = what
        if runtime.rank == 0:
            runtime.reporter.note("batches-numbered-anew", what)


def _is_trained(item: Any) -> bool:
    module = isinstance(item, nn.Module) and not isinstance(item, AveragedModel)
    return module and any(p.requires_grad for p in item.parameters())


class PreparedLoader:
    """The training ``DataLoader`` as ``Session.prepare`` gives it back: its iteration marks the job's steps. ``len``, and all
    attributes but ``start``, are the DataLoader's."""

    def __init__(self, loop: EpochLoop, loader: Any) -> None:
        self._loop, self._loader = loop, loader

    @property
    def start(self) -> int:
        """Number of the first batch of this epoch's pass: 0, but after a resume within the epoch."""
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
    """One pass over the loader. Another package's has more to do at its beginning, at each batch and at its end."""

    def __init__(self, loop: EpochLoop) -> None:
        self.loop = loop
        self.begun = self.ended = self.placeholders = False
        self._plain: Iterator[Any] | None = None  # a pass that marks no steps

    def begins(self) -> None:
        """Before the first batch of the training's pass; also of one that goes on within the epoch."""

    def of(self, batch: Any, more: Callable[[], bool]) -> Any:
        """What the training gets of ``batch``. ``more``: is there another one behind it?"""
        return batch

    def ends(self) -> None:
        """Behind the last batch, where the training asked for another."""

    def plain(self) -> Iterator[Any]:
        """A pass that is no training."""
        return iter(self.loop.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.placeholders:
            return None
        if self._plain is None and not self.loop.is_training(self):
            self._plain = self.plain()
        return next(self._plain) if self._plain is not None else self.loop.next(self)
