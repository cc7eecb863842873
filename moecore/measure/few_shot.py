"""How well a frozen model's features tell classes from a few images each: a ridge on top of them.

V-MoE's few-shot evaluator, whose 5-shot ERMoE's main paper reports too: features before the head,
targets −1 and +1, the penalty λ among powers of two. V-MoE chooses λ on the test sets; here it is
chosen by leaving one of the few images out, and the choice on the test set stands beside it.

N few-shot images, M test images, D features, K classes.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.measure.base import SEED, MeasuredModel, Measurement, no_flat_images_reason
from moecore.measure.probes.linear_probe import predict_with_features
from moecore.measure.values import Chart, Metric, OnPage, Place, Values
from moecore.statistics.intervals import mean_over_seeds

EXPONENTS = tuple(range(-10, 20))  # λ = 2^i, V-MoE's
BIAS = 100.0  # of the column appended to the features, V-MoE's: its weight is hardly penalised
LEAST = 1e-5  # added to a feature's deviation, V-MoE's
CHUNK = 4096  # test images whose scores under all penalties are in memory at once

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
        note="the same with the penalty that is best on the test images themselves: too good",
        paper="ermoe",
        over="shots",
        name="few_shot_{}_leaky",
        detail=True,
        limits="draws",
    ),
}


class FewShot(Measurement):
    """How many images a class, and how often they are drawn."""

    flat_classes = True
    metrics = METRICS
    page = OnPage(
        "few shots",
        place=12,
        charts=(
            Chart(
                *("few_shot", "shots", "Accuracy from a few images", "Images per class"),
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
        description="Training images per class; larger than a class: skipped.",
    )
    draws: int = Field(5, ge=1, description="Draws of these images; every method sees the same.")

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it needs flat images of one class each."""
        return no_flat_images_reason(subject, "shots")

    def places(self) -> dict[str, Iterable[Place]]:
        """Return the numbers of images per class."""
        return {"shots": self.shots}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put the test score for every number of images that the smallest class has."""
        train, test = subject.data.train, subject.data.test
        least, name = smallest_class(subject)
        fits = sorted({shots for shots in self.shots if shots <= least})
        wanted = [
            draw_shots(subject, max(fits, default=0), SEED, draw) for draw in range(self.draws)
        ]
        used = np.unique(np.concatenate([one.flatten() for one in wanted]))
        tested = head_features(subject, np.asarray(test.images))
        few = tested[:0]
        if fits:
            few = head_features(subject, np.asarray(train.images[used]))

        def put_shots(shots: int, out: Values) -> None:
            draws = []
            for one in wanted:
                chosen = one[:, :shots].flatten()
                own = few[np.searchsorted(used, chosen)]
                draws.append(score_few_shot_draw(subject, tested, own, train.labels[chosen]))
            put_draws(shots, draws, out)

        for shots in fits:
            out.piece(f"{shots} shots", partial(put_shots, shots))
        why = f"the smallest class, {name}, has {least} training images"
        out.skipped += [f"{shots} shots: {why}" for shots in sorted({*self.shots} - {*fits})]


def smallest_class(subject: MeasuredModel) -> tuple[int, str]:
    """The fewest training images of a class, and its name."""
    task = subject.data.task
    return min(zip(task.counts(np.array(subject.data.train.labels)), task.classes, strict=True))


def draw_shots(subject: MeasuredModel, shots: int, seed: int, draw: int) -> np.ndarray:
    """Places in the training split of ``shots`` images of each class, (K, shots), class by class.

    Each class is permuted: fewer shots are a part of more, and all methods get the same.
    """
    task = subject.data.task
    members = task.by_class(torch.from_numpy(np.array(subject.data.train.labels)))
    if members is None:
        raise ValueError("labels are not classes; ask `applies` first")
    rows, classes = (part.numpy() for part in members)
    generator = np.random.default_rng([seed, draw])
    places = [rows[classes == number] for number in range(task.outputs)]
    return np.stack([generator.permutation(one)[:shots] for one in places])


def head_features(subject: MeasuredModel, images: np.ndarray) -> Tensor:
    """Return the features that the model's head reads of each image, (N, D) fp64."""
    return torch.from_numpy(predict_with_features(subject.model, images)[1])


class PenaltyScores(NamedTuple):
    """One draw under every penalty of EXPONENTS."""

    scores: Tensor  # (30,), on the test split
    chosen: int  # the exponent that leaving one out prefers
    items: Tensor  # (M,) fp64, each test image's score under that one


def score_few_shot_draw(
    subject: MeasuredModel, tested: Tensor, few: Tensor, labels: np.ndarray
) -> PenaltyScores:
    """Return the scores on the test split of ridges that are fitted to a few images.

    tested: features (M, D) of the test split; few: features (N, D); labels: (N,).
    """
    from sklearn.linear_model import Ridge  # slow to import

    task = subject.data.task
    mean = few.mean(dim=0)
    scale = few.std(dim=0, correction=0) + LEAST
    given = (
        append_bias((few - mean) / scale),
        one_vs_rest_targets(torch.from_numpy(labels), task.outputs),
    )
    chosen = choose_ridge_exponent(*given)
    ridges = {
        exponent: Ridge(2.0**exponent, fit_intercept=False).fit(*given) for exponent in EXPONENTS
    }
    right = torch.zeros(len(EXPONENTS), dtype=torch.float64)
    items = []
    known = torch.from_numpy(np.array(subject.data.test.labels))
    for part, own in zip(tested.split(CHUNK), known.split(CHUNK), strict=True):
        ready = append_bias((part - mean) / scale)
        for place, (exponent, ridge) in enumerate(ridges.items()):
            scores = task.scores(torch.from_numpy(ridge.predict(ready)), own).double()
            right[place] += scores.sum()
            if exponent == chosen:
                items.append(scores)
    return PenaltyScores(right / len(known), chosen, torch.cat(items))


def append_bias(features: Tensor) -> Tensor:
    """Features (N, D) and a column of BIAS."""
    return torch.nn.functional.pad(features, (0, 1), value=BIAS)


def one_vs_rest_targets(labels: Tensor, classes: int) -> Tensor:
    """1 for the class of an image and −1 for the others; (N, K) fp64."""
    return 2 * torch.nn.functional.one_hot(labels.long(), classes).double() - 1


def choose_ridge_exponent(features: Tensor, targets: Tensor) -> int:
    """Return the exponent of the least squared error on images left out; of equal ones the largest.

    The squared error, as accuracy has many ties. With one image a class the class of the image left
    out is unknown to the others, so that the error tells only how far to shrink.
    features: (N, D); targets: (N, K).
    """
    from sklearn.linear_model import RidgeCV  # slow to import

    penalties = np.exp2(EXPONENTS[::-1])
    return int(np.log2(RidgeCV(penalties, fit_intercept=False).fit(features, targets).alpha_))


def put_draws(shots: int, draws: Sequence[PenaltyScores], out: Values) -> None:
    """Put the scores of several draws: with the penalty that each chose, and with the one for all
    draws that is best on the test split itself.

    The values of items are means over the draws, which are the same for every model.
    """
    every = torch.stack([draw.scores for draw in draws])  # (draws, 30)
    own = [float(draw.scores[EXPONENTS.index(draw.chosen)]) for draw in draws]
    items = torch.stack([draw.items for draw in draws]).mean(dim=0)
    out.put("few_shot", items, mean_over_seeds(own), shots=shots)
    means = every.mean(dim=0).tolist()
    leaky = max(reversed(range(len(EXPONENTS))), key=means.__getitem__)
    out.put("few_shot_leaky", mean_over_seeds(every[:, leaky].tolist()), shots=shots)
