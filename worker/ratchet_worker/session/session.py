"""For scripts that keep their own training loop: everything that the built-in loop has, as a ``Session``.

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
            for step in s.steps(1000):                             # 0, 1, ...; after a resume from the restored step
                x, y = next(batches)
                loss = nn.functional.cross_entropy(model(x.to(s.device)), y.to(s.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                s.log({"loss": loss})
            # reached only when all 1000 steps are done, and again if the job is killed or stopped here
    if __name__ == "__main__":
        main()

The rules:

- **Register everything that has state** (optimizers, schedulers, a scaler, data, generators, averages, anything with
  ``state_dict``/``load_state_dict``); what is not registered cannot be restored. Names other than ``optimizer``, ``scheduler``,
  ``scaler`` and ``data`` are free. Values derived from ``step`` need no registration.
- The state is restored when the first step is requested (or by ``restore()``): register before that, and iterate over the data
  through ``batches()``.
- The body of the loop is one step. Everything that the body changes, down to its last line, belongs to the step, which is saved
  when the next step is requested. Take batches in the body, none in advance. End the body with ``optimizer.step()`` and
  ``zero_grad()``; gradients that are left are saved too, and make the checkpoint larger by their size. After ``checkpoint()``
  nothing that has state may change in the same body.
- All ranks do the same number of steps, in one loop: after its ``total`` the job has ended, and no further step can be requested.
  For phases of a training write ``if step < 500`` in the body. ``break`` on all ranks in the same step ends the job early; the
  step counts if its backward pass was done. A fork may request more steps than the original job, unless a schedule has a fixed
  length (``OneCycleLR``): it is restored with its original length, and after that length torch's own error ends the attempt.
- Under ``post_localSGD`` parameters are averaged over the ranks at the end of the body, every few steps: when the next step is
  requested they differ from what ``optimizer.step()`` left. The script must not have an averager of its own.
- A stop that the ranks agreed on leaves ``steps`` as ``Stopped`` (a ``SystemExit``): do not catch it.
- Every attempt runs the script again from its first line. Its current directory is the job's copy of the code, kept over all
  attempts; the code itself is imported from a read-only snapshot.
- ``Session()`` starts the process group: do not call ``init_process_group``, neither before nor after it.
- A thread of the script may do the steps. A stop, an error or ``sys.exit`` in the loop ends the attempt at once, as
  in the main thread: code of the main thread after its ``join`` does not run. Where the loop does not reach its ``total``,
  that thread marks the job as done: with the Session's block around the loop, or with ``finish()`` after a ``break``. A thread
  pool keeps an error in its future: call its ``result()``.

Evaluating inside the loop, at the end of a step::

    if (step + 1) % 100 == 0:
        with s.evaluation() as ev:                 # eval mode, no gradients, rank 0's buffers; training state unchanged
            right = total = 0
            for x, y in ev.batches(my_test_share):
                right += int((net(x).argmax(1) == y).sum()); total += len(y)
            found = ev.averages({"accuracy": (right, total)})
        s.log(found)
        scheduler.step(found["accuracy"])          # belongs to the step too

A stop waits for the end of the step, evaluation included. Outside the loop a stop ends the block early. Inside the block use
``ev.gather`` or ``ev.averages``, not torch's collectives. Where replicas differ (``post_localSGD`` between two averagings) their
mean is evaluated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ratchet_contract.errors import UserError
from ratchet_contract.paths import RUN_DIRECTORY
from ratchet_worker.session.arguments import SessionArguments
from ratchet_worker.session.without_service import Standalone
from ratchet_worker.training.epoch_loop import EpochLoop
from ratchet_worker.training.evaluation import Evaluation
from ratchet_worker.training.runtime import Runtime

Item = TypeVar("Item")
_OWN_NAMES = frozenset({"optimizer", "scheduler", "scaler", "data"})


class Session:
    """A training script's interface to its job. The first ``Session()`` joins the job's process group; every rank must make one,
    in any thread. Further ones refer to the same run. An error ends the attempt if it ends the thread that does the steps or,
    before the first step, the thread that made the first Session.

    Without a service (``python``, ``torchrun``, a debugger, a notebook, a test) the Session is a run of its own, one per
    directory. Leaving the block ends the run in this process; the next Session is another start.

    Raises ``UserError`` where the script has already started a process group. Without a service it is also raised where
    ``directory`` is in use or holds something else, in a thread other than the main one, and while a Session with other arguments
    is open.
    """

    # Set by the rank's process before the script starts, as a class attribute since threads inherit no context. Its first call is
    # a collective.
    _opener: ClassVar[Callable[[SessionArguments], Runtime] | None] = None

    def __init__(
        self,
        directory: str | PathLike[str] = RUN_DIRECTORY,
        *,
        hook: str | dict[str, Any] | None = None,
        seed: int | None = None,
        checkpoint: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        determinism: str | None = None,
        on_hook_mismatch: str | None = None,
    ) -> None:
        """The arguments are for a run without a service, which saves to ``directory`` and resumes from there. In a job the job's
        spec takes precedence, and an event reports arguments that differ from it. The others are keys of the spec, with the
        spec's defaults: ``hook``, ``seed`` and ``determinism``, the mappings ``checkpoint`` and ``ddp``, and ``on_hook_mismatch``
        of ``policy``. ``seed`` seeds the generators that the script has not seeded itself, as in a job, and the order of the data
        (``session.seed``)."""
        given = {"hook": hook, "seed": seed, "checkpoint": checkpoint, "ddp": ddp, "determinism": determinism}
        given["on_hook_mismatch"] = on_hook_mismatch
        if Session._opener is None:
            Session._opener = Standalone().open
        arguments = SessionArguments(Path(directory), {k: value for k, value in given.items() if value is not None})
        self._runtime: Runtime = Session._opener(arguments)

    @classmethod
    def _for_package(cls, directory: Path, ddp: dict[str, Any]) -> Session:
        """Return a Session for an integration package: the script's if the script has made one, whose arguments then take
        precedence, else a new one. ``ddp``: DDP settings of the package, empty for none."""
        if cls._opener is None:
            cls._opener = Standalone().open
        session = cls.__new__(cls)
        session._runtime = cls._opener(SessionArguments(directory, {"ddp": ddp} if ddp else {}, yields_to_script=True))
        return session

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the block. Without an exception, the job is marked as done (``finish``). Without a service, the run in this process
        also ends. The exception is not suppressed."""
        try:
            if kind is None:
                self.finish()
        except BaseException as found:
            error = found
            raise
        finally:
            if self._runtime.on_exit is not None:
                self._runtime.on_exit(error)

    @property
    def _epoch_loop(self) -> EpochLoop:
        """The loop that ``prepare`` and ``epochs`` use, created at the first use and shared by all Sessions of the run."""
        loop = self._runtime.epoch_loop
        if not isinstance(loop, EpochLoop):
            loop = self._runtime.epoch_loop = EpochLoop(self._runtime)
        return loop

    def finish(self) -> None:
        """Mark the job as done and save the final checkpoint. Every rank calls it after the same step; leaving the block without
        an exception does it, too. Does nothing if the state was never restored. In a thread other than the one that does the
        steps it blocks until the last of ``total`` steps is done, and raises ``RuntimeError`` if that thread ends earlier."""
        if self._runtime.restored:
            self._runtime.finish()

    # --- facts ---------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this process among all processes of the job, from 0."""
        return self._runtime.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, on all nodes."""
        return self._runtime.world_size

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its node, from 0."""
        return self._runtime.local_rank

    @property
    def device(self) -> torch.device:
        """The device for batches: the CPU, or this rank's GPU. ``wrap`` moves the model there."""
        return self._runtime.device

    @property
    def seed(self) -> int:
        """The job's seed. torch, CUDA, numpy and ``random`` are already seeded from it and the rank; seeds that the script sets
        itself, before or after ``Session()``, take precedence."""
        return self._runtime.launch.spec.seed

    @property
    def step(self) -> int:
        """Number of completed steps of the job, including those of earlier attempts."""
        return self._runtime.step

    @property
    def resumed(self) -> bool:
        """True if this attempt continues from a checkpoint: one of this job or, at the start of a fork, one of the job that was
        forked."""
        return self._runtime.chosen.manifest is not None

    @property
    def should_stop(self) -> bool:
        """True once a stop is requested. Ranks see it at different moments: use it only to shorten work that no other rank waits
        for. ``steps`` stops all ranks together."""
        return self._runtime.agreement.received_requests.stop is not None

    # --- before the first step -----------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Prepare the ``objects`` of an ordinary training loop, in any number and order. Returns a list of the objects to use in
        their place, in the same order, or the object alone if there is only one.

        The model becomes ``wrap(model)``. These are registered and returned as they are: optimizers, schedulers, a scaler,
        modules without trainable parameters (moved to this rank's device) and other objects with ``state_dict``. So are dicts,
        lists, ``SimpleNamespace`` and objects of your own, of which the items and attributes are restored. The training's
        DataLoader becomes a loader whose batches are the steps of ``epochs``. It has the DataLoader's ``len`` and attributes, and
        one of its own, ``start``: the number of the first batch of this epoch's pass, 0 except after a resume within the epoch.

        Raises ``UserError`` after the first step, and for a second model or loader.
        """
        found = self._epoch_loop.prepare(objects)
        return found[0] if len(found) == 1 else found

    def keep(self, **values: Any) -> SimpleNamespace:
        """Return an object with ``values`` as attributes, saved in every checkpoint: for variables that a loop carries from one
        pass to the next. ``kept = session.keep(best=0.0)`` before the loop, ``kept.best = max(kept.best, accuracy)`` in it.
        Values may be tensors, numbers, strings, lists, dicts and objects of your own. Raises ``UserError`` after the first
        step."""
        return self._epoch_loop.keep(SimpleNamespace(**values))

    def wrap(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Return ``module`` on this rank's device, in DDP with the spec's settings and hook. Call it once, on every rank.

        Raises ``UserError`` at a second call, and where the hook does not support the model."""
        return self._runtime.wrap(module)

    def register(self, **objects: Any) -> None:
        """Register ``objects`` by name, so that checkpoints contain their state. An object may have ``state_dict`` and
        ``load_state_dict``, or be a ``torch.Generator``. Of a dict, a list, a ``SimpleNamespace`` or an object of your own, the
        items and attributes are saved and restored. The names ``optimizer``, ``scheduler`` and ``scaler`` are meant for objects
        of that kind; ``data`` is for a ``TrainLoader``, a ``TrainStream``, or an object that implements ``TrainData``; other
        names are free. Raises ``UserError`` after the first step, for a name that is registered already, and for objects without
        state."""
        if self._runtime.restored:
            raise UserError("call register before the first step: the state has already been restored")
        for name, item in objects.items():
            self._runtime.state.register(name if name in _OWN_NAMES else f"user:{name}", item)

    def ignore(self, path: str, reason: str) -> None:
        """Exclude the attribute at ``path``, on which training does not depend, and everything reachable only through the
        attribute, from what is saved and reported. ``path``: as a resume report names the attribute
        (``model.layers.0.history``). Every resume report states the exclusion, with the ``reason``. Raises ``UserError`` after
        the first step."""
        if self._runtime.restored:
            raise UserError("call ignore before the first step: the state has already been restored")
        self._runtime.state.hidden.ignored[path] = reason

    def batches(self) -> Iterator[Any]:
        """Yield batches of the registered data, epoch after epoch, from the restored position. Raises ``UserError`` if no
        ``data`` are registered."""
        data = self._runtime.state.data
        if data is None:
            raise UserError("register(data=...) first; batches() yields the batches of the registered data")
        return self._runtime.batches(data)

    def restore(self, total_steps: int | None = None) -> None:
        """Restore the state now; otherwise ``steps`` does it. A collective: every rank calls it, at most once, after the model is
        wrapped and everything is registered. Without a checkpoint nothing is restored, and training begins. ``total_steps``: as
        ``total`` of ``steps``; the same on all ranks. Raises ``UserError`` at a second call, without a wrapped model, if the
        ranks' ``total_steps`` differ, for state that does not fit the registered objects, and for a difference that
        ``determinism: strict`` forbids; ``StateError`` if the restored tensors are not those that were saved."""
        digest = getattr(self._runtime.state.data, "data_digest", None)
        self._runtime.data_digest = digest() if callable(digest) else None
        self._runtime.restore(total_steps)
        self._epoch_loop.on_state_restored()

    # --- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps to do, from the restored one to ``total`` - 1 (None: until the script breaks). The first
        call restores the state, if ``restore`` was not called. A step ends when the next one is requested: it is then counted, a
        due checkpoint is saved, and the loop stops if the ranks have agreed to stop. Raises ``Stopped``, a ``SystemExit`` that
        ends the script, for such a stop; ``UserError`` for a ``total`` below 1 and for a second loop after the last step; and the
        errors of ``restore``."""
        runtime = self._runtime
        if total is not None and total < 1:
            raise UserError(f"total must be at least 1, not {total}")
        runtime.check_loop_variables(inspect.currentframe())
        if not runtime.restored:
            self.restore(total)
        runtime.check_not_ended()
        runtime.set_total(total)
        if runtime.done:
            runtime.mark_nothing_left()
        while not runtime.done:
            runtime.begin_step()
            yield runtime.step
            runtime.end_step()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs to do, from the restored one to ``total`` - 1. Iterate over the prepared loader once in
        each; a further pass over it is not training and belongs to the open step. The step of an epoch's last batch ends when the
        next epoch is requested, or after the last epoch: the code after the loop over its batches belongs to it. The epoch is set
        on samplers (``set_epoch``). ``break`` on all ranks ends the job early. Raises the same errors as ``steps``."""
        return self._epoch_loop.epochs(total, self.restore)

    def enumerate(self, batches: Iterable[Item], start: int = 0) -> Iterator[tuple[int, Item]]:
        """Yield (number, batch) for ``batches``, which is the prepared loader or a progress bar around it. Numbers are those in
        the epoch, counted from ``start``, and continue after a resume. (So do those of Python's ``enumerate`` directly around the
        loader.)"""
        return self._epoch_loop.enumerate_batches(batches, start)

    def checkpoint(self) -> bool:
        """Save now, unless this step is saved already; every rank calls it after the same step, after ``zero_grad``. In the body
        of the loop it ends the step. Return True if the step is saved; False if the save failed, which is also reported. Raises
        ``CheckpointError`` at the third failed save in a row."""
        self._epoch_loop.on_checkpoint()
        return self._runtime.checkpoint()

    def evaluation(self) -> AbstractContextManager[Evaluation]:
        """Return a context manager for an evaluation: eval mode, no gradients, rank 0's buffers; the training state is unchanged
        afterwards. Every rank enters it after the same step. The object that ``as`` binds has ``batches(items)``, which checks
        for a stop before each item, ``gather(value)`` (every rank's JSON value, in rank order) and
        ``averages({name: (sum, weight)})`` (sum of sums / sum of weights over all ranks)."""
        return self._runtime.evaluating()

    @overload
    def all_gather(
        self, value: torch.Tensor, group: ProcessGroup | None = None, sync_grads: bool = True
    ) -> torch.Tensor: ...

    @overload
    def all_gather(self, value: Any) -> list[Any]: ...

    def all_gather(self, value: Any, group: ProcessGroup | None = None, sync_grads: bool = True) -> Any:
        """Gather ``value`` from every rank, in rank order; every rank calls it. JSON values are returned as a list, tensors
        stacked: (ranks, *shape).

        For tensors, ``group`` has the ranks that take part (None: all). Gradients flow back: each rank's tensor gets the sum,
        over the ranks, of the gradients of its slice; so every rank must use the result in its loss. ``sync_grads=False``
        detaches the result. Tensors that differ in shape, dtype or need of a gradient between the ranks raise ``UserError`` on
        all of them.

        A step waits for it, and a stop waits for the step. In an evaluation that a stop may cut short use ``ev.gather`` instead.
        """
        runtime = self._runtime
        if isinstance(value, torch.Tensor):
            if runtime.is_evaluation_abandonable:
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
            runtime.exchange.delete(f"session/{runtime.gathers - 1}")
        return values

    def log(self, values: dict[str, float | torch.Tensor]) -> None:
        """Log metrics of the current step: ``values`` are numbers or tensors of one element, by name (1 to 200 characters). Only
        rank 0's values are kept; on other ranks the call does nothing. Raises ``UserError`` for another name or value."""
        self._runtime.log(values)
