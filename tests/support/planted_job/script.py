"""``script.py CASE WAY``: a loop of the user's own in a Session, with state in the script. A case is a class with ``loss``."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import STEPS, WIDTH, Fault, Piece

from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.streams import TrainStream
from ratchet_worker.session.session import Session

calls = 0
noise = torch.Generator().manual_seed(5)
dice = random.Random(5)
window: list[float] = []
teacher: list[nn.Module] = []


def samples() -> TensorDataset:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.roll(1, 1))


class Case:
    """What a case may change. ``after``: behind the optimizer's step; ``evaluated``: with the value of an evaluation."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.net = Piece()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def data(self) -> Any:
        s = self.session
        return TrainLoader(samples(), batch_size=4, seed=3, rank=s.rank, world_size=s.world_size)

    def register(self) -> None:
        self.session.register(optimizer=self.optimizer)

    def scale(self, step: int) -> float | torch.Tensor:
        """Of the loss."""
        return 1.0

    def after(self, step: int, model: nn.Module) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluated(self, value: float) -> None:
        pass


class GlobalNumber(Case):
    def scale(self, step: int) -> float:
        global calls
        calls += 1
        return 1 + calls / 10


class GlobalGenerator(Case):
    def scale(self, step: int) -> torch.Tensor:
        return torch.rand((), generator=noise) + dice.random()


class GlobalList(Case):
    def scale(self, step: int) -> float:
        window.append(0.1)
        return 1 + sum(window)


class GlobalTeacher(Case):
    def after(self, step: int, model: nn.Module) -> None:
        super().after(step, model)
        if not teacher:
            teacher.append(copy.deepcopy(self.net))
        with torch.no_grad():
            for old, now in zip(teacher[0].parameters(), self.net.parameters(), strict=True):
                old.lerp_(now, 0.1)
                now.lerp_(old, 0.05)


class LocalTeacher(Case):
    """An averaged net that a local variable of the script holds, through the case."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.teacher = copy.deepcopy(self.net)

    def after(self, step: int, model: nn.Module) -> None:
        super().after(step, model)
        with torch.no_grad():
            for old, now in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.lerp_(now, 0.1)
                now.lerp_(old, 0.05)


class LocalNumber(Case):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.mean = 0.0

    def scale(self, step: int) -> float:
        self.mean = 0.9 * self.mean + 0.1
        return 1 + self.mean


class BestSoFar(Case):
    """The rate falls when an evaluation is no better than the best: the best is the script's."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.best = 0.0

    def evaluated(self, value: float) -> None:
        if value > self.best:
            self.best = value + 0.1
        else:
            self.optimizer.param_groups[0]["lr"] *= 0.5


class KeptGradients(Case):
    """Gradients of three steps are added up before a step."""

    def after(self, step: int, model: nn.Module) -> None:
        if step % 3 == 2:
            super().after(step, model)


class RegisteredGenerator(Case):
    """A registered generator of torch's, which comes back."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.noise = torch.Generator().manual_seed(5)

    def register(self) -> None:
        super().register()

        class Kept:
            def __init__(self, noise: torch.Generator) -> None:
                self.noise = noise

            def state_dict(self) -> dict[str, Any]:
                return {"state": self.noise.get_state()}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.noise.set_state(state["state"])

        self.session.register(noise=Kept(self.noise))

    def scale(self, step: int) -> torch.Tensor:
        return torch.rand((), generator=self.noise)


class SchedulerBehindCheckpoint(Case):
    """A checkpoint within the body, and the scheduler behind it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)

    def register(self) -> None:
        super().register()
        self.session.register(scheduler=self.scheduler)

    def after(self, step: int, model: nn.Module) -> None:
        super().after(step, model)
        if step == 6:
            self.session.checkpoint()
        self.scheduler.step()


class HookBehindRestore(Case):
    """A hook with a count that is registered when training begins."""

    def scale(self, step: int) -> float:
        if not getattr(self, "hooked", False):
            self.hooked, seen = True, [0]

            def fade(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
                seen[0] += 1
                return output / seen[0]

            self.net.layer.register_forward_hook(fade)
        return 1.0


class ShuffledDataLoader(Case):
    """torch's DataLoader, shuffled from the process's generator, said to be repeatable."""

    def data(self) -> Any:
        return TrainStream(DataLoader(samples(), batch_size=4, shuffle=True), repeatable=True)


class DataLoaderWithGenerator(Case):
    def data(self) -> Any:
        own = torch.Generator().manual_seed(8)
        return TrainStream(DataLoader(samples(), batch_size=4, shuffle=True, generator=own), repeatable=True)


class StatefulLoader(Case):
    def data(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return TrainStream(StatefulDataLoader(samples(), batch_size=4, shuffle=True))


class SamplerWithEpoch(Case):
    """A sampler that counts its epochs by itself."""

    class Sampler(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.epoch = 0

        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch))
            return iter(order.tolist())

        def __len__(self) -> int:
            return 32

    def data(self) -> Any:
        return TrainStream(DataLoader(samples(), batch_size=4, sampler=self.Sampler()), repeatable=True)


class BatchesByHand(Case):
    """Data that the script draws itself, with no position: from the global generators."""

    def scale(self, step: int) -> float:
        number = torch.randint(32, (1,)).item() + dice.randrange(32)
        return 1 + number / 64


class Reinforcement(Case):
    """An environment and a buffer of what happened, both the script's objects."""

    class World:
        def __init__(self) -> None:
            self.position, self.dice = 0.0, random.Random(3)

        def act(self, action: float) -> float:
            self.position += 0.1 * action + self.dice.gauss(0, 0.1)
            return self.position

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.world, self.buffer = self.World(), [0.0]

    def scale(self, step: int) -> float:
        self.buffer.append(self.world.act(float(self.net.layer.weight.detach().mean())))
        return 1 + sum(self.buffer[-5:]) / 5


def main(name: str, way: str) -> None:
    fault = Fault(way)
    with Session() as session:
        torch.manual_seed(1)
        make: Callable[[Session], Case] = globals()[name]
        case = make(session)
        model = session.wrap(case.net)
        session.register(data=case.data())
        case.register()
        batches = session.batches()
        for step in session.steps(STEPS):
            fault.in_step()
            x, y = next(batches)
            loss = (model(x) - y).square().mean() * case.scale(step)
            loss.backward()
            case.after(step, model)
            if (step + 1) % 3 == 0:
                evaluate(session, case, fault)


def evaluate(session: Session, case: Case, fault: Fault) -> None:
    with session.evaluation() as evaluation:
        total = 0.0
        for number, value in enumerate(evaluation.batches([1.0, 2.0, 3.0])):
            if number == 1:
                fault.in_evaluation()
            total += float(case.net(torch.full((4, WIDTH), value)).abs().sum())
        found = evaluation.averages({"size": (total, 3.0)})
    case.evaluated(found["size"])


if __name__ == "__main__":
    main(*sys.argv[1:])
