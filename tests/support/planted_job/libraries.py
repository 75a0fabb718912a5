"""Objects of installed libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from training import WIDTH, Piece, Training, Value


class Quasirandom(Piece):
    def plant(self) -> None:
        self.engine = torch.quasirandom.SobolEngine(WIDTH, scramble=True, seed=3)

    def move(self) -> Value:
        return self.engine.draw(1)[0]


class Distribution(Piece):
    """Its parameters are moved by hand."""

    def plant(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))

    def move(self) -> Value:
        self.prior.loc += 0.1
        return self.prior.loc.clone() + self.prior.sample()


class DistributionReplaced(Piece):
    def plant(self) -> None:
        self.prior = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))

    def move(self) -> Value:
        self.prior = torch.distributions.Normal(self.prior.loc + 0.1, self.prior.scale * 0.9)
        return self.prior.mean * self.prior.stddev


class ScipyDistribution(Piece):
    """Frozen, with a random state of its own."""

    def plant(self) -> None:
        from scipy import stats

        self.noise = stats.norm(0, 1)
        self.noise.random_state = np.random.RandomState(4)

    def move(self) -> Value:
        return float(self.noise.rvs())


class ScipySobol(Piece):
    def plant(self) -> None:
        from scipy.stats import qmc

        self.engine = qmc.Halton(2, scramble=True, rng=np.random.default_rng(3))

    def move(self) -> Value:
        return float(self.engine.random(1)[0, 0])


class ScipySparse(Piece):
    def plant(self) -> None:
        from scipy import sparse

        self.table = sparse.csr_array(np.eye(WIDTH))

    def move(self) -> Value:
        self.table = self.table * 0.9
        return float(self.table.sum()) / WIDTH


class ScipySparseInPlace(Piece):
    def plant(self) -> None:
        from scipy import sparse

        self.table = sparse.csr_array(np.eye(WIDTH))

    def move(self) -> Value:
        self.table.data *= 0.9
        return float(self.table.sum()) / WIDTH


class OnlineRegression(Piece):
    """An estimator that is fitted batch by batch."""

    def plant(self) -> None:
        from sklearn.linear_model import SGDRegressor

        self.model = SGDRegressor(random_state=0)
        self.model.partial_fit(np.eye(WIDTH), np.zeros(WIDTH))

    def move(self) -> Value:
        self.model.partial_fit(np.eye(WIDTH), np.ones(WIDTH))
        return float(self.model.coef_.sum())


class OnlineScaler(Piece):
    def plant(self) -> None:
        from sklearn.preprocessing import StandardScaler

        self.scaler = StandardScaler()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaler.partial_fit(x.detach().numpy())
        return super().forward(torch.from_numpy(self.scaler.transform(x.detach().numpy())).float())


class OnlineClusters(Piece):
    def plant(self) -> None:
        from sklearn.cluster import MiniBatchKMeans

        self.clusters = MiniBatchKMeans(2, random_state=0, n_init=1, batch_size=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clusters.partial_fit(x.detach().numpy())
        return super().forward(x) + torch.from_numpy(self.clusters.cluster_centers_[0].copy()).float()


class TorchMetric(Piece):
    """A metric whose running value goes into the loss."""

    def plant(self) -> None:
        from torchmetrics import MeanMetric

        self.mean = MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.mean.update(out.detach().abs().sum())
        return out * (1 + torch.tanh(self.mean.compute()))


class TorchMetricInList(Piece):
    def plant(self) -> None:
        from torchmetrics import MeanMetric, MetricCollection

        self.metrics = [MetricCollection({"mean": MeanMetric()})]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.metrics[0].update(out.detach().abs().sum())
        return out * (1 + torch.tanh(self.metrics[0].compute()["mean"]))


class TorchMetricOfLists(Piece):
    """A metric that keeps all it has seen."""

    def plant(self) -> None:
        from torchmetrics import CatMetric

        self.seen = CatMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.seen.update(out.detach().mean())
        return out * (1 + self.seen.compute().mean())


class RunningMetric(Piece):
    def plant(self) -> None:
        from torchmetrics import MeanMetric
        from torchmetrics.wrappers import Running

        self.mean = Running(MeanMetric(), window=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.mean(out.detach().abs().sum())
        return out * (1 + torch.tanh(self.mean.compute()))


class Cache(Piece):
    """Keys and values of a transformer, kept from call to call."""

    def plant(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        keys, _ = self.cache.update(out.detach().mean(0).view(1, 1, 1, WIDTH), torch.zeros(1, 1, 1, WIDTH), 0)
        return out + keys.mean((0, 1, 2))


class Config(Piece):
    """A configuration of transformers that is changed."""

    def plant(self) -> None:
        from transformers import PretrainedConfig

        self.config = PretrainedConfig(rate=1.0)

    def move(self) -> Value:
        self.config.rate *= 0.9
        return float(self.config.rate)


class PydanticModel(Piece):
    def plant(self) -> None:
        self.state = _pydantic()

    def move(self) -> Value:
        self.state.calls += 1
        self.state.window.append(0.1)
        return float(self.state.calls + len(self.state.window)) / 20


def _pydantic() -> Any:
    from pydantic import BaseModel

    class State(BaseModel):
        calls: int = 0
        window: list[float] = []

    return State()


class Attrs(Piece):
    def plant(self) -> None:
        import attrs

        self.state = attrs.make_class("State", {"calls": attrs.field(default=0)})()

    def move(self) -> Value:
        self.state.calls += 1
        return float(self.state.calls) / 10


class SortedList(Piece):
    def plant(self) -> None:
        from sortedcontainers import SortedList

        self.values = SortedList([0.5])

    def move(self) -> Value:
        self.values.add((len(self.values) * 7 % 10) / 10)
        return float(self.values[len(self.values) // 2])


class EasyDict(Piece):
    """OmegaConf's kin: a dictionary of PyYAML's, changed in training."""

    def plant(self) -> None:
        import yaml

        self.config = yaml.safe_load("{optimizer: {rate: 1.0, names: [a, b]}}")

    def move(self) -> Value:
        self.config["optimizer"]["rate"] *= 0.9
        self.config["optimizer"]["names"].append("c")
        return self.config["optimizer"]["rate"] + len(self.config["optimizer"]["names"]) / 20


class Graph(Piece):
    def plant(self) -> None:
        import networkx

        self.graph = networkx.path_graph(3)

    def move(self) -> Value:
        self.graph.add_edge(len(self.graph), 0)
        return len(self.graph) / 20


class MetricOfTask(Training):
    """A metric in the task, whose value weighs the loss."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        from torchmetrics import MeanMetric

        self.mean = MeanMetric()

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().value(model, batch)
        self.mean.update(loss.detach())
        return loss / (0.1 + self.mean.compute())
