"""Few-shot accuracy: ridge regression on a frozen model's features, from a few images per class.

V-MoE's few-shot evaluator (ERMoE's main paper also reports 5-shot): features before the head,
targets −1 and +1, penalty λ = 2^i. V-MoE chooses λ on the test sets. Here leave-one-out
cross-validation on the few images chooses it; the result of V-MoE's choice is put as well.

N few-shot images, M test images, D features, K classes.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.probes.linear_probe import predict_and_capture_features
from moecore.measure.values import Chart, Metric, OnPage, Place, Values
from moecore.statistics.intervals import mean_over_seeds

EXPONENTS = tuple(range(-10, 20))  # λ = 2^i, V-MoE's
BIAS = 100.0  # value of the appended column (V-MoE); large, so the penalty on its weight is small
EPSILON = 1e-5  # added to a feature's standard deviation (V-MoE)
CHUNK_SIZE = 4096  # test images whose scores under all penalties are in memory at once

METRICS = {
    "few_shot": Metric(
        "{}-shot accuracy",
        "higher",
        "share",
        note="ridge on frozen features, {} images per class, V-MoE's protocol; mean and interval "
        "over draws of the images; penalty chosen by leaving one out (ERMoE's main paper reports "
        "5-shot)",
        paper="ermoe",
        over="shots",
        limits="draws",
    ),
    "few_shot_leaky": Metric(
        "{}-shot accuracy, penalty chosen on test (leaky)",
        form="share",
        note="the same with the penalty that is best on the test images: an overestimate",
        paper="ermoe",
        over="shots",
        name="few_shot_{}_leaky",
        detail=True,
        limits="draws",
    ),
}


class FewShot(Measurement):
    """Few-shot accuracy of ridge regression on the model's features."""

    flat_classes = True
    classes_for = "shots"
    metrics = METRICS
    page = OnPage(
        "few shots",
        place=12,
        charts=(
            Chart(
                "few_shot",
                "shots",
                title="Accuracy from a few images",
                x="Images per class",
                y="Accuracy",
                words="Ridge on frozen features, mean over draws.",
                share=True,
                top=1.02,
                limits=(0.0, 1.0),
            ),
        ),
    )

    shots: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 5, 10, 25),
        min_length=1,
        description="Training images per class; numbers above the smallest class are skipped.",
    )
    draws: int = Field(5, ge=1, description="Random draws of images, the same for every method.")

    def places(self) -> dict[str, Iterable[Place]]:
        return {"shots": self.shots}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put ``few_shot`` and, with λ chosen on test, ``few_shot_leaky`` per number of shots."""
        train, test = subject.data.train, subject.data.test
        counts = subject.data.task.counts(np.array(train.labels))
        size, name = min(zip(counts, subject.data.task.classes, strict=True))
        possible = sorted({shots for shots in self.shots if shots <= size})
        number = max(possible, default=0)
        draws = [draw_few_shots(subject, number, SEED, draw) for draw in range(self.draws)]
        # Features of all drawn training images are computed once; a draw looks its rows up.
        used = np.unique(np.concatenate([draw.flatten() for draw in draws]))
        test_features = head_features(subject, np.asarray(test.images))
        train_features = test_features[:0]
        if possible:
            train_features = head_features(subject, np.asarray(train.images[used]))

        def put_shots(shots: int, out: Values) -> None:
            fits = []
            for draw in draws:
                chosen = draw[:, :shots].flatten()
                few = train_features[np.searchsorted(used, chosen)]
                fits.append(score_few_shot_draw(subject, test_features, few, train.labels[chosen]))
            # Values per image are means over draws; the draws are the same for every model.
            items = torch.stack([draw_items for _, _, draw_items in fits]).mean(dim=0)
            accuracies = [float(scores[EXPONENTS.index(chosen)]) for scores, chosen, _ in fits]
            out.put("few_shot", items, mean_over_seeds(accuracies), shots=shots)
            scores = torch.stack([draw_scores for draw_scores, _, _ in fits])  # (draws, 30)
            means = scores.mean(dim=0).tolist()
            # reversed: in a tie the largest penalty, as in choose_exponent_by_loo
            leaky = max(reversed(range(len(EXPONENTS))), key=means.__getitem__)
            out.put("few_shot_leaky", mean_over_seeds(scores[:, leaky].tolist()), shots=shots)

        for shots in possible:
            out.piece(f"{shots} shots", partial(put_shots, shots))
        reason = f"the smallest class, {name}, has {size} training images"
        out.skipped += [f"{shots} shots: {reason}" for shots in sorted({*self.shots} - {*possible})]


def draw_few_shots(subject: MeasuredModel, shots: int, seed: int, draw: int) -> np.ndarray:
    """Draw training images for repetition ``draw``; return (K, shots) indices, a row per class."""
    # Each class is permuted once per draw: fewer shots are a subset of more, for all methods.
    task = subject.data.task
    members = task.by_class(torch.from_numpy(np.array(subject.data.train.labels)))
    if members is None:
        raise ValueError("labels are not classes; call `applies` first")
    rows, classes = (part.numpy() for part in members)
    generator = np.random.default_rng([seed, draw])
    by_class = [rows[classes == number] for number in range(task.outputs)]
    return np.stack([generator.permutation(indices)[:shots] for indices in by_class])


def head_features(subject: MeasuredModel, images: np.ndarray) -> Tensor:
    """Return the features that the model's head reads, (N, D) fp64."""
    return torch.from_numpy(predict_and_capture_features(subject.model, images)[1])


def score_few_shot_draw(
    subject: MeasuredModel, tested: Tensor, few: Tensor, labels: np.ndarray
) -> tuple[Tensor, int, Tensor]:
    """Fit ridges to ``few`` (N, D); return test scores by penalty, LOO's exponent, its M scores."""
    # Return the scores (30,) on the test split, the exponent chosen by leave-one-out, and each test
    # image's score with that exponent, (M,) fp64.
    from sklearn.linear_model import Ridge  # slow to import

    task = subject.data.task
    mean = few.mean(dim=0)
    scale = few.std(dim=0, correction=0) + EPSILON
    inputs = append_bias((few - mean) / scale)
    targets = one_vs_rest_targets(torch.from_numpy(labels), task.outputs)
    chosen = choose_exponent_by_loo(inputs, targets)
    ridges = {
        exponent: Ridge(2.0**exponent, fit_intercept=False).fit(inputs, targets)
        for exponent in EXPONENTS
    }
    totals = torch.zeros(len(EXPONENTS), dtype=torch.float64)
    items = []
    test_labels = torch.from_numpy(np.array(subject.data.test.labels))
    for chunk, truth in zip(tested.split(CHUNK_SIZE), test_labels.split(CHUNK_SIZE), strict=True):
        chunk_inputs = append_bias((chunk - mean) / scale)
        for index, (exponent, ridge) in enumerate(ridges.items()):
            scores = task.scores(torch.from_numpy(ridge.predict(chunk_inputs)), truth).double()
            totals[index] += scores.sum()
            if exponent == chosen:
                items.append(scores)
    return totals / len(test_labels), chosen, torch.cat(items)


def append_bias(features: Tensor) -> Tensor:
    return torch.nn.functional.pad(features, (0, 1), value=BIAS)


def one_vs_rest_targets(labels: Tensor, classes: int) -> Tensor:
    """Return (N, K) fp64: 1 for the class of an image and −1 for the others."""
    return 2 * torch.nn.functional.one_hot(labels.long(), classes).double() - 1


def choose_exponent_by_loo(features: Tensor, targets: Tensor) -> int:
    """Return i of the penalty 2^i with the smallest leave-one-out squared error; ties: largest."""
    from sklearn.linear_model import RidgeCV  # slow to import

    # Squared error, as accuracy has many ties. With one image per class, the left-out image's class
    # is unknown to the others: the error then measures shrinkage alone.
    penalties = np.exp2(EXPONENTS[::-1])
    return int(np.log2(RidgeCV(penalties, fit_intercept=False).fit(features, targets).alpha_))
