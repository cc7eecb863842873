"""Baseline classifiers on the pixels of flat images, which every method should beat.

Logistic regression on standardised pixels, whose penalty the validation images choose, the nearest
neighbours, and a small convolutional network. N images of P pixel values.
"""

import math
import warnings
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

from moecore.data.layouts.images import JpegImages
from moecore.data.loader import draw_few_shot_train_indices
from moecore.data.prepared import Prepared, Split, evenly_spaced_indices
from moecore.measure.base import MeasuredPart, SkipReason
from moecore.measure.values import SCORE, Found, Metric, PartStore, Values

LOGISTIC = "logistic regression"
NEIGHBOURS = 5
ITERATIONS = 100  # of L-BFGS, at most
CHUNK = 1000  # images that are shrunk together, or predicted together
CNN = "small CNN"
CNN_EPOCHS = 8  # fixed before any score was seen; 25 s for 10,000 images of 28×28 pixels
CNN_BATCH = 64
CNN_RATE = 2e-3  # peak of the learning rate


class Baselines(MeasuredPart):
    """Settings of pixel classifiers: caps of images and pixels, logistic regression's penalties."""

    metrics = {"baseline": Metric("{score} of {}", SCORE, SCORE, over="classifier", items="hits")}

    images: int = Field(10_000, ge=100, description="Most images of a split, evenly spaced.")
    pixels: int = Field(3072, ge=16, description="Values per image; larger images are averaged.")
    penalties: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (10.0, 100.0, 1000.0),
        min_length=1,
        description="Of half the squared weights, added to the sum of the training losses.",
    )


class PixelsAndLabels(NamedTuple):
    values: np.ndarray  # float32 (N, P), from 0 to 1
    labels: np.ndarray  # (N,), the classes
    shape: tuple[int, int, int]  # channels, height and width of the P values


def measure_baselines(
    data: Prepared, settings: Baselines, shots: int | None, seed: int, parts: PartStore
) -> Found | SkipReason:
    """Fit each classifier to the images of a training phase, and score it on the test split.

    Args:
        data: Prepared data; other than flat images with one class each are skipped.
        settings: Caps, and penalties that the validation images choose from.
        shots: Training images per class of the phase, drawn by ``seed``; None: all.
        seed: Seed of the training run whose images are used.
        parts: Store of finished pieces; each classifier is one.

    Returns:
        ``baseline`` by classifier; facts: ``images`` fitted on, ``penalty``. Or ``SkipReason``.
    """
    if data.train.images.ndim != 4:
        return SkipReason(skipped="the classifiers are of flat images, and these data are not")
    if reason := data.task.needs_classes("one_class"):
        return SkipReason(skipped=f"the classifiers give an image one class, and {reason}")
    learned = draw_few_shot_train_indices(data, shots, seed)
    if learned is None:
        learned = np.arange(len(data.train.labels))
    learned = learned[evenly_spaced_indices(len(learned), settings.images)]
    checked = evenly_spaced_indices(len(data.validation.labels), settings.images)
    channels = data.card["channels"]  # without the channel of the patches' true kinds
    train = read_pixel_values(data.train, learned, channels, settings.pixels)
    validation = read_pixel_values(data.validation, checked, channels, settings.pixels)
    test = read_pixel_values(data.test, np.arange(len(data.test.labels)), channels, settings.pixels)

    def put_logistic(out: Values) -> None:
        classifier, penalty = fit_logistic_classifier(train, validation, settings.penalties)
        out.facts["penalty"] = penalty
        _put_hits(out, LOGISTIC, classifier, test)

    def put_neighbours(out: Values) -> None:
        from sklearn.neighbors import KNeighborsClassifier  # slow to import

        number = min(NEIGHBOURS, len(learned))
        classifier = KNeighborsClassifier(number, algorithm="brute").fit(*train[:2])
        _put_hits(out, f"{number} nearest neighbours", classifier, test)

    def put_cnn(out: Values) -> None:
        _put_hits(out, CNN, SmallCnn(train, data.task.outputs, seed), test)

    out = Values(settings.metrics, data.task, parts)
    out.people = data.test.people
    out.piece("logistic regression", put_logistic)
    out.piece("nearest neighbours", put_neighbours)
    out.piece("small CNN", put_cnn)
    out.facts["images"] = len(learned)
    return out.found()


def read_pixel_values(split: Split, rows: np.ndarray, channels: int, limit: int) -> PixelsAndLabels:
    """Read the images ``rows`` of a split, shrunk to at most ``limit`` pixel values each."""
    height, width = split.images.shape[-2:]
    shrink = min(1.0, math.sqrt(limit / (channels * height * width)))
    size = max(1, int(height * shrink)), max(1, int(width * shrink))
    values = np.empty((len(rows), channels * size[0] * size[1]), np.float32)
    for start in range(0, len(rows), CHUNK):
        chunk: np.ndarray | JpegImages = split.images[rows[start : start + CHUNK]]
        pixels = torch.from_numpy(np.array(chunk)[:, :channels]) / 255
        if size != (height, width):
            pixels = adaptive_avg_pool2d(pixels, size)
        values[start : start + CHUNK] = pixels.flatten(1).numpy()
    return PixelsAndLabels(values, np.array(split.labels)[rows], (channels, *size))


def fit_logistic_classifier(
    train: PixelsAndLabels, validation: PixelsAndLabels, penalties: tuple[float, ...]
) -> tuple[Any, float]:
    """Return the classifier and the penalty with the best validation score; in a tie the larger.

    Pixels are standardised by the training images.
    """
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fits = []
    for penalty in sorted(penalties, reverse=True):
        regression = LogisticRegression(C=1 / penalty, tol=1e-3, max_iter=ITERATIONS)
        with warnings.catch_warnings():
            # Late steps change the score by less than its interval.
            warnings.simplefilter("ignore", ConvergenceWarning)
            classifier = make_pipeline(StandardScaler(), regression).fit(*train[:2])
        fits.append((classifier.score(*validation[:2]), classifier, penalty))
    _, classifier, penalty = max(fits, key=lambda fit: fit[0])
    return classifier, penalty


class SmallCnn:
    """Two 3×3 convolutions with pooling, and two linear layers, trained with AdamW on the CPU."""

    def __init__(self, train: PixelsAndLabels, classes: int, seed: int) -> None:
        """Train for CNN_EPOCHS; weights and the order of the images are drawn by ``seed``."""
        self.shape = train.shape
        channels, height, width = train.shape
        pooled = math.ceil(height / 4) * math.ceil(width / 4)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for inputs, outputs in ((channels, 16), (16, 32)):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                layers += [nn.MaxPool2d(2, ceil_mode=True)]
            layers += [nn.Flatten(), nn.Linear(32 * pooled, 128), nn.ReLU()]
            self.network = nn.Sequential(*layers, nn.Linear(128, classes))
            self._fit(train)

    def _fit(self, train: PixelsAndLabels) -> None:
        images = torch.from_numpy(train.values).unflatten(1, self.shape)
        labels = torch.from_numpy(train.labels).long()
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=CNN_RATE)
        steps = CNN_EPOCHS * math.ceil(len(labels) / CNN_BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(CNN_EPOCHS):
            for rows in torch.randperm(len(labels)).split(CNN_BATCH):
                optimizer.zero_grad()
                cross_entropy(self.network(images[rows]), labels[rows]).backward()
                optimizer.step()
                schedule.step()

    @torch.no_grad()
    def predict(self, values: np.ndarray) -> np.ndarray:
        images = torch.from_numpy(values).unflatten(1, self.shape)
        return torch.cat([self.network(part).argmax(1) for part in images.split(CHUNK)]).numpy()


def _put_hits(out: Values, name: str, classifier: Any, test: PixelsAndLabels) -> None:
    hits = classifier.predict(test.values) == test.labels
    out.put("baseline", hits.astype(np.float64), classifier=name)
