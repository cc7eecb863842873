"""Whether experts are what generated data says they should be: routing against the truth.

N images, T tokens per image, E experts, D kinds of tokens. Adjusted mutual information after Vinh,
Epps & Bailey (2010); the null permutes whole images' truths, which keeps their form.
"""

import numpy as np
import torch
from pydantic import Field
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import TokenLayout
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement, PartStore, load_or_compute
from moecore.nn.backbones.base_model import truth_of_tokens
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import bootstrap_interval

PERMUTATIONS = 200
RESAMPLES = 1000


class Truth(Measurement):
    """Which test images; their experts are those of each token's first choice."""

    images: int | None = Field(
        None, ge=2, description="Test images, evenly spread; null: all of them."
    )

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Return why not, in words: it needs routers, and tokens whose kind is known."""
        if not subject.model.image.truth:
            return "nobody knows the truth of these images' tokens; their card says none"
        if subject.model.moe is None:
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
                        record.probs.argmax(dim=-1),
                        token_kinds(pixels, layout),
                        record.probs.shape[-1],
                        subject.model.image.truth,
                    ),
                )
                for index, (record, layout) in enumerate(layers)
            ],
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


class Result(Config):
    """A row per MoE layer."""

    images: int
    layers: tuple[TruthLayer, ...]


def expert_truth_tables(
    experts: np.ndarray, kinds: np.ndarray, number: int, dialects: int
) -> np.ndarray:
    """Return how often each expert saw each kind, by image, int64 (N, E, D).

    experts: (N, T), 0 to E − 1.  kinds: (N, T), 1 to D, or 0 where it is not known.
    """
    cell = experts * (dialects + 1) + kinds
    width = number * (dialects + 1)
    rows = np.arange(len(cell))[:, None] * width
    counted = np.bincount((rows + cell).ravel(), minlength=len(cell) * width)
    return counted.reshape(-1, number, dialects + 1)[:, :, 1:]


def token_kinds(pixels: Tensor, layout: TokenLayout) -> Tensor:
    """Return each token's kind (N, T) of images uint8 whose last channel says it."""
    return truth_of_tokens(pixels[:, -1:].float() / 255, layout)


def truth_layer(experts: Tensor, kinds: Tensor, number: int, dialects: int) -> TruthLayer:
    """Return the agreement of experts (N, T) int64 and kinds (N, T), 1 to D; 0 is not counted."""
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
    random = np.random.default_rng(SEED)
    orders = [random.permutation(len(truth)) for _ in range(PERMUTATIONS)]
    null_tables = [
        expert_truth_tables(chosen, truth[order], number, dialects).sum(axis=0) for order in orders
    ]
    information = mutual_information(total)
    null_information = np.array([mutual_information(table) for table in null_tables])
    known = truth > 0
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


def expert_purity(table: np.ndarray) -> float:
    """Return the share of tokens of their expert's most frequent kind; table (E, D) of counts."""
    return float(table.max(axis=1).sum() / table.sum())


def mutual_information(table: np.ndarray) -> float:
    """Return the plug-in mutual information of a table of counts, in nats."""
    joint = table / table.sum()
    independent = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / independent[there])).sum())
