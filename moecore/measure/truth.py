"""Whether experts are what generated data says they should be: routing against the truth.

N images, T tokens per image, E experts, D kinds of tokens. Adjusted mutual information after Vinh,
Epps & Bailey (2010); the null permutes whole images' truths, which keeps their form.
"""

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moecore.attacks.attack_setup import Target
from moecore.attacks.pgd import Pgd
from moecore.core.config import Config
from moecore.core.routing_records import first_choices
from moecore.data.image_noise import SIGMAS
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement, PartStore, load_or_compute
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
    Kind,
    attack_variants,
    noise_variants,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import bootstrap_interval

PERMUTATIONS = 200
RESAMPLES = 1000
CHANGED = 500  # images that get noise and are attacked
EPSILONS = (2 / 255, 4 / 255, 8 / 255)  # of the attack
ATTACK = Pgd(steps=10)
BATCH = 128


class Truth(Measurement):
    """Which test images; their experts are those of each token's first choice."""

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

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Return each layer's agreement of experts and truth."""
        where = evenly_spaced_indices(len(subject.data.test.labels), self.images)
        pixels = torch.from_numpy(np.array(subject.data.test.images[where]))
        _, records = predict_in_batches(subject.model, pixels, prediction=False)
        layers = zip(records, subject.model.layouts, strict=True)
        return Result(
            images=len(where),
            layers=[
                load_or_compute(
                    parts,
                    f"layer {index}",
                    TruthLayer,
                    lambda record=record, layout=layout: truth_layer(
                        first_choices(record),
                        token_kinds(pixels, layout),
                        record.probs.shape[-1],
                        subject.model.image.truth,
                    ),
                )
                for index, (record, layout) in enumerate(layers)
            ],
            changed=()
            if subject.model.image.task.long  # words have no pixels to change
            else load_or_compute(
                parts, "changed", ChangedPurityRows, lambda: measure_perturbed_purity(subject)
            ).rows,
        )


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


class ChangedPurity(Config):
    """The purity of images that were changed, but not their truth: the mean over MoE layers."""

    kind: Kind  # clean, noise or attack
    strength: float  # σ of the noise, or ε of the attack; pixels lie in [0, 1]
    purity: float
    purity_low: float | None  # limits of 95 %, over images
    purity_high: float | None


class ChangedPurityRows(Config):
    """A part that is kept over a kill."""

    rows: tuple[ChangedPurity, ...]


class Result(Config):
    """A row per MoE layer, and one for each change of some of the images, clean first."""

    images: int
    layers: tuple[TruthLayer, ...]
    changed: tuple[ChangedPurity, ...]


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


def measure_perturbed_purity(subject: MeasuredModel) -> ChangedPurityRows:
    """Return the purity under noise and under attack, of the same images evenly spread."""
    model, test = subject.model, subject.data.test
    few = evenly_spaced_indices(len(test.labels), CHANGED)
    images = np.array(test.images[few])
    labels = model.targets(torch.from_numpy(np.array(test.labels[few])))
    target = Target(model, subject.data.task, images, labels, BATCH, SEED)
    clean = target.clean_images()
    noisy = noise_variants(clean, few.tolist(), SIGMAS, SEED, model.image.channels)
    attacked = attack_variants(target, ATTACK, EPSILONS)
    kinds = [token_kinds(torch.from_numpy(images), layout).numpy() for layout in model.layouts]

    def row(variant: ChangedImages, strength: float) -> ChangedPurity:
        _, records = target.predict_images(variant.pixels)
        tables = [
            expert_truth_tables(
                first_choices(record).numpy(), of_layer, record.probs.shape[-1], truth
            )
            for record, of_layer in zip(records, kinds, strict=True)
        ]
        purity = bootstrap_interval(
            lambda drawn: purity_over_layers([one[drawn].sum(axis=0) for one in tables]),
            len(few),
            RESAMPLES,
            lowest=0.0,
            highest=1.0,
        )
        return ChangedPurity(
            kind=variant.kind,
            strength=strength,
            purity=purity.value,
            purity_low=purity.low,
            purity_high=purity.high,
        )

    truth = model.image.truth
    variants = [ChangedImages("clean", "clean", clean), *noisy, *attacked]
    strengths = (0.0, *SIGMAS, *EPSILONS)
    return ChangedPurityRows(rows=[row(*pair) for pair in zip(variants, strengths, strict=True)])
