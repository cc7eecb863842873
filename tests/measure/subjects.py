"""Small untrained models on the digits, as measurements get them."""

from pathlib import Path

import torch
from torch import nn

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
