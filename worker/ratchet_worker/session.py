"""For people who keep their own loop: everything the built-in loop has, as a ``Session``.

A complete script, ``train.py`` in the directory named by ``code.path``; the spec says ``script: ["train.py", "--lr", "0.1"]``::

    import torch
    from torch import nn
    from ratchet import Session, TrainLoader

    def main() -> None:
        with Session() as s:
            data = TrainLoader(my_dataset(), batch_size=32, seed=s.seed, rank=s.rank, world_size=s.world_size)
            net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
            model = s.wrap(net)                                    # DDP under the hook of the spec
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            s.register(optimizer=optimizer, data=data)
            batches = s.batches()                                  # epoch after epoch, from the restored position
            for step in s.steps(1000):                             # 0, 1, ...; after a resume from where it stopped
                x, y = next(batches)
                loss = nn.functional.cross_entropy(model(x.to(s.device)), y.to(s.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                s.log({"loss": loss})
            # here only when all 1000 steps are done, and again if the job is killed or stopped there
    if __name__ == "__main__":
        main()

The rules:

- **Register everything that has state** (optimizers, schedulers, a scaler, data, generators, averages, anything with
  ``state_dict``/``load_state_dict``); what is not registered cannot be restored. Names other than optimizer, scheduler, scaler
  and data are free. Values derived from ``step`` need no registration.
- The state is put back when the first step is asked for (or at ``restore()``): register before, create iterators of the data
  through ``batches()``.
- The body of the loop is one step: what it changes counts to it, down to its last line, and it is saved when the next step is
  asked for. Take batches in the body, none in advance. End it with ``optimizer.step()`` and ``zero_grad()``; gradients that are
  left are saved too, at the price of their size. After ``checkpoint()`` nothing that has state may change in the same body.
- All ranks do the same number of steps, in one loop: behind its ``total`` the job has ended, and no further step can be asked
  for. Phases of a training are ``if step < 500`` in the body. ``break`` on all ranks in the same step ends the job early; the
  step counts if its backward was done. A fork may ask for more steps than the job before, unless a schedule has a fixed length
  (``OneCycleLR``): it comes back with the length that it was made with, and ends the attempt with torch's own error behind it.
- Under ``post_localSGD`` parameters are averaged over the ranks at the end of the body, every few steps: when the next step is
  asked for they are other ones than those that ``optimizer.step()`` left. No averager of the script's own.
- A stop that the ranks agreed on comes out of ``steps`` as ``Stopped`` (a ``SystemExit``): let it pass.
- The script runs again from its first line in every attempt. Its current directory is the job's own copy of the code, kept over
  all attempts; the code itself is imported from a read-only snapshot.
- ``Session()`` starts the process group: no ``init_process_group`` of the script's own, before or after it.
- A thread of the script's own may do the steps. What would end the attempt in the main thread (a stop, an error, ``sys.exit`` in
  the loop) ends it there and then: what the main thread has behind its ``join`` is not run. Where the loop does not come to its
  ``total``, that thread says that the job is done: by the Session's block around the loop, or ``finish()`` after a ``break``.
  A pool keeps an error to itself: ask for its ``result()``.

Evaluating inside the loop, at the end of a step::

    if (step + 1) % 100 == 0:
        with s.evaluation() as ev:                 # eval mode, no gradients, rank 0's buffers; leaves no trace
            right = total = 0
            for x, y in ev.batches(my_test_share):
                right += int((net(x).argmax(1) == y).sum()); total += len(y)
            found = ev.averages({"accuracy": (right, total)})
        s.log(found)
        scheduler.step(found["accuracy"])          # belongs to the step, too

A stop waits for the end of the step, evaluation included. Outside the loop the block is left early when a stop comes. Use
``ev.gather`` or ``ev.averages`` in it, no collectives of torch. Where replicas differ (``post_localSGD`` between two averagings)
their mean is evaluated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ratchet_contract.errors import UserError
from ratchet_worker.epoch_loop import EpochLoop
from ratchet_worker.evaluation import Evaluation
from ratchet_worker.runtime import Runtime
from ratchet_worker.session_arguments import DIRECTORY, SessionArguments
from ratchet_worker.standalone import Standalone

Item = TypeVar("Item")
_OWN_NAMES = frozenset({"optimizer", "scheduler", "scaler", "data"})


class Session:
    """A script's hold on its job. The first one joins the job's process group: every rank makes it, in any thread; further ones
    are the same. An error that ends the thread that does the steps, or before the first one made it, ends the attempt.

    Without a service (``python``, ``torchrun``, a debugger, a notebook, in a test) it is a run of its own, one per directory.
    Leaving the block ends the run in this process; the next Session is another start.

    Raises ``UserError`` where the script has started a process group already; without a service also where ``directory`` is in
    use or holds something else, and in another thread than the main one.
    """

    # The process of a rank sets it before the script starts: threads inherit no context. Its first call is a collective.
    _opener: ClassVar[Callable[[SessionArguments], Runtime] | None] = None

    def __init__(
        self,
        directory: str | PathLike[str] = DIRECTORY,
        *,
        hook: str | dict[str, Any] | None = None,
        seed: int | None = None,
        checkpoint: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        determinism: str | None = None,
        on_hook_mismatch: str | None = None,
    ) -> None:
        """Arguments are for a run without a service, which saves to ``directory`` and goes on from there; in a job its spec
        counts, and an event tells what the script gives otherwise. They are keys of the spec with its defaults: ``hook``,
        ``seed`` and ``determinism``, the mappings ``checkpoint`` and ``ddp``, and ``on_hook_mismatch`` of ``policy``. ``seed`` is
        for what the script has not seeded itself, as in a job, and for the order of the data (``session.seed``)."""
        given = {"hook": hook, "seed": seed, "checkpoint": checkpoint, "ddp": ddp, "determinism": determinism}
        given["on_hook_mismatch"] = on_hook_mismatch
        if Session._opener is None:
            Session._opener = Standalone().open
        arguments = SessionArguments(Path(directory), {k: value for k, value in given.items() if value is not None})
        self._runtime: Runtime = Session._opener(arguments)

    @classmethod
    def _of_package(cls, directory: Path, ddp: dict[str, Any]) -> Session:
        """For a package that makes the Session where the script has made none: else its arguments give way."""
        if cls._opener is None:
            cls._opener = Standalone().open
        session = cls.__new__(cls)
        session._runtime = cls._opener(SessionArguments(directory, {"ddp": ddp} if ddp else {}, gives_way=True))
        return session

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        except BaseException as found:
            error = found
            raise
        finally:
            if self._runtime.left is not None:
                self._runtime.left(error)

    @property
    def _epoch_loop(self) -> EpochLoop:
        if self._runtime.epoch_loop is None:
            self._runtime.epoch_loop = EpochLoop(self._runtime)
        return self._runtime.epoch_loop

    def finish(self) -> None:
        """The job is done, after the same step on every rank; the final checkpoint is made. The end of the block does it, where
        no exception comes out of it. Another thread than that of the steps waits for the last of ``total``, and raises
        ``RuntimeError`` where that thread ends before."""
        if self._runtime.restored:
            self._runtime.finish()

    # --- facts ---------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this process among all of the job, from 0."""
        return self._runtime.rank

    @property
    def world_size(self) -> int:
        """Ranks of the job on all nodes."""
        return self._runtime.world_size

    @property
    def local_rank(self) -> int:
        """Of this process among those of its node, from 0."""
        return self._runtime.local_rank

    @property
    def device(self) -> torch.device:
        """The CPU, or this rank's GPU: where batches belong; ``wrap`` puts the model there."""
        return self._runtime.device

    @property
    def seed(self) -> int:
        """The job's seed. torch, CUDA, numpy and ``random`` are seeded from it and the rank already; what the script has seeded
        counts all the same, before ``Session()`` or behind it."""
        return self._runtime.launch.spec.seed

    @property
    def step(self) -> int:
        """Completed steps of the job, those of earlier attempts included."""
        return self._runtime.step

    @property
    def resumed(self) -> bool:
        """Does this attempt continue a checkpoint?"""
        return self._runtime.chosen.manifest is not None

    @property
    def should_stop(self) -> bool:
        """A stop was asked for. Ranks hear of it at different moments: use it to cut work short that no other rank waits for.
        ``steps`` stops all ranks together by itself."""
        return self._runtime.agreement.wish.stop is not None

    # --- before the first step -----------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """``objects`` of an ordinary training loop, in any number and order, as the loop uses them: a list in the same order,
        one alone by itself. Of the model ``wrap(model)``. Optimizers, schedulers, a scaler, modules that have nothing to train
        (put onto this rank's device), what else has ``state_dict``, and dicts, lists, ``SimpleNamespace`` and objects of your
        own, whose items and attributes come back, are registered. Of the training's DataLoader one whose
        batches are the steps of ``epochs``, with its ``len`` and attributes, and ``start``: the number of the first batch of this
        epoch's pass. Raises ``UserError`` behind the first step, and for a second model or loader."""
        found = self._epoch_loop.prepare(objects)
        return found[0] if len(found) == 1 else found

    def wrap(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """``module`` on this rank's device, in DDP with the spec's settings and hook. Once, on every rank.

        Raises ``UserError`` at a second call, and where the hook cannot have such a model."""
        return self._runtime.wrap(module)

    def register(self, **objects: Any) -> None:
        """``objects`` with state, by name: with ``state_dict`` and ``load_state_dict``, a ``torch.Generator``, or a dict, a list,
        a ``SimpleNamespace`` or an object of your own, whose items and attributes come back. ``optimizer``, ``scheduler`` and
        ``scaler`` are those; ``data``: a ``TrainLoader``, a ``TrainStream``, or what fits ``TrainData``; other names are free.
        Raises ``UserError`` behind the first step, and for what has no state to give."""
        if self._runtime.restored:
            raise UserError("register before the first step: the state has been put back already")
        for name, item in objects.items():
            self._runtime.state.register(name if name in _OWN_NAMES else f"user:{name}", item)

    def ignore(self, path: str, reason: str) -> None:
        """Training does not depend on the attribute at ``path`` (as a resume report names it, ``model.layers.0.history``), nor on
        what is reached through it alone: it is neither saved nor reported. Every resume report says so, with the ``reason``.
        Raises ``UserError`` behind the first step."""
        if self._runtime.restored:
            raise UserError("ignore before the first step: the state has been put back already")
        self._runtime.state.hidden.ignored[path] = reason

    def batches(self) -> Iterator[Any]:
        """Batches of the registered data, epoch after epoch, from the restored position. Raises ``UserError`` where no ``data``
        are registered."""
        data = self._runtime.state.data
        if data is None:
            raise UserError("register(data=...) first; batches() gives the batches of the registered data")
        return self._runtime.batches(data)

    def restore(self, total_steps: int | None = None) -> None:
        """Put the state back now; ``steps`` does it by itself. Everything must be registered. ``total_steps``: as ``total`` of
        ``steps``. Raises ``UserError`` for state that does not fit what is registered, and for a difference that
        ``determinism: strict`` forbids."""
        digest = getattr(self._runtime.state.data, "data_digest", None)
        self._runtime.data_digest = digest() if callable(digest) else None
        self._runtime.restore(total_steps)
        self._epoch_loop.state_restored()

    # --- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Numbers of the steps to do, from the restored one to ``total`` - 1 (None: until the script breaks). Each is saved,
        counted and stopped at when the next is asked for. Raises ``Stopped``, which ends the script where the ranks agreed to
        stop, and ``UserError`` for a ``total`` below 1 and for a second loop behind the last step."""
        runtime = self._runtime
        if total is not None and total < 1:
            raise UserError(f"total must be at least 1, not {total}")
        runtime.look_at_loop(inspect.currentframe())
        if not runtime.restored:
            self.restore(total)
        runtime.refuse_after_the_end()
        runtime.ask_for(total)
        if runtime.done:
            runtime.nothing_left()
        while not runtime.done:
            runtime.begin_step()
            yield runtime.step
            runtime.end_step()

    def epochs(self, total: int) -> Iterator[int]:
        """Numbers of the epochs to do, from the restored one to ``total`` - 1. In each the prepared loader is gone over once; a
        further pass over it is no training and belongs to the step that is open. The step of an epoch's last batch ends when the
        next epoch's first is asked for, or behind the last epoch: what stands between two epochs belongs to it. Samplers are told
        the epoch (``set_epoch``). ``break``, on all ranks, ends the job early. Raises as ``steps``."""
        return self._epoch_loop.epochs(total, self.restore)

    def enumerate(self, batches: Iterable[Item], start: int = 0) -> Iterator[tuple[int, Item]]:
        """``batches``, the prepared loader or a progress bar around it, with their numbers in the epoch, counted from ``start``:
        they go on after a resume. (Those of Python's ``enumerate`` around the loader itself do, too.)"""
        return self._epoch_loop.numbered(batches, start)

    def checkpoint(self) -> bool:
        """Save now, between two steps (after ``zero_grad``); every rank calls it. False: the save failed, which was told."""
        self._epoch_loop.saves()
        return self._runtime.checkpoint()

    def evaluation(self) -> AbstractContextManager[Evaluation]:
        """For a ``with`` block: eval mode, no gradients, rank 0's buffers; it leaves no trace in the training state. Every rank
        enters it after the same step. Its value has ``batches(items)``, which looks for a stop between two of them,
        ``gather(value)`` (every rank's JSON value, in rank order) and ``averages({name: (sum, weight)})`` (sum of sums / sum of
        weights over all ranks)."""
        return self._runtime.evaluating()

    @overload
    def all_gather(
        self, value: torch.Tensor, group: ProcessGroup | None = None, sync_grads: bool = True
    ) -> torch.Tensor: ...

    @overload
    def all_gather(self, value: Any) -> list[Any]: ...

    def all_gather(self, value: Any, group: ProcessGroup | None = None, sync_grads: bool = True) -> Any:
        """Every rank's ``value`` in rank order; every rank calls it. JSON values come as a list, tensors stacked:
        (ranks, *shape).

        Tensors: ``group`` has the ranks that take part (None: all). Gradients flow back: each rank's tensor gets the sum, over
        the ranks, of the gradients of its slice; so every rank uses the result in its loss. ``sync_grads=False`` detaches.
        Tensors that differ in kind between the ranks are refused on all of them.

        A step waits for it, and a stop for the step. Not in an evaluation, which a stop may cut short: use ``ev.gather`` there.
        """
        runtime = self._runtime
        if isinstance(value, torch.Tensor):
            if runtime.abandonable:
                raise UserError(
                    "all_gather of tensors in an evaluation between two steps could leave ranks waiting when a stop cuts it "
                    "short: use ev.gather or ev.averages there, or evaluate in the body of the loop"
                )
            return runtime.gatherer.gather(value, group, sync_grads)
        if group is not None:
            raise UserError("all_gather takes a group for tensors only; JSON values are gathered from all ranks")
        runtime.gathers += 1
        values = runtime.exchange.gather(f"session/{runtime.gathers}", value)
        if self.rank == 0 and runtime.gathers > 1:
            runtime.exchange.forget(f"session/{runtime.gathers - 1}")
        return values

    def log(self, values: dict[str, float | torch.Tensor]) -> None:
        """Metrics of the current step: ``values`` are numbers or tensors of one element, by name (1 to 200
        characters); rank 0's are kept."""
        self._runtime.log(values)
