"""This project's data: scikit-learn's breast cancer table (569 tumours, 30 measurements each, benign or malignant)."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import Dataset

Sample = tuple[torch.Tensor, int]


class Tumours(Dataset[Sample]):
    """Every fifth tumour is for testing. Measurements are standardised with the training part's mean and deviation."""

    def __init__(self, train: bool) -> None:
        table = load_breast_cancer()
        test = np.arange(len(table.target)) % 5 == 0
        mean, deviation = table.data[~test].mean(0), table.data[~test].std(0)
        chosen = ~test if train else test
        self.inputs = torch.from_numpy(((table.data[chosen] - mean) / deviation).astype(np.float32))
        self.labels = table.target[chosen].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.inputs[index], self.labels[index]


def jitter(sample: Sample, generator: torch.Generator) -> Sample:
    """Augmentation: a little noise, the same for a sample and an epoch however often training is interrupted."""
    inputs, label = sample
    return inputs + 0.05 * torch.randn(inputs.shape, generator=generator), label
