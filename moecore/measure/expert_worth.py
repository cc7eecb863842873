"""What an expert is worth: the score without it, and without more and more experts (2411.00918).

Tokens choose again among the others, by the router's own rule. And what a token's first, second …
choice is worth, whichever expert that is. N images, L MoE layers, E experts, k chosen per token.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.barred_experts import (
    Way,
    bar_experts,
    drop_choices,
    no_barring_reason,
    removable_expert_count,
)
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.measure.values import Chart, Metric, OnPage, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import model_device, predict_in_batches, text_block_scores
from moecore.statistics.intervals import bootstrap_mean

POINTS = 8  # numbers of removed experts at most, and ranks of a token's choices
ORDERS = {  # which experts are removed
    "most_used": "most used first",
    "least_used": "least used first",
    "random": "random",
}
WAYS: dict[Way, str] = {  # what becomes of a token's other choices
    "as_is": "the others as they are",
    "renormalised": "the others scaled to the old sum",
    "reroute": "the next one in its place",
}
ORDINALS = ("1st", "2nd")  # of the choices that have columns
METRICS = {
    "expert_worth": Metric(
        "Worth of an expert",
        note="what its removal loses of the score, paired by image; positive: it is worse without; "
        "mean over experts and layers",
        signed=True,
    ),
    "needed_experts": Metric(
        "Needed experts",
        form="share",
        note="experts whose removal loses score beyond its interval, each tested by itself",
    ),
}
METRICS |= {
    f"lost_without_{order}": Metric(
        f"Loss without half, {words}",
        note=f"at most half of each layer's experts removed, {words}; of the score, paired by "
        "image; positive: it is worse without",
        signed=True,
        detail=order == "random",
    )
    for order, words in ORDERS.items()
}
METRICS |= {
    f"lost_without_choice_{rank}_{way}": Metric(
        f"Loss without the {ordinal} choice, {words}",
        note=f"every token in every layer goes without it, {words}; of the score, paired by image; "
        "positive: it is worse without",
        signed=True,
        detail=way != "as_is",
    )
    for rank, ordinal in enumerate(ORDINALS, 1)
    for way, words in WAYS.items()
}
METRICS |= {f"lost_without_choice_{way}": Metric("", signed=True) for way in WAYS}


class ExpertWorth(Measurement):
    """Which images lose experts; which experts are used most is counted on the validation split."""

    metrics = METRICS
    page = OnPage(
        "what experts are worth",
        place=8,
        heading="What experts are worth",
        charts=(
            Chart(
                *("lost_without_most_used", "removed", "Most used experts removed"),
                *("Experts removed from every layer", "Loss"),
                words="Loss of the score.",
            ),
        ),
        about="expert_worth",
    )

    images: int | None = Field(
        500, ge=2, description="Test images, evenly spread, the same for every method; null: all."
    )
    batch: int = Field(256, ge=1, description="Images a forward pass.")
    draws: int = Field(5, ge=1, description="Of the random experts that are removed for comparison")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: a router must choose some of the experts by scores."""
        return no_barring_reason(model)

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put what each expert is worth, and what is lost without several in every layer.

        A loss is positive where the score is worse without. facts: load, (L, E), each expert's
        share of the choices on validation images.
        """
        model = subject.model
        layers, experts = len(model.layouts), model.experts_and_router.experts.choices
        known = load_of_validation(subject, self)
        full = np.array(
            out.parts("all", lambda: scores_without_experts(subject, self, nullcontext()))
        )

        def lost(name: str, change: AbstractContextManager) -> np.ndarray:
            left = np.array(out.parts(name, lambda: scores_without_experts(subject, self, change)))
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
        out.people = people
        out.put("expert_worth", alone.mean(axis=(0, 1)))
        lows = []
        for layer, expert in np.ndindex(layers, experts):
            interval = bootstrap_mean(alone[layer, expert], lowest=-np.inf, people=people)
            out.put("expert_worth", interval, layer=layer + 1, expert=expert)
            lows.append(interval.low or 0.0)
        out.put("needed_experts", float(np.mean(np.array(lows) > 0)))
        put_removals(model, lost, known, self.draws, out)
        put_ranks(model, lost, out)
        out.facts["load"] = known / known.sum(dim=1, keepdim=True)


# name of a part and a change of the model → what the score of each image loses, (N,)
Lost = Callable[[str, AbstractContextManager], np.ndarray]


def put_removals(model: Model, lost: Lost, known: Tensor, draws: int, out: Values) -> None:
    """Put what is lost without some numbers of experts in every layer, by which they are; random:
    the mean over draws, each layer its own, whose interval is over images alone.

    known: (L, E) how often each is chosen. The columns are of at most half of the experts.
    """
    layers, experts = known.shape
    without = partial(remove_experts, model)
    most_used = known.argsort(dim=1, descending=True, stable=True).tolist()
    numbers = expert_counts_to_remove(removable_expert_count(model))
    shown = max([number for number in numbers if 2 * number <= experts], default=numbers[0])
    for number in numbers:
        drawn = [
            lost(f"random {number} {draw}", without(draw_experts(layers, experts, number, draw)))
            for draw in range(draws)
        ]
        losses = {
            "most_used": lost(f"most {number}", without([one[:number] for one in most_used])),
            "least_used": lost(f"least {number}", without([one[-number:] for one in most_used])),
            "random": np.mean(drawn, axis=0),
        }
        for order, values in losses.items():
            name = f"lost_without_{order}"
            out.put(name, values, removed=number)
            if number == shown:
                out.put(name, values)


def put_ranks(model: Model, lost: Lost, out: Values) -> None:
    """Put what is lost where every token goes without one of its choices, by what becomes of the
    others; POINTS choices at most.
    """
    choices = model.experts_and_router.experts.choices - removable_expert_count(model)
    for rank in range(1, min(POINTS, choices) + 1):
        for way in WAYS:
            values = lost(f"rank {rank} {way}", drop_choices(model, rank, way))
            out.put(f"lost_without_choice_{way}", values, rank=rank)
            if rank <= len(ORDINALS):
                out.put(f"lost_without_choice_{rank}_{way}", values)


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
