"""Small untrained models on the digits, as measurements get them; a model of age and a simulation
whose answers are known.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from moecore.core.records import ModelOutput
from moecore.data.prepared import Prepared
from moecore.data.sources.digits import Digits
from moecore.measure.base import Subject
from moecore.nn.backbones import Backbone
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.layers.moe import MoE


def digits(folder: Path) -> Prepared:
    """60 test images of 12 × 12 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    Digits(size=12, train_limit=50, test_limit=60).prepare(folder)
    return Prepared.open(folder)


def built(backbone: Backbone, moe: MoE | None, data: Prepared, factor: float) -> nn.Module:
    """With weights ``factor`` times as large: a router that prefers some experts."""
    torch.manual_seed(1)
    model = backbone.build(ImageSpec.from_card(data.card), moe)
    for parameter in model.parameters():
        parameter.data *= factor
    return model.eval()


def measured_twice(measurement, subject: Subject, settings) -> object:
    """The result, the same again from the parts that were kept, drawing no random number."""
    kept = {}
    computed = []

    def parts(name, compute):
        if name not in kept:
            computed.append(name)
            kept[name] = compute()
        return kept[name]

    before = torch.get_rng_state()
    first = measurement(subject, settings, parts)
    assert torch.equal(torch.get_rng_state(), before)
    number = len(computed)
    assert measurement(subject, settings, parts) == first
    assert len(computed) == len(set(computed)) == number
    return first


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
