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
- The body of the loop is one step. Everything that the body changes, down to the last line, belongs to the step. A due
  save begins when the next step is requested. Take batches in the body, none in advance. End the body with ``optimizer.step()``
  and ``zero_grad()``; gradients that are left are saved too, and make the checkpoint larger by their size. After ``checkpoint()``
  nothing that has state may change in the same body.
- All ranks do the same number of steps, in one loop. After the last of the loop's ``total`` steps the job has ended, and no
  further step can be requested. For phases of a training write ``if step < 500`` in the body. ``break`` on all ranks in the same
  step ends the job early; the step counts if its backward pass was done. A fork may request more steps than the original job. A
  schedule of a fixed length (``OneCycleLR``) does not allow more steps: its original length is restored, and after that length
  torch's own error ends the attempt.
- The hook ``post_localSGD`` averages the parameters over the ranks every few steps, when the next step is requested. The
  averaging replaces the parameters that ``optimizer.step()`` has set. The script must not have an averager of its own.
- If the ranks agree on a stop, ``steps`` raises ``Stopped`` (a ``SystemExit``): do not catch it.
- Every attempt runs the script again from its first line. In a job, the current directory is its copy of the code, which all
  attempts share. Modules are imported from the code itself, usually a read-only snapshot.
- ``Session()`` starts the process group: do not call ``init_process_group`` before or after it.
- A thread of the script may do the steps. In a job, a stop, an error or ``sys.exit`` in the loop then ends the attempt at once,
  as in the main thread. The main thread does not continue after ``thread.join()``. If the loop ends before its ``total``, the
  thread that does the steps must mark the job as done: with the Session's ``with`` block around the loop, or with ``finish()``
  after a ``break``. A thread pool stores an error in the future: call the future's ``result()``, which raises the error.

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
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ratchet_contract.errors import UserError
from ratchet_contract.paths import RUN_DIRECTORY
from ratchet_worker.session.arguments import SessionArguments
from ratchet_worker.session.mlflow_run import MlflowRun
from ratchet_worker.session.without_service import Standalone
from ratchet_worker.training.epoch_loop import EpochLoop
from ratchet_worker.training.evaluation import Evaluation
from ratchet_worker.training.runtime import Runtime

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Item = TypeVar("Item")
_OWN_NAMES = frozenset({"optimizer", "scheduler", "scaler", "data"})


class Session:
    """A training script's interface to its job. Every rank must make a Session; while a run is open, further Sessions refer to
    it.

    Without a service (``python``, ``torchrun``, a notebook, a test) the Session is a run of its own. The end of the ``with``
    block ends the run in this process; the next Session with the same ``directory`` starts the run again.

    Raises ``UserError`` for invalid arguments, if the script has already started a process group, and for further causes, such as
    a ``directory`` that is in use.
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
        """The arguments are for a run without a service, which saves to ``directory`` and resumes from there; in a job, the job's
        spec takes precedence. All except ``directory`` are keys of the spec, with the same defaults: ``hook``, ``seed``,
        ``determinism``, the mappings ``checkpoint`` and ``ddp``, and ``policy.on_hook_mismatch``."""
        given = {"hook": hook, "seed": seed, "checkpoint": checkpoint, "ddp": ddp, "determinism": determinism}
        given["on_hook_mismatch"] = on_hook_mismatch
        if Session._opener is None:
            Session._opener = Standalone().open
        arguments = SessionArguments(Path(directory), {k: value for k, value in given.items() if value is not None})
        self._runtime: Runtime = Session._opener(arguments)

    @classmethod
    def _for_package(cls, directory: Path, ddp: dict[str, Any]) -> Session:
        """Return a Session for an integration package, of the open run or of a new run with these arguments."""
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
        """End the block: without an exception, mark the job as done; without a service, end the run in this process."""
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
        """Mark the job as done and save the final checkpoint. Every rank calls it after the same step, and it waits until all
        have. The end of the Session's ``with`` block also calls it, except after an exception. A thread that does not do the
        steps waits until the last step is done. Does nothing before the state is restored. Raises ``CheckpointError`` after
        three failed saves in a row, ``Stopped`` if the ranks have agreed to stop, ``RuntimeError`` if the thread that does the
        steps ends earlier, and ``UserError`` if a fork has done no step of its own."""
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
        """Number of this process among the job's processes on its node, from 0."""
        return self._runtime.local_rank

    @property
    def device(self) -> torch.device:
        """The device for batches: the CPU, or this rank's GPU. ``wrap`` moves the model there."""
        return self._runtime.device

    @property
    def seed(self) -> int:
        """The job's seed. torch, CUDA, numpy and ``random`` are seeded from it and the rank, unless the script seeds them
        itself."""
        return self._runtime.launch.spec.seed

    @property
    def step(self) -> int:
        """Number of completed steps, including those of the checkpoint that was restored."""
        return self._runtime.step

    @property
    def resumed(self) -> bool:
        """True if this attempt continues from a checkpoint, which may be another job's at the start of a fork."""
        return self._runtime.chosen.manifest is not None

    @property
    def should_stop(self) -> bool:
        """True once a stop is requested. Ranks see it at different moments: use it only to shorten work that no other rank waits
        for."""
        return self._runtime.agreement.received_requests.stop is not None

    # --- before the first step -----------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Prepare the ``objects`` of an ordinary training loop. Returns a list of the objects to use in their place, in the same
        order, or the object alone if there is only one.

        The model becomes ``wrap(model)``. The training's DataLoader becomes a loader whose batches are the steps of ``epochs``;
        its attribute ``start`` is the number of the first batch that it yields in this epoch. All other objects are registered
        and returned as they are: optimizers, schedulers, a scaler, generators, modules without trainable parameters (moved to
        this rank's device), and other objects with state.

        Raises ``UserError`` once the state is restored, for a second model or loader, for a model that is in DDP already, and for
        an object without state.
        """
        found = self._epoch_loop.prepare(objects)
        return found[0] if len(found) == 1 else found

    def keep(self, **values: Any) -> SimpleNamespace:
        """Return an object with ``values`` as attributes, which are saved in every checkpoint. Use it for variables that a loop
        carries from one pass to the next: write ``kept = session.keep(best=0.0)`` before the loop, and ``kept.best =
        max(kept.best, accuracy)`` in the loop. Raises ``UserError`` once the state is restored."""
        return self._epoch_loop.keep(SimpleNamespace(**values))

    def wrap(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Return ``module`` on this rank's device, in DDP with the spec's settings and hook. Every rank calls it once.

        Raises ``UserError`` at a second call, and where the hook or the checkpoint does not fit the model.
        """
        return self._runtime.wrap(module)

    def register(self, **objects: Any) -> None:
        """Register ``objects`` by name, so that checkpoints contain their state. An object may have ``state_dict`` and
        ``load_state_dict``, or be a ``torch.Generator``; of other objects the items or attributes are saved. The names
        ``optimizer``, ``scheduler``, ``scaler`` and ``data`` are meant for objects of that kind; other names are free. Raises
        ``UserError`` once the state is restored, for a name that is registered already, and for objects without state."""
        if self._runtime.restored:
            raise UserError("call register before the first step: the state has already been restored")
        for name, item in objects.items():
            self._runtime.state.register(name if name in _OWN_NAMES else f"user:{name}", item)

    def ignore(self, path: str, reason: str) -> None:
        """Do not save state that is reachable only through the attribute at ``path``, and do not report it as unsaved. ``path``:
        the attribute's name as resume reports write it (``model.layers.0.history``). The resume report lists ``path`` with the
        ``reason``. Raises ``UserError`` once the state is restored."""
        if self._runtime.restored:
            raise UserError("call ignore before the first step: the state has already been restored")
        self._runtime.state.hidden.ignored[path] = reason

    def batches(self) -> Iterator[Any]:
        """Yield batches of the registered data, epoch after epoch, from the restored position. Raises ``UserError`` without
        registered ``data``, outside a step, and for an epoch without batches."""
        data = self._runtime.state.data
        if data is None:
            raise UserError("register(data=...) first; batches() yields the batches of the registered data")
        return self._runtime.batches(data)

    def restore(self, total_steps: int | None = None) -> None:
        """Restore the state now, instead of when the first step is requested. Every rank calls it, at most once, after the model
        is wrapped and everything is registered. ``total_steps``: the number that ``steps`` gets as ``total``. If the checkpoint
        has no state for an object, the object keeps its current state, and the resume report names it.

        Raises ``UserError`` at a second call, without a wrapped model, if ``total_steps`` differs between ranks, for state that
        does not fit the registered objects, and for a difference that ``determinism: strict`` forbids. Raises ``StateError`` or
        ``CheckpointError`` if saved state cannot be read or restored.
        """
        digest = getattr(self._runtime.state.data, "data_digest", None)
        self._runtime.data_digest = digest() if callable(digest) else None
        self._runtime.restore(total_steps)
        self._epoch_loop.on_state_restored()

    # --- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, total: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps to do, from the restored one to ``total`` - 1, or, if ``total`` is None, until the
        script leaves the loop. The state is restored first, if ``restore`` was not called. A step ends when the next one is
        requested: a due checkpoint is then saved, and the loop stops if the ranks have agreed to stop. Raises ``Stopped``, a
        ``SystemExit``, at such a stop, ``CheckpointError`` after three failed saves in a row, ``UserError`` for a ``total`` below
        1 or a second loop, and the errors of ``restore``."""
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
        each epoch; a further pass counts no steps. Code after the loop over the batches belongs to the step of the epoch's last
        batch. After the last epoch the job is finished, as by ``finish``; ``break`` on all ranks ends the job early. Raises the
        same errors as ``steps``. Also raises ``UserError`` without a prepared loader, at a second call, and for an epoch that
        trains without the loader."""
        return self._epoch_loop.epochs(total, self.restore)

    def enumerate(self, batches: Iterable[Item], start: int = 0) -> Iterator[tuple[int, Item]]:
        """Yield (number, batch) for ``batches``, which is the prepared loader or a progress bar around it. The numbers count the
        epoch's batches from ``start``, and continue after a resume."""
        return self._epoch_loop.enumerate_batches(batches, start)

    def checkpoint(self) -> bool:
        """Save a checkpoint now. Every rank calls it after the same step, after ``zero_grad``. If the body of the loop has done
        its backward pass (in ``epochs``: has taken its batch), the call ends the current step and saves it. In all other cases it
        saves the last completed step. Returns True if the step is saved, False if the save failed. Raises ``CheckpointError`` at
        the third failed save in a row."""
        self._epoch_loop.on_checkpoint()
        return self._runtime.checkpoint()

    def evaluation(self) -> AbstractContextManager[Evaluation]:
        """Return a context manager whose block runs in eval mode and without gradients; modes, buffers and generators are
        restored afterwards. Every rank enters it after the same step. Where the ranks' parameters differ, their mean is
        evaluated. The object that ``as`` binds has three methods. ``batches(items)`` yields the items, and checks for a stop
        before each item. ``gather(value)`` returns every rank's JSON value, in rank order. ``averages({name: (sum, weight)})``
        returns, by name, the sum of all ranks' sums divided by the sum of their weights. Between two steps, a stop ends the block
        early."""
        return self._runtime.evaluating()

    @overload
    def all_gather(
        self, value: torch.Tensor, group: ProcessGroup | None = None, sync_grads: bool = True
    ) -> torch.Tensor: ...

    @overload
    def all_gather(self, value: Any) -> list[Any]: ...

    def all_gather(self, value: Any, group: ProcessGroup | None = None, sync_grads: bool = True) -> Any:
        """Gather ``value`` from every rank, in rank order; every rank calls it. Returns a list of JSON values, or stacks tensors
        into one tensor with the shape (ranks, *shape).

        For tensors, ``group`` has the ranks that take part (None: all), and gradients flow back through the result, so that every
        rank must use it in its loss; ``sync_grads=False`` detaches it. Raises ``UserError`` if the ranks' tensors differ in shape
        or dtype, or if only some of them need a gradient; also for a ``group`` with JSON values, and for tensors in an evaluation
        between two steps.
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
        """Log metrics of the current step. ``values``: numbers or tensors of one element, by name. Only rank 0's values are kept
        and checked. Raises ``UserError`` for an invalid name or value."""
        self._runtime.log(values)

    def alert(self, title: str, text: str = "", level: str = "info") -> None:
        """Add an event ``alert`` of the current step to the job's history; webhooks send it as ``job.alert``. ``level``:
        ``info``, ``warning`` or ``error``. ``title`` and ``text`` are cut after 200 and 1000 characters, with ``...`` at the end.

        Each rank that calls this adds an event of its own, so call it on rank 0 only, unless the alert is about a rank. A resume
        repeats steps, but not their alerts: an alert is left out if an earlier attempt has sent one of the same rank, step and
        title. So put numbers that may vary into ``text``. A resume from a checkpoint that was named (``from_step``) counts as
        new, and sends its alerts. After 1000 alerts and notes, further ones of an attempt are only counted. Without a service,
        the alert is a line on stderr. Raises ``UserError`` for another level, an empty title, and values that are not
        ``str``."""
        self._runtime.alert(title, text, level)

    # --- trackers of the script's own ----------------------------------------------------------------------------------

    def summary_writer(self, log_dir: str | PathLike[str] | None = None, **options: Any) -> SummaryWriter:
        """Return torch's ``SummaryWriter`` for TensorBoard, in which each step is once, although steps are repeated after a kill.
        Every save first stores the values that the script has logged. At an attempt's first step, the values that earlier
        attempts have logged after its checkpoint are removed.

        ``log_dir``: a local directory with the same name in all attempts. None: in a job ``RATCHET_TENSORBOARD_DIR``, the
        directory ``tensorboard`` in the working directory; without a service ``tensorboard`` in the Session's directory.
        ``options``: further arguments of ``SummaryWriter``. On ranks other than 0, the methods of the result do nothing.

        Raises ``UserError`` if tensorboard is not installed or ``log_dir`` is not local, and ``OSError`` if it cannot be written.
        """
        try:
            from ratchet_worker.session.summary_writer import JobWriter, NoWriter, default_directory
        except ImportError as error:
            raise UserError(
                f"session.summary_writer needs tensorboard in {sys.executable}: pip install tensorboard ({error})",
                code="tensorboard-missing",
            ) from error
        if self.rank != 0:
            return cast(
                "SummaryWriter", NoWriter(default_directory(self._runtime) if log_dir is None else Path(log_dir))
            )
        return JobWriter(self._runtime, log_dir, **options)

    def mlflow_run(self, run_id: str | None = None) -> MlflowRun:
        """Return the job's run in MLflow, with ``log_metric`` and ``log_metrics`` that skip steps that the run has already, as
        when steps are repeated after a kill. Each call waits until the server has the values. ``run_id``: the run; None: the
        variable ``MLFLOW_RUN_ID``, else the run with the tag ``ratchet.job_id``, which is created if there is none. On ranks
        other than 0, the two methods do nothing.

        Raises ``UserError`` if mlflow is not installed or the server cannot be reached.
        """
        return MlflowRun(self._runtime, run_id)
