"""A part of every family that needs more than settings, written with public names alone."""

from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

import moecore
from moecore import UserError, parts, testing

SIDE = 8
STRIPED = parts.Classification(classes=("along", "across"))


class Stripes(parts.Source):
    """Eight images a split, striped along or across."""

    task: ClassVar[type[parts.Task]] = parts.Classification
    kind: Literal["my_lab.stripes"] = "my_lab.stripes"
    seed: int = 0

    def describe(self):
        counts = dict.fromkeys(("train", "validation", "test"), (4, 4))
        return parts.Card("Stripes", 1, SIDE, STRIPED, "CC0", "drawn", counts)

    def write(self, folder):
        labels = np.arange(8) % 2
        image = np.tile(np.arange(SIDE, dtype=np.uint8) * 30, (SIDE, 1))
        images = np.stack([image if label else image.T for label in labels])[:, None]
        split = parts.SplitToWrite(labels, [images])
        splits = dict.fromkeys(("train", "validation", "test"), split)
        return parts.write_images(folder, self, self.describe(), splits)


class Weight(parts.Task):
    """One number per image: its error is the score."""

    kind: Literal["my_lab.weight"] = "my_lab.weight"
    outputs: ClassVar[int] = 1
    answers: ClassVar[tuple[str, ...]] = ("weight",)
    score: ClassVar[parts.Score] = parts.Score("error", "absolute error", "kg", "number", "lower")

    def loss(self, prediction, labels, label_smoothing=0.0, reduction="mean"):
        errors = self.attack_loss(prediction, labels)
        return errors.mean() if reduction == "mean" else errors

    def attack_loss(self, prediction, labels):
        return (prediction[:, 0] - labels.to(prediction)).square()

    def test_loss(self, prediction, labels):
        return self.attack_loss(prediction.double(), labels)

    def scores(self, prediction, labels):
        return (prediction[:, 0].double() - labels.double()).abs()

    def running(self, prediction, labels, learned=None):
        return (prediction[:, 0] - labels).abs().sum()

    def baseline_score(self, labels):
        return float((labels - labels.median()).abs().mean())

    def storage_format(self, images):
        return (images,), np.float32

    def check(self, labels, what):
        if not np.isfinite(labels).all():
            raise moecore.UserError(f"{what} are not finite; allowed: kilograms")

    @classmethod
    def needs_classes(cls, what):
        return "a weight has no classes"


class Linear(parts.Experts):
    """One matrix per expert."""

    kind: Literal["my_lab.linear"] = "my_lab.linear"
    number: int = 4

    def build(self, width):
        return Matrices(self.number, width)


class Matrices(parts.ExpertsModule):
    def __init__(self, experts: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, width))

    def forward(self, rows: parts.Rows) -> torch.Tensor:
        pieces = rows.values.tensor_split(rows.offsets[:-1].tolist())
        return torch.cat([piece @ one for piece, one in zip(pieces, self.weight, strict=True)])


class Flat(parts.Backbone):
    """One feed-forward over the whole image as one token."""

    kind: Literal["my_lab.flat"] = "my_lab.flat"
    depth: ClassVar[int] = 1
    width: int = 16

    def grid(self, image: parts.ImageSpec):
        return (1, 1)

    def build(
        self, image: parts.ImageSpec, moe: parts.MoESettings | None = None
    ) -> parts.BackboneModel:
        return FlatModel(self, image, moe)


class FlatModel(parts.BackboneModel):
    depth: ClassVar[int] = 1

    def __init__(self, config, image, moe):
        super().__init__(config, image, moe)
        self.embed = nn.Linear(image.channels * image.size**2, config.width)
        self.mlp = nn.Linear(config.width, config.width) if moe is None else moe.build(config.width)
        self.head = nn.Linear(config.width, image.outputs)

    @property
    def layout(self):
        return parts.TokenLayout(0, (1, 1), self.image.shape)

    def encode(self, images, options=parts.EncodeOptions()):
        entering = self.embed(self.normalised(images).flatten(1))[:, None]
        tokens, records = self.mlp(entering), ()
        if self.moe is not None:
            context = self.routing_contexts(images, options).get(0, parts.RoutingContext())
            tokens, records = self.mlp(entering, context)
        feature = options.select_tokens(entering, tokens)
        return parts.Encoded(tokens, records, (feature,) * len(options.blocks))

    def heads(self, tokens):
        return (self.head(tokens[:, 0]),)


class Untrained(parts.Teacher):
    """A small ViT of one seed."""

    kind: Literal["my_lab.untrained"] = "my_lab.untrained"

    def build(self, image: parts.ImageSpec) -> parts.BackboneModel:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return moecore.backbones.Vit(patch=4, width=16, depth=1, heads=2).build(image)


def test_they_keep_what_families_promise_and_an_old_source_is_told_what_to_write(tmp_path):
    with pytest.raises(ImportError, match="DatasetInfo; allowed: Card, write_images"):
        exec("from moecore.parts import DatasetInfo")
    with pytest.raises(UserError, match="Old: found prepare; allowed: describe, write"):
        type("Old", (Stripes,), {"__module__": __name__, "prepare": Stripes.write})
    assert testing.check_source(Stripes, tmp_path).task == STRIPED
    kilograms = np.array([60.0, 80.0], np.float32)
    testing.check_task(Weight(), torch.tensor([[61.0], [77.0]]), kilograms, np.array([np.nan]))
    testing.check_experts(Linear)
    testing.check_backbone(Flat)
    testing.check_teacher(Untrained)
