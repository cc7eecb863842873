"""Router regret: the loss under the chosen experts − the smallest loss under any set of experts.

One token of one layer uses another set of k experts, weighted by the router's rule. The choices of
all other tokens and layers are fixed; their values are recomputed. The smallest loss uses the
label, which no router knows: compare it with the gain of one set for all tokens. The loss is the
task's, per item; of a text, the mean over the block's words.

N images (blocks of a text), n drawn tokens per image, S sets of k experts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import comb, prod
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics import epoch_routing, interventions
from moecore.measure.values import Chart, Metric, OnPage, Values
from moecore.nn import predict
from moecore.nn.backbones.base_model import Model
from moecore.nn.backbones.language_model import LanguageTransformer
from moecore.nn.encoded_routing import coarse_patch_indices, finest_layout
from moecore.statistics.comparisons import linearize_ratio
from moecore.statistics.intervals import People, every_second_mask
from moecore.tasks.base import Task
from moecore.tasks.image_text import ImageText
from moecore.tasks.next_token import NextToken
from moecore.tasks.regression import Regression

# Units of losses that are not in nats.
UNITS: dict[type[Task], str] = {NextToken: "nats per word", Regression: "deviations"}
ONE_TOKEN_NOTE = "one token of one layer changes its experts; mean over tokens and layers"
METRICS = {
    "router_regret": Metric(
        "Router regret",
        "lower",
        note="loss − smallest loss under any set of as many experts, which uses the label; "
        + ONE_TOKEN_NOTE,
        signed=True,
    ),
    "router_regret_normalised": Metric(
        "Router regret, normalised",
        "lower",
        note=f"regret / regret of a random set: 0 the best set, 1 chance; {ONE_TOKEN_NOTE}",
        signed=True,
    ),
    "better_sets": Metric(
        "Better sets", "lower", "share", f"sets with a smaller loss; {ONE_TOKEN_NOTE}", signed=True
    ),
    "fixed_set_gain": Metric(
        "Gain of one set for all",
        note="loss − loss under the set that is best on the other half of the images; below 0 "
        f"if routing is better; {ONE_TOKEN_NOTE}",
        signed=True,
    ),
}


class RouterRegret(Measurement):
    """Regret of the router: loss of drawn tokens under other sets of experts."""

    metrics = METRICS
    page = OnPage(
        "router regret",
        place=8,
        heading="What routers leave on the table",
        charts=(
            Chart(
                "router_regret_normalised",
                "layer",
                title="Router regret",
                x="MoE layer",
                y="Regret / regret of a random set",
                words="0: the best set of experts for a token, chosen with the label. 1: a random "
                "set.",
            ),
        ),
    )

    images: int | None = Field(32, ge=4, description="Test images, evenly spread; null: all.")
    tokens: int = Field(8, ge=1, description="Random tokens per image, the same for every method.")
    batch: int = Field(256, ge=1, description="Forward passes per batch.")
    explored: int = Field(8, ge=0, description="Explorer's images whose best experts are stored.")

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        if reason := interventions.why_no_expert_can_be_barred(model):
            return reason
        if getattr(model.experts_and_router.router, "groups", None) is not None:
            return "its tokens choose within groups of experts, so that not every set can be chosen"
        if predict.coupled_image_count(model) > 1:
            return "experts have a capacity, so that one token's choice changes another's"
        if isinstance(model.image.task, ImageText):
            return "the loss of an image and its caption depends on the batch's other images"
        return None

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: unit, of the loss; is_exact, whether all sets were tried (otherwise the regret is a
        # lower bound); best, per layer the ``BestChoice``s on images of the explorer.
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.images), self.images)
        shown = np.array(epoch_routing.explorer_image_indices(subject.data, self.explored), int)
        experts = subject.model.experts_and_router.experts.choices
        k = experts - interventions.removable_expert_count(subject.model)
        subsets = interventions.expert_subsets(experts, k, SEED)
        out.people = test.people_at(indices)
        by_image, best = [], []
        for layer in range(len(subject.model.layouts)):
            sample = self.draw_tokens(subject.model, layer, indices)
            compute = partial(subset_losses, subject, layer, sample, subsets, self.batch)
            losses = np.array(out.parts(f"layer {layer}", compute))  # (N, n, S + 1)
            by_image.append(regret_metrics_by_image(losses, out.people))
            for name, values in by_image[-1].items():
                out.put(name, float(values.mean()), layer=layer + 1)
            sample = self.draw_tokens(subject.model, layer, shown, 1)
            compute = partial(subset_losses, subject, layer, sample, subsets, self.batch)
            losses = out.parts(f"explored {layer}", compute)
            best.append(find_best_choices(subject.model, layer, sample, losses, subsets))
        for name, values in means_over_layers(by_image).items():
            out.put(name, values)
        out.facts["subsets"] = len(subsets)
        out.facts["is_exact"] = len(subsets) == comb(experts, k)
        out.facts["unit"] = UNITS.get(type(subject.model.image.task), "nats")
        out.facts["best"] = best

    def draw_tokens(
        self, model: Model, layer: int, images: np.ndarray, *stream: int
    ) -> "DrawnTokens":
        """Draw ``self.tokens`` tokens of a layer per image; stream: integers appended to SEED."""
        generator = np.random.default_rng([SEED, layer, *stream])
        layout = model.layouts[layer]
        length = layout.special + prod(layout.grid)
        rows = [generator.permutation(length)[: self.tokens] for _ in images]
        return DrawnTokens(images, np.array(rows, int).reshape(len(images), -1))


class DrawnTokens(NamedTuple):
    """A random sample of tokens per image, for which a layer tries other experts."""

    images: np.ndarray  # (N,) int, indices in the test split
    tokens: np.ndarray  # (N, n) int


class BestChoice(NamedTuple):
    image: int  # index in the test split
    tokens: list[int]  # on the finest layer's grid
    experts: list[int]  # [] if the router chose the best
    saved: float  # loss − loss under these experts


def subset_losses(
    subject: MeasuredModel, layer: int, sample: DrawnTokens, subsets: np.ndarray, batch: int
) -> list:
    """Return the loss of each image, drawn token and set, the chosen set last: (N, n, S + 1)."""
    model = subject.model
    test = subject.data.test
    device = predict.model_device(model)
    labels = model.targets(torch.from_numpy(np.array(test.labels[sample.images]))).to(device)
    pictures = predict.image_batches(np.array(test.images[sample.images]), 1)
    losses = []
    with torch.no_grad():
        for place, (tokens, image) in enumerate(zip(sample.tokens, pictures, strict=True)):
            pixels = image.to(device)
            records = model(pixels).routing
            later_barred = [~record.chosen for record in records[layer + 1 :]]
            # Per pass all experts but a set are barred for one token; its chosen set comes last.
            chosen = records[layer].chosen[0]
            tried = torch.from_numpy(subsets).to(chosen.device)
            allowed = torch.cat([torch.cat([tried, chosen[token, None]]) for token in tokens])
            masks = chosen.new_zeros(len(allowed), *chosen.shape)  # (n · (S + 1), T, E) bool
            token_of_pass = torch.from_numpy(tokens).repeat_interleave(len(subsets) + 1)
            masks[torch.arange(len(allowed)), token_of_pass] = ~allowed
            if pixels.ndim == 5:
                batch = min(batch, max(1, predict.MAX_VOXELS_PER_BATCH // pixels.numel()))
            passes = build_loss_of_repeated_item(model, pixels, labels[place : place + 1])
            rows = []
            for part in masks.split(batch):
                with interventions.bar_experts(model, [*[None] * layer, part, *later_barred]):
                    rows.append(passes(len(part)))
            losses.append(torch.cat(rows).double().view(len(tokens), -1).tolist())
    return losses


def build_loss_of_repeated_item(
    model: Model, pixels: Tensor, label: Tensor
) -> Callable[[int], Tensor]:
    """Return a function: n → losses (n,) of n copies of an item; experts may be barred per copy."""
    if isinstance(model, LanguageTransformer):
        return predict.build_last_block_reader(model, pixels, label)

    def compute(passes: int) -> Tensor:
        output = model(pixels.expand(passes, *pixels.shape[1:]))
        return model.task_loss(output, label.expand(passes, *label.shape[1:]), reduction="none")

    return compute


def find_best_choices(
    model: Model, layer: int, sample: DrawnTokens, losses: list, subsets: np.ndarray
) -> list[BestChoice]:
    """Return the best expert set of each drawn token, from its losses (N, n, S + 1)."""
    layout = model.layouts[layer]
    fine = finest_layout(model.layouts)
    choices = []
    for image, tokens, rows in zip(sample.images.tolist(), sample.tokens, losses, strict=True):
        for token, (*set_losses, loss) in zip(tokens.tolist(), rows, strict=True):
            saved = loss - min(set_losses)
            experts = subsets[int(np.argmin(set_losses))].nonzero()[0].tolist()
            if saved <= interventions.TOLERANCE:
                saved = 0.0
                experts = []
            places = [token]
            if token >= layout.special and layout != fine:  # a patch covers several of a finer grid
                covered = coarse_patch_indices(layout, fine) == token - layout.special
                places = (covered.nonzero()[:, 0] + fine.special).tolist()
            choices.append(BestChoice(image=image, tokens=places, experts=experts, saved=saved))
    return choices


def regret_metrics_by_image(losses: np.ndarray, people: People = None) -> dict[str, np.ndarray]:
    """Return metric → (N,) by image, from losses (N, n, S + 1) per set, the chosen set last."""
    images, tokens = losses.shape[:2]
    sets = losses[..., :-1].reshape(images * tokens, -1)
    chosen = losses[..., -1].ravel()
    is_first = np.repeat(every_second_mask(images, people), tokens)
    # If sets were sampled, the regret is a lower bound.
    smallest = np.minimum(sets.min(axis=1), chosen)
    is_better = sets < (chosen - interventions.TOLERANCE)[:, None]

    def mean_by_image(values: np.ndarray) -> np.ndarray:
        return values.reshape(images, tokens).mean(axis=1)

    regret = mean_by_image(chosen - smallest)
    room = mean_by_image(sets.mean(axis=1) - smallest)  # the regret of a random set
    by_image = {
        "router_regret": regret,
        "better_sets": mean_by_image(is_better.mean(axis=1)),
        "fixed_set_gain": mean_by_image(interventions.fixed_subset_gain(sets, chosen, is_first)),
    }
    if room.any():
        by_image["router_regret_normalised"] = linearize_ratio(regret, room)
    return by_image


def means_over_layers(by_layer: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return metric → mean over layers, (N,), for the metrics that all layers have."""
    return {
        name: np.mean([values[name] for values in by_layer], axis=0)
        for name in by_layer[0]
        if all(name in values for values in by_layer)
    }
