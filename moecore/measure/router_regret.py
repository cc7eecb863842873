"""Router regret: the loss under the chosen experts against that under every other set of them.

One token of one layer uses another set of k experts, weighted by the router's own rule; the choices
of all other tokens and layers are held, values are computed anew. The smallest loss knows the
label, as no router can: read it beside the best set for all tokens.

N images, T tokens, E experts, S sets.
"""

from collections.abc import Sequence
from math import comb

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.routing_records import RoutingRecord
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement, PartStore
from moecore.measure.item_mean_result import ItemMeans
from moecore.measure.routing_metrics.barred_experts import (
    bar_experts,
    no_barring_reason,
    removable_expert_count,
)
from moecore.measure.routing_metrics.subset_regret import (
    fixed_subset_gain,
    list_subsets,
    subset_regret,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import coupled_image_count, image_batches, model_device
from moecore.statistics.crossed import linearize_ratio


class RouterRegret(Measurement):
    """Which tokens of which images try other experts: a forward pass for each token and set."""

    images: int | None = Field(
        32, ge=4, description="Test images, evenly spread, the same for every method; null: all."
    )
    tokens: int = Field(8, ge=1, description="Of each image, drawn, the same for every method.")
    batch: int = Field(256, ge=1, description="Passes at once.")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: images must have a loss each, tokens a choice of their own."""
        if reason := no_barring_reason(model):
            return reason
        if getattr(model.experts_and_router.router, "groups", None) is not None:
            return "its tokens choose within groups of experts, so that not every set can be chosen"
        if coupled_image_count(model) > 1:
            return "experts have a capacity, so that one token's choice changes another's"
        return model.image.task.needs_classes("classes")

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Return each layer's regret, and means over the layers with intervals over images."""
        test = subject.data.test
        where = evenly_spaced_indices(len(test.images), self.images)
        experts = subject.model.experts_and_router.experts.choices
        k = experts - removable_expert_count(subject.model)
        subsets = list_subsets(experts, k, SEED)
        layers, by_image = [], []
        for layer in range(len(subject.model.layouts)):
            kept = parts(
                f"layer {layer}", lambda layer=layer: layer_losses(subject, self, layer, subsets)
            )
            losses = np.array(kept)  # (N, tokens, S + 1)
            values = regret_metrics_by_image(losses)
            by_image.append(values)
            layers.append({name: float(one.mean()) for name, one in values.items()})
        means = {name: np.mean([one[name] for one in by_image], axis=0) for name in by_image[0]}
        return Result.of(
            means,
            test.people_at(where),
            images=len(where),
            tokens=self.tokens,
            subsets=len(subsets),
            is_exact=len(subsets) == comb(experts, k),
            layers=layers,
        )


class Result(ItemMeans):
    """Means over the MoE layers with intervals over images, and each layer's means.

    regret: nats (the task's loss) that the best set would save, mean over tokens; a lower bound
    where sets are drawn. normalised: regret / that of a random set. better: share of the sets with
    a smaller loss. fixed_gain: what one set for all tokens of a layer would save, chosen on the
    other half of the images; below 0 where routing saves more.
    """

    images: int
    tokens: int  # of each image, at most
    subsets: int
    is_exact: bool  # whether these are all sets
    layers: tuple[dict[str, float], ...]


def layer_losses(
    subject: MeasuredModel, settings: RouterRegret, layer: int, subsets: np.ndarray
) -> list:
    """Return the loss of each image, drawn token and set, the chosen set last: (N, n, S + 1)."""
    model, test = subject.model, subject.data.test
    where = evenly_spaced_indices(len(test.images), settings.images)
    labels = model.targets(torch.from_numpy(np.array(test.labels[where]))).to(model_device(model))
    random = np.random.default_rng([SEED, layer])
    losses = []
    with torch.no_grad():
        for place, image in enumerate(image_batches(np.array(test.images[where]), 1)):
            pixels = image.to(model_device(model))
            records = model(pixels).routing
            tokens = random.permutation(records[layer].chosen.shape[1])[: settings.tokens]
            masks = barred_masks_by_pass(records, layer, tokens, torch.from_numpy(subsets))
            rows = []
            for part in masks.split(settings.batch):
                others = [~record.chosen for record in records[layer + 1 :]]
                barred = [*[None] * layer, part, *others]
                with bar_experts(model, barred):
                    output = model(pixels.expand(len(part), *pixels.shape[1:]))
                answers = labels[place : place + 1].expand(len(part), *labels.shape[1:])
                rows.append(model.task_loss(output, answers, reduction="none"))
            losses.append(torch.cat(rows).double().view(len(tokens), -1).tolist())
    return losses


def barred_masks_by_pass(
    records: Sequence[RoutingRecord], layer: int, tokens: np.ndarray, subsets: Tensor
) -> Tensor:
    """Return what a layer bars in each pass, (n · (S + 1), T, E) bool: of one token all but a set.

    records: of one image, B = 1.  subsets: (S, E) bool; behind them the token's own.
    """
    chosen = records[layer].chosen[0]
    sets = [torch.cat([subsets.to(chosen.device), chosen[token, None]]) for token in tokens]
    allowed = torch.stack(sets).flatten(0, 1)
    barred = torch.zeros(len(allowed), *chosen.shape, dtype=torch.bool, device=chosen.device)
    whose = torch.from_numpy(tokens).repeat_interleave(len(subsets) + 1)
    barred[torch.arange(len(allowed)), whose] = ~allowed
    return barred


def regret_metrics_by_image(losses: np.ndarray) -> dict[str, np.ndarray]:
    """Return each number of ``Result`` as one value an image, (N,), from losses (N, n, S + 1)."""
    images, tokens = losses.shape[:2]
    sets, own = losses[..., :-1].reshape(images * tokens, -1), losses[..., -1].ravel()
    is_first = np.repeat(np.arange(images) % 2 == 0, tokens)
    left = subset_regret(sets, own)
    gain = fixed_subset_gain(sets, own, is_first)
    by_image = {
        name: values.reshape(images, tokens).mean(axis=1)
        for name, values in (
            ("regret", left.regret),
            ("room", left.room),
            ("better", left.better),
            ("fixed_gain", gain),
        )
    }
    room = by_image.pop("room")
    if room.any():
        by_image["normalised"] = linearize_ratio(by_image["regret"], room)
    return by_image
