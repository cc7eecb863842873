"""A model of age and a simulation whose answers are known."""

import numpy as np
import torch
from torch import nn

from moecore.core.records import ModelOutput


class Brightness(nn.Module):
    """Answers with 100 times the mean of the voxels that are not 0; 0 for an empty volume.

    Its head reads the same number.
    """

    moe = None

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, volumes: torch.Tensor) -> ModelOutput:
        found = volumes.flatten(1)
        mean = found.sum(1) / (found != 0).sum(1).clamp(min=1)
        return ModelOutput(self.head((100 * mean)[:, None]))


class Source:
    """People of brightness age / 100, a tenth of a year brighter in a second scan.

    Ten years brighter at another site; asks are noted.
    """

    subjects = 40

    def __init__(self) -> None:
        self.asked = []

    def person_seed(self, number: int) -> int:
        return 7_000_000 + number

    def draw(self, age, sex, seed, scan, site):
        self.asked.append((age, sex, seed, scan, site))
        return np.full((1, 2, 2, 2), (age + scan / 10 + 10 * site) / 100, np.float32), None
