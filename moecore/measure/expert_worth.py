"""Measure the score that a model loses without some of its experts (2411.00918).

Tokens choose among the remaining experts by the router's rule. Also the loss if every token drops
its first, second … choice. L MoE layers of E experts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.data.prepared import Split, evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics import interventions
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.measure.values import Chart, Metric, OnPage, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import model_device, predict_in_batches, score_last_blocks
from moecore.statistics.intervals import bootstrap_mean

MAX_POINTS = 8  # numbers of removed experts, and ranks of a token's choices
ORDERS = {  # which experts are removed
    "most_used": "most used first",
    "least_used": "least used first",
    "random": "random",
}
WAYS_TO_DROP_CHOICE: dict[interventions.Way, str] = {  # a token's other choices
    "as_is": "the others as they are",
    "renormalised": "the others scaled to the old sum",
    "reroute": "the next one in its place",
}
ORDINALS = ("1st", "2nd")  # choices that have columns
METRICS = {
    "expert_worth": Metric(
        "Worth of an expert",
        note="loss of score by its removal, paired by image; positive: worse without it; mean over "
        "experts and layers",
        signed=True,
    ),
    "needed_experts": Metric(
        "Needed experts",
        form="share",
        note="experts whose removal loses score, with an interval above 0, each tested separately",
    ),
}
METRICS |= {
    f"lost_without_{order}": Metric(
        f"Loss without half, {label}",
        note=f"at most half of each layer's experts removed, {label}; loss of score, paired by "
        "image; positive: worse without them",
        signed=True,
        detail=order == "random",
    )
    for order, label in ORDERS.items()
}
METRICS |= {
    f"lost_without_choice_{rank}_{way}": Metric(
        f"Loss without the {ordinal} choice, {label}",
        note=f"dropped for every token in every layer, {label}; loss of score, paired by image; "
        "positive: worse without it",
        signed=True,
        detail=way != "as_is",
    )
    for rank, ordinal in enumerate(ORDINALS, 1)
    for way, label in WAYS_TO_DROP_CHOICE.items()
}
METRICS |= {f"lost_without_choice_{way}": Metric("", signed=True) for way in WAYS_TO_DROP_CHOICE}


class ExpertWorth(Measurement):
    """Drop in score without one expert, or the most or least used (on validation) of each layer."""

    metrics = METRICS
    page = OnPage(
        "what experts are worth",
        place=8,
        heading="What experts are worth",
        charts=(
            Chart(
                "lost_without_most_used",
                "removed",
                title="Most used experts removed",
                x="Experts removed from every layer",
                y="Loss",
                words="Loss of the score.",
            ),
        ),
        about="expert_worth",
    )

    images: int | None = Field(500, ge=2, description="Test images, evenly spread; null: all.")
    batch: int = Field(256, ge=1, description="Images per forward pass.")
    draws: int = Field(5, ge=1, description="Random draws of removed experts, for comparison.")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        return interventions.why_no_expert_can_be_barred(model)

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # Losses are positive if the score is worse without. facts: load, (L, E), each expert's
        # share of the choices on validation images.
        model = subject.model
        layers = len(model.layouts)
        experts = model.experts_and_router.experts.choices
        images = read_evenly_spaced_images(subject.data.validation, self)
        _, records = predict_in_batches(model, images, self.batch, prediction=False)
        counts = torch.stack([expert_counts(record.chosen) for record in records]).double()

        def load_scores(name: str, change: AbstractContextManager) -> np.ndarray:
            return np.array(out.parts(name, lambda: scores_without_experts(subject, self, change)))

        full = load_scores("all", nullcontext())
        sign = {"higher": 1, "lower": -1}[model.image.task.score.better]

        def measure_loss(name: str, change: AbstractContextManager) -> np.ndarray:
            return sign * (full - load_scores(name, change))

        losses = np.empty((layers, experts, len(full)))
        for layer, expert in np.ndindex(layers, experts):
            removed = [[expert] if index == layer else [] for index in range(layers)]
            change = remove_experts(model, removed)
            losses[layer, expert] = measure_loss(f"layer {layer} expert {expert}", change)
        split = subject.data.test
        out.people = split.people_at(evenly_spaced_indices(len(split.images), self.images))
        out.put("expert_worth", losses.mean(axis=(0, 1)))
        lows = []
        for layer, expert in np.ndindex(layers, experts):
            interval = bootstrap_mean(losses[layer, expert], lowest=-np.inf, people=out.people)
            out.put("expert_worth", interval, layer=layer + 1, expert=expert)
            lows.append(interval.low or 0.0)
        out.put("needed_experts", float(np.mean(np.array(lows) > 0)))
        put_removal_losses(model, measure_loss, counts, self.draws, out)
        choices = experts - interventions.removable_expert_count(model)
        for rank, way in product(range(1, min(MAX_POINTS, choices) + 1), WAYS_TO_DROP_CHOICE):
            change = interventions.drop_ranked_choice(model, rank, way)
            values = measure_loss(f"rank {rank} {way}", change)
            out.put(f"lost_without_choice_{way}", values, rank=rank)
            if rank <= len(ORDINALS):
                out.put(f"lost_without_choice_{rank}_{way}", values)
        out.facts["load"] = counts / counts.sum(dim=1, keepdim=True)


# name of the stored result, context that changes the model → loss of score per image, (N,)
MeasureLoss = Callable[[str, AbstractContextManager], np.ndarray]


def put_removal_losses(
    model: Model, measure_loss: MeasureLoss, counts: Tensor, draws: int, out: Values
) -> None:
    """Put the loss of score without the most used, least used or random experts of every layer."""
    # counts: (L, E), tokens per expert; draws: random sets per number of removed experts.
    layers, experts = counts.shape
    by_use = counts.argsort(dim=1, descending=True, stable=True).tolist()
    numbers = expert_counts_to_remove(interventions.removable_expert_count(model))
    shown = max([number for number in numbers if 2 * number <= experts], default=numbers[0])

    def lost_without(name: str, removed: Sequence[Sequence[int]]) -> np.ndarray:
        return measure_loss(name, remove_experts(model, removed))

    for number in numbers:
        # Drawn per layer; the interval of their mean is over images, not over draws.
        random = [
            lost_without(f"random {number} {draw}", draw_experts(layers, experts, number, draw))
            for draw in range(draws)
        ]
        losses = {
            "most_used": lost_without(f"most {number}", [order[:number] for order in by_use]),
            "least_used": lost_without(f"least {number}", [order[-number:] for order in by_use]),
            "random": np.mean(random, axis=0),
        }
        for order, values in losses.items():
            name = f"lost_without_{order}"
            out.put(name, values, removed=number)
            if number == shown:
                out.put(name, values)


def remove_experts(model: Model, removed: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Return a context in which no token can choose the ``removed`` experts of each layer."""
    experts = torch.arange(model.experts_and_router.experts.choices)
    masks = [torch.isin(experts, torch.tensor(barred).long()) for barred in removed]
    return interventions.bar_experts(model, [mask.to(model_device(model)) for mask in masks])


def scores_without_experts(
    subject: MeasuredModel, settings: ExpertWorth, change: AbstractContextManager
) -> list[float]:
    """Return each measured test image's score, (N,); change: a context that alters the model."""
    model = subject.model
    split = subject.data.test
    task = subject.model.image.task
    indices = evenly_spaced_indices(len(split.images), settings.images)
    images = read_evenly_spaced_images(split, settings)
    labels = torch.from_numpy(np.array(split.labels[indices]))
    with change:
        if task.long:
            return score_last_blocks(model, images, labels).tolist()
        prediction, _ = predict_in_batches(model, images, settings.batch, routing=False)
    return task.scores(prediction, model.targets(labels)).double().tolist()


def read_evenly_spaced_images(split: Split, settings: ExpertWorth) -> np.ndarray:
    return np.array(split.images[evenly_spaced_indices(len(split.images), settings.images)])


def draw_experts(layers: int, experts: int, number: int, draw: int) -> list[list[int]]:
    """Draw ``number`` experts per layer; with equal ``draw``, larger sets include smaller ones."""
    generator = np.random.default_rng([SEED, draw])
    return [generator.permutation(experts)[:number].tolist() for _ in range(layers)]


def expert_counts_to_remove(largest: int) -> list[int]:
    spread = np.linspace(0, largest, min(largest, MAX_POINTS) + 1)[1:]
    return [int(number) for number in spread.round()]
