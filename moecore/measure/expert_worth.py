"""What an expert is worth: the score without it, and without more and more experts (2411.00918).

Tokens choose again among the others, by the router's own rule. And what a token's first, second …
choice is worth, whichever expert that is. N images, L MoE layers, E experts, k chosen per token.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import SEED, Estimate, MeasuredModel, Measurement, PartStore
from moecore.measure.item_mean_result import ItemMeans
from moecore.measure.routing_metrics.barred_experts import (
    bar_experts,
    no_barring_reason,
    removable_expert_count,
)
from moecore.measure.routing_metrics.dropped_choices import Way, drop_choices
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import model_device, predict_in_batches, text_block_scores
from moecore.statistics.intervals import bootstrap_mean

POINTS = 8  # numbers of removed experts at most, and ranks of a token's choices


class ExpertWorth(Measurement):
    """Which images lose experts; which experts are used most is counted on the validation split."""

    images: int | None = Field(
        500, ge=2, description="Test images, evenly spread, the same for every method; null: all."
    )
    batch: int = Field(256, ge=1, description="Images a forward pass.")
    draws: int = Field(5, ge=1, description="Of the random experts that are removed for comparison")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: a router must choose some of the experts by scores."""
        return no_barring_reason(model)

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Return what each expert is worth, and what is lost without several in every layer."""
        model = subject.model
        layers, experts = len(model.layouts), model.experts_and_router.experts.choices
        known = load_of_validation(subject, self)
        full = np.array(parts("all", lambda: scores_without_experts(subject, self, nullcontext())))

        def lost(name: str, change: AbstractContextManager) -> np.ndarray:
            left = np.array(parts(name, lambda: scores_without_experts(subject, self, change)))
            sign = {"higher": 1, "lower": -1}[model.image.task.score.better]
            return sign * (full - left)

        def expert_losses(layer: int) -> list[np.ndarray]:
            return [
                lost(
                    f"layer {layer} expert {expert}",
                    remove_experts(model, single_removal_plan(layers, layer, expert)),
                )
                for expert in range(experts)
            ]

        alone = np.array([expert_losses(layer) for layer in range(layers)])
        split = subject.data.test
        people = split.people_at(evenly_spaced_indices(len(split.images), self.images))

        return Result.of(
            {"worth": alone.mean(axis=(0, 1))},
            people,
            images=len(full),
            score=float(full.mean()),
            layers=[
                [Estimate.of(bootstrap_mean(one, lowest=-np.inf, people=people)) for one in layer]
                for layer in alone
            ],
            load=(known / known.sum(dim=1, keepdim=True)).tolist(),
            removal=removal_rows(model, lost, known, self.draws, people),
            ranks=rank_rows(model, lost, people),
        )


class RemovalCountRow(ItemMeans):
    """What the score loses by every layer without so many experts: by which of them are removed.

    values, items: most_used, least_used; random, the mean over draws, each layer its own, whose
    interval is over images alone.
    """

    removed: int


class RankRow(ItemMeans):
    """What the score loses where every token goes without one choice, in every layer.

    values, items: by what becomes of the token's others (``dropped_choices.Way``).
    """

    rank: int  # of that choice by probability, from 1


class Result(ItemMeans):
    """A loss is positive where the score is worse without. worth: mean over layers and experts."""

    images: int
    score: float  # the task's, of the same images with all experts
    layers: tuple[tuple[Estimate, ...], ...]  # (L, E), what the score loses without one expert
    load: tuple[tuple[float, ...], ...]  # (L, E), share of the choices on validation images
    removal: tuple[RemovalCountRow, ...]
    ranks: tuple[RankRow, ...]  # k at most


# name of a part and a change of the model → what the score of each image loses, (N,)
Lost = Callable[[str, AbstractContextManager], np.ndarray]


def removal_rows(
    model: Model, lost: Lost, known: Tensor, draws: int, people: np.ndarray | None
) -> list[RemovalCountRow]:
    """Return a row for each of some numbers of removed experts.

    known: (L, E) how often each is chosen.
    """
    layers, experts = known.shape
    without = partial(remove_experts, model)
    most_used = known.argsort(dim=1, descending=True, stable=True).tolist()
    rows = []
    for number in expert_counts_to_remove(removable_expert_count(model)):
        drawn = [
            lost(f"random {number} {draw}", without(draw_experts(layers, experts, number, draw)))
            for draw in range(draws)
        ]
        values = {
            "most_used": lost(f"most {number}", without([one[:number] for one in most_used])),
            "least_used": lost(f"least {number}", without([one[-number:] for one in most_used])),
            "random": np.mean(drawn, axis=0),
        }
        rows.append(RemovalCountRow.of(values, people, removed=number))
    return rows


def rank_rows(model: Model, lost: Lost, people: np.ndarray | None) -> list[RankRow]:
    """Return a row for each of a token's choices, POINTS at most."""
    choices = model.experts_and_router.experts.choices - removable_expert_count(model)
    rows = []
    for rank in range(1, min(POINTS, choices) + 1):
        values = {
            way: lost(f"rank {rank} {way}", drop_choices(model, rank, way)) for way in get_args(Way)
        }
        rows.append(RankRow.of(values, people, rank=rank))
    return rows


def load_of_validation(subject: MeasuredModel, settings: ExpertWorth) -> Tensor:
    """Return how often each layer's experts are chosen on validation images, (L, E) fp64."""
    images = evenly_spaced_images(subject.data.validation, settings)
    _, records = predict_in_batches(subject.model, images, settings.batch, prediction=False)
    return torch.stack([expert_counts(record.chosen) for record in records]).double()


def remove_experts(model: Model, removed: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Return ``bar_experts`` of the ``removed`` experts of each layer."""
    every = torch.arange(model.experts_and_router.experts.choices)
    masks = [torch.isin(every, torch.tensor(one).long()) for one in removed]
    return bar_experts(model, [mask.to(model_device(model)) for mask in masks])


def scores_without_experts(
    subject: MeasuredModel, settings: ExpertWorth, change: AbstractContextManager
) -> list[float]:
    """Return the score of each test image under a change of the model."""
    model, split, task = subject.model, subject.data.test, subject.model.image.task
    where = evenly_spaced_indices(len(split.images), settings.images)
    images, labels = (
        evenly_spaced_images(split, settings),
        torch.from_numpy(np.array(split.labels[where])),
    )
    with change:
        if task.long:
            return text_block_scores(model, images, labels).tolist()
        prediction, _ = predict_in_batches(model, images, settings.batch, routing=False)
    return task.scores(prediction, model.targets(labels)).double().tolist()


def evenly_spaced_images(split: Split, settings: ExpertWorth) -> np.ndarray:
    """Return as many images of the split as are measured, evenly spread."""
    return np.array(split.images[evenly_spaced_indices(len(split.images), settings.images)])


def single_removal_plan(layers: int, layer: int, expert: int) -> list[list[int]]:
    """Return the removed experts of each layer: this one of this layer."""
    return [[expert] if place == layer else [] for place in range(layers)]


def draw_experts(layers: int, experts: int, number: int, draw: int) -> list[list[int]]:
    """Return so many experts of each layer by chance; a larger number of one draw has them all."""
    random = np.random.default_rng([SEED, draw])
    return [random.permutation(experts)[:number].tolist() for _ in range(layers)]


def expert_counts_to_remove(most: int) -> list[int]:
    """Return numbers of experts to remove, at most POINTS of them, evenly spread up to ``most``."""
    spread = np.linspace(0, most, min(most, POINTS) + 1)[1:]
    return [int(number) for number in spread.round()]
