"""Whether experts are what generated data says they should be: routing against the truth.

N images, T tokens per image, E experts, D kinds of tokens. Adjusted mutual information after Vinh,
Epps & Bailey (2010); the null permutes whole images' truths, which keeps their form.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moecore.attacks.attack_setup import Target
from moecore.attacks.pgd import Pgd
from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord, TokenLayout, first_choices
from moecore.data.image_noise import SIGMAS
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement, load_or_compute
from moecore.measure.routing_metrics.expert_information import (
    FEWEST,
    mutual_information,
    permute_images,
)
from moecore.measure.routing_metrics.purity import (
    expert_purity,
    expert_truth_tables,
    purity_over_layers,
    token_kinds,
)
from moecore.measure.routing_metrics.sweeps import (
    ChangedImages,
    attack_variants,
    noise_variants,
)
from moecore.measure.values import Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_interval

PERMUTATIONS = 200
RESAMPLES = 1000
CHANGED = 500  # images that get noise and are attacked
EPSILONS = (2 / 255, 4 / 255, 8 / 255)  # of the attack
ATTACK = Pgd(steps=10)
BATCH = 128
PIXEL = 255  # ε of the attack is told in 1/255
METRICS = {
    "purity": Metric(
        "Purity",
        "higher",
        "share",
        note="tokens that are of their expert's most frequent kind, over test images; mean over "
        "MoE layers",
    ),
    "purity_chance": Metric(
        "Purity by chance",
        form="share",
        note="the same with the images' truths permuted",
        detail=True,
    ),
    "adjusted_mutual_information": Metric(
        "AMI of expert and truth",
        "higher",
        note="adjusted mutual information, 0 by chance and 1 if equal, over test images; mean over "
        "MoE layers",
    ),
    "normalised_mutual_information": Metric(
        "NMI of expert and truth",
        "higher",
        note="mutual information / mean entropy, over test images; mean over MoE layers",
        detail=True,
    ),
    "matched_to_truth": Metric(
        "Matched to the truth",
        "higher",
        "share",
        note="tokens that are right under the best one-to-one matching of experts and kinds, over "
        "test images; mean over MoE layers",
    ),
    "changed_purity": Metric(
        "Purity, {}",
        "higher",
        "share",
        note="of some of the images with this change, over test images; mean over MoE layers",
        over="change",
        name="purity_{}",
        detail=True,
    ),
    # of each layer: in nats, from the counts; its mean over permutations; the share of these,
    # itself among them, with as much
    "mutual_information": Metric(""),
    "mutual_information_chance": Metric(""),
    "mutual_information_p": Metric(""),
}


class Truth(Measurement):
    """Which test images; their experts are those of each token's first choice."""

    metrics = METRICS
    page = OnPage("experts and truth", place=7)

    images: int | None = Field(
        None, ge=FEWEST, description="Test images, evenly spread; null: all of them."
    )

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: it needs routers, and tokens whose kind is known."""
        if not model.image.truth:
            return "nobody knows the truth of these data's tokens; their card says none"
        if model.moe is None:
            return "the model has no routers"
        return None

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return the words of a ``change_key``."""
        kind, _, strength = str(place).partition("_")
        unit = {"noise": "σ", "attack": f"ε in 1/{PIXEL}"}[kind]
        return f"{kind}, {unit} = {strength.replace('_', '.')}"

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the changes of images."""
        noise = [change_key("noise", sigma) for sigma in SIGMAS]
        return {"change": [*noise, *(change_key("attack", PIXEL * one) for one in EPSILONS)]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put each layer's agreement of experts and truth, and means over the layers.

        facts: counts, of each layer (E, D), in the matching's order of experts.
        """
        where = evenly_spaced_indices(len(subject.data.test.labels), self.images)
        pixels = torch.from_numpy(np.array(subject.data.test.images[where]))
        _, records = predict_in_batches(subject.model, pixels, prediction=False)
        layers = []
        for index, (record, layout) in enumerate(zip(records, subject.model.layouts, strict=True)):

            def compute(record: RoutingRecord = record, layout: TokenLayout = layout) -> TruthLayer:
                kinds, truth = token_kinds(pixels, layout), subject.model.image.truth
                return truth_layer(first_choices(record), kinds, record.probs.shape[-1], truth)

            layers.append(load_or_compute(out.parts, f"layer {index}", TruthLayer, compute))
        for number, layer in enumerate(layers, 1):
            for name, value in layer.values().items():
                out.put(name, value, layer=number)
        for name in layers[0].values():
            numbers = [layer.values()[name] for layer in layers]
            mean = Interval(sum(number.value for number in numbers) / len(numbers))
            out.put(name, mean if len(numbers) > 1 else numbers[0])
        out.facts["counts"] = [layer.counts for layer in layers]
        if not subject.model.image.task.long:  # words have no pixels to change
            out.piece("changed", partial(put_perturbed_purity, subject))


class TruthLayer(Config):
    """One layer's experts against the truth; limits are of 95 %, over images."""

    purity: float  # share of tokens that are of their expert's most frequent kind
    purity_low: float | None
    purity_high: float | None
    purity_chance: float  # mean over permutations of the images' truths
    mutual_information: float  # nats, from the counts
    mutual_information_chance: float
    p: float  # share of permutations, itself among them, with as much mutual information
    normalised: float  # mutual information / mean of the two entropies
    adjusted: float
    matched: float  # share of tokens that the best one-to-one matching puts right
    counts: tuple[tuple[int, ...], ...]  # (E, D), in the matching's order of experts

    def values(self) -> dict[str, Interval]:
        """Return the numbers by their metrics."""
        return {
            "purity": Interval(self.purity, self.purity_low, self.purity_high),
            "purity_chance": Interval(self.purity_chance),
            "adjusted_mutual_information": Interval(self.adjusted),
            "normalised_mutual_information": Interval(self.normalised),
            "matched_to_truth": Interval(self.matched),
            "mutual_information": Interval(self.mutual_information),
            "mutual_information_chance": Interval(self.mutual_information_chance),
            "mutual_information_p": Interval(self.p),
        }


def change_key(kind: str, strength: float) -> str:
    """Return noise_0_2, or attack_8 of ε = 8/255."""
    return f"{kind}_{strength:.3g}".replace(".", "_")


def truth_layer(experts: Tensor, kinds: Tensor, number: int, dialects: int) -> TruthLayer:
    """Return the agreement of experts (N, T) int64 and kinds (N, T), 1 to D; 0 is not counted.

    Raises UserError for too few images, see ``permute_images``.
    """
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    chosen, truth = experts.numpy(), kinds.numpy()
    tables = expert_truth_tables(chosen, truth, number, dialects)
    total = tables.sum(axis=0)
    purity = bootstrap_interval(
        lambda drawn: expert_purity(tables[drawn].sum(axis=0)),
        len(tables),
        RESAMPLES,
        lowest=0.0,
        highest=1.0,
    )
    null_tables = permuted_truth_tables(chosen, truth, number, dialects)
    information = mutual_information(total)
    null_information = np.array([mutual_information(table) for table in null_tables])
    known = (truth > 0) & (chosen >= 0)
    rows, columns = linear_sum_assignment(total, maximize=True)
    matched = rows[columns.argsort()]
    order = [*matched, *np.setdiff1d(np.arange(number), matched)]
    return TruthLayer(
        purity=purity.value,
        purity_low=purity.low,
        purity_high=purity.high,
        purity_chance=float(np.mean([expert_purity(table) for table in null_tables])),
        mutual_information=information,
        mutual_information_chance=float(null_information.mean()),
        p=float((1 + (null_information >= information).sum()) / (PERMUTATIONS + 1)),
        normalised=float(normalized_mutual_info_score(truth[known], chosen[known])),
        adjusted=float(adjusted_mutual_info_score(truth[known], chosen[known])),
        matched=float(total[rows, columns].sum() / total.sum()),
        counts=total[order].tolist(),
    )


def permuted_truth_tables(
    experts: np.ndarray, kinds: np.ndarray, number: int, dialects: int
) -> list[np.ndarray]:
    """Return ``expert_truth_tables`` summed over images, (E, D), with their truths exchanged."""
    return [
        expert_truth_tables(experts, one, number, dialects).sum(axis=0)
        for one in permute_images(kinds, PERMUTATIONS, SEED)
    ]


def put_perturbed_purity(subject: MeasuredModel, out: Values) -> None:
    """Put the purity under noise and under attack, of the same images evenly spread: the mean over
    MoE layers; and of the clean images, as the strength 0 of both.
    """
    model, test = subject.model, subject.data.test
    few = evenly_spaced_indices(len(test.labels), CHANGED)
    images = np.array(test.images[few])
    labels = model.targets(torch.from_numpy(np.array(test.labels[few])))
    target = Target(model, subject.data.task, images, labels, BATCH, SEED)
    clean = target.clean_images()
    noisy = noise_variants(clean, few.tolist(), SIGMAS, SEED, model.image.channels)
    attacked = attack_variants(target, ATTACK, EPSILONS)
    kinds = [token_kinds(torch.from_numpy(images), layout).numpy() for layout in model.layouts]

    def purity_of(variant: ChangedImages) -> Interval:
        _, records = target.predict_images(variant.pixels)
        tables = [
            expert_truth_tables(
                first_choices(record).numpy(), of_layer, record.probs.shape[-1], truth
            )
            for record, of_layer in zip(records, kinds, strict=True)
        ]
        return bootstrap_interval(
            lambda drawn: purity_over_layers([one[drawn].sum(axis=0) for one in tables]),
            len(few),
            RESAMPLES,
            lowest=0.0,
            highest=1.0,
        )

    truth = model.image.truth
    unchanged = purity_of(ChangedImages("clean", "clean", clean))
    out.put("changed_purity", unchanged, noise=0.0)
    out.put("changed_purity", unchanged, attack=0.0)
    strengths = (*SIGMAS, *(PIXEL * epsilon for epsilon in EPSILONS))
    for variant, strength in zip([*noisy, *attacked], strengths, strict=True):
        purity = purity_of(variant)
        out.put("changed_purity", purity, change=change_key(variant.kind, strength))
        out.put("changed_purity", purity, **{variant.kind: strength})
