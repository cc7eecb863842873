"""Measure how well experts agree with the true kinds of tokens, in generated data.

N images, T tokens per image, E experts, D kinds of tokens. Adjusted mutual information after Vinh,
Epps & Bailey (2010). The null permutes truths among whole images, which keeps their structure.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import scipy
import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks import attack_target, pgd
from moecore.core.config import Config
from moecore.core.routing_records import first_choices
from moecore.data import corruptions, prepared
from moecore.measure import perturbations
from moecore.measure.base import SEED, MeasuredModel, Measurement, load_or_compute
from moecore.measure.routing_metrics import epoch_routing as epochs
from moecore.measure.routing_metrics import label_information
from moecore.measure.values import Metric, OnPage, Place, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval, bootstrap_statistic

PERMUTATIONS = 200
RESAMPLES = 1000
CHANGED_IMAGES = 500  # under noise and under attack
EPSILONS = (2 / 255, 4 / 255, 8 / 255)  # of the attack
ATTACK = pgd.Pgd(steps=10)
BATCH = 128
EPSILON_DENOMINATOR = 255  # ε of the attack is printed in units of 1/255
METRICS = {
    "purity": Metric(
        "Purity",
        "higher",
        "share",
        note="tokens that are of their expert's most frequent kind, over test images; mean over "
        "MoE layers",
    ),
    "purity_chance": Metric("Purity by chance", "", "share", "with permuted truths", detail=True),
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
    # Per layer: in nats, from the counts; mean over permutations; share of permutations, the
    # identity included, with at least as much.
    "mutual_information": Metric(""),
    "mutual_information_chance": Metric(""),
    "mutual_information_p": Metric(""),
}


class Truth(Measurement):
    """Agreement of each token's first expert with the token's true kind."""

    metrics = METRICS
    page = OnPage("experts and truth", place=7)

    images: int | None = Field(
        None, ge=label_information.MIN_IMAGES, description="Evenly spread; null: all of them."
    )

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        if not model.image.truth:
            return "the data's card has no truth of tokens"
        if model.moe is None:
            return "the model has no routers"
        return None

    @classmethod
    def place_words(cls, place: Place) -> str:
        """Return a ``perturbation_name`` in words: noise_0_2 → "noise, σ = 0.2"."""
        kind, _, strength = str(place).partition("_")
        unit = {"noise": "σ", "attack": f"ε in 1/{EPSILON_DENOMINATOR}"}[kind]
        return f"{kind}, {unit} = {strength.replace('_', '.')}"

    def places(self) -> dict[str, Iterable[Place]]:
        noise = [perturbation_name("noise", sigma) for sigma in corruptions.NOISE_SIGMAS]
        attack = [perturbation_name("attack", EPSILON_DENOMINATOR * each) for each in EPSILONS]
        return {"change": [*noise, *attack]}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: counts, per layer (E, D), experts in the order of the matching.
        model = subject.model
        indices = prepared.evenly_spaced_indices(len(subject.data.test.labels), self.images)
        pixels = torch.from_numpy(np.array(subject.data.test.images[indices]))
        _, records = predict_in_batches(model, pixels, prediction=False)
        layers = []
        for index, (record, layout) in enumerate(zip(records, model.layouts, strict=True)):
            kinds = epochs.true_kinds(pixels, layout)
            numbers = (record.probs.shape[-1], model.image.truth)
            compute = partial(measure_truth, first_choices(record), kinds, *numbers)
            layers.append(load_or_compute(out.parts, f"layer {index}", TruthLayer, compute))
        for number, layer in enumerate(layers, 1):
            for name, value in layer.values.items():
                out.put(name, value, layer=number)
        for name in layers[0].values:
            numbers = [layer.values[name] for layer in layers]
            mean = Interval(sum(number.value for number in numbers) / len(numbers))
            out.put(name, mean if len(numbers) > 1 else numbers[0])
        out.facts["counts"] = [layer.counts for layer in layers]
        if not subject.model.image.task.long:  # words have no pixels to change
            out.piece("changed", partial(put_perturbed_purity, subject))


class TruthLayer(Config):
    """Agreement of one layer's experts with the truth."""

    values: dict[str, Interval]  # metric → number; the purity has limits over images
    counts: tuple[tuple[int, ...], ...]  # (E, D), in the matching's order of experts


def perturbation_name(kind: str, strength: float) -> str:
    """Return noise_0_2 for σ = 0.2, or attack_8 for ε = 8/255."""
    return f"{kind}_{strength:.3g}".replace(".", "_")


def measure_truth(experts: Tensor, kinds: Tensor, expert_count: int, kind_count: int) -> TruthLayer:
    """Return the agreement of experts (N, T), −1 for none, and kinds (N, T), 1 to D, 0 unknown."""
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    chosen, truth = experts.numpy(), kinds.numpy()
    tables = epochs.expert_kind_counts(chosen, truth, expert_count, kind_count)
    total = tables.sum(axis=0)
    purity = bootstrap_purity([tables])
    nulls = permuted_truth_tables(chosen, truth, expert_count, kind_count)
    information = label_information.mutual_information(total)
    null_information = np.array([label_information.mutual_information(table) for table in nulls])
    is_known = (truth > 0) & (chosen >= 0)
    labels = (truth[is_known], chosen[is_known])
    rows, columns = scipy.optimize.linear_sum_assignment(total, maximize=True)
    matched = rows[columns.argsort()]
    order = [*matched, *np.setdiff1d(np.arange(expert_count), matched)]
    is_as_high = null_information >= information
    numbers = {
        "purity_chance": np.mean([epochs.expert_purity(table) for table in nulls]),
        "adjusted_mutual_information": adjusted_mutual_info_score(*labels),
        "normalised_mutual_information": normalized_mutual_info_score(*labels),
        "matched_to_truth": total[rows, columns].sum() / total.sum(),
        "mutual_information": information,
        "mutual_information_chance": null_information.mean(),
        "mutual_information_p": (1 + is_as_high.sum()) / (PERMUTATIONS + 1),
    }
    values = {"purity": purity} | {name: Interval(float(x)) for name, x in numbers.items()}
    return TruthLayer(values=values, counts=total[order].tolist())


def bootstrap_purity(tables: Sequence[np.ndarray]) -> Interval:
    """Return the mean purity of the layers' tables (N, E, D), with an interval over images."""

    def purity(rows: np.ndarray) -> float:
        return epochs.average_purity_over_layers([table[rows].sum(axis=0) for table in tables])

    return bootstrap_statistic(purity, len(tables[0]), RESAMPLES, lowest=0.0, highest=1.0)


def permuted_truth_tables(
    experts: np.ndarray, kinds: np.ndarray, expert_count: int, kind_count: int
) -> list[np.ndarray]:
    """Return counts of tokens by expert and kind, (E, D), per permutation of kinds among images."""
    permuted = label_information.iterate_label_permutations(kinds, PERMUTATIONS, SEED)
    sizes = (expert_count, kind_count)
    return [epochs.expert_kind_counts(experts, each, *sizes).sum(axis=0) for each in permuted]


def put_perturbed_purity(subject: MeasuredModel, out: Values) -> None:
    """Put the purity under noise and attack, mean over layers; strength 0 is clean."""
    model = subject.model
    test = subject.data.test
    few = prepared.evenly_spaced_indices(len(test.labels), CHANGED_IMAGES)
    images = np.array(test.images[few])
    labels = model.targets(torch.from_numpy(np.array(test.labels[few])))
    target = attack_target.Target(model, subject.data.task, images, labels, BATCH, SEED)
    clean = target.clean_images()
    channels = model.image.channels
    noisy = perturbations.iterate_noisy_images(
        clean, few.tolist(), corruptions.NOISE_SIGMAS, seed=SEED, channels=channels
    )
    attacked = perturbations.iterate_attacked_images(target, ATTACK, EPSILONS)
    pixels = torch.from_numpy(images)
    kinds = [epochs.true_kinds(pixels, layout).numpy() for layout in model.layouts]
    kind_count = model.image.truth

    def purity_of(variant: perturbations.PerturbedImages) -> Interval:
        _, records = target.predict_images(variant.pixels)
        tables = []
        for record, truth in zip(records, kinds, strict=True):
            sizes = (record.probs.shape[-1], kind_count)
            tables.append(epochs.expert_kind_counts(first_choices(record).numpy(), truth, *sizes))
        return bootstrap_purity(tables)

    unchanged = purity_of(perturbations.PerturbedImages("clean", "clean", clean))
    out.put("changed_purity", unchanged, noise=0.0)
    out.put("changed_purity", unchanged, attack=0.0)
    scaled = [EPSILON_DENOMINATOR * epsilon for epsilon in EPSILONS]
    strengths = (*corruptions.NOISE_SIGMAS, *scaled)
    for variant, strength in zip([*noisy, *attacked], strengths, strict=True):
        purity = purity_of(variant)
        out.put("changed_purity", purity, change=perturbation_name(variant.kind, strength))
        out.put("changed_purity", purity, **{variant.kind: strength})
