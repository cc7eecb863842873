"""How steady choice of experts and prediction are under Gaussian noise (PRC, figures 5 and 1)."""

from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.routing_records import RoutingRecord
from moecore.data.corruptions import to_uint8
from moecore.data.image_noise import SIGMAS, add_noise, standard_normal_noise
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement, no_changed_images_reason
from moecore.measure.exploring.expert_overlay_data import encode_expert_overlays
from moecore.measure.noise_ramp import class_probs_by_sigma, put_ramps
from moecore.measure.routing_metrics.layer_metrics import (
    changes_by_image,
    expert_agreement,
)
from moecore.measure.values import SCORE, Chart, Metric, OnPage, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval

SIGMA_MAX = 0.2  # where the ramp of one fixed noise an image ends
JUMP = 0.1  # a step of the true class's probability above it is a jump
Sigma = Annotated[float, Field(gt=0, le=1)]
METRICS = {  # the columns are under the largest noise
    "noise_score": Metric(
        "{score}{unit}, noise",
        SCORE,
        SCORE,
        note="under the largest noise",
        paper="prc",
        name="noise_{score}",
    ),
    "noise_selection_change": Metric(
        "Selection change, noise",
        "lower",
        note="1 − IoU of the chosen experts under the largest noise, mean over layers",
        paper="prc",
    ),
    "noise_agreement": Metric(
        "Same expert, noise",
        "higher",
        "share",
        note="tokens whose first expert stays under that noise",
        paper="prc",
    ),
    "jumps": Metric(
        "Prediction jumps",
        "lower",
        note="steps along a ramp of noise in which the true class's probability jumps, mean over "
        "images",
        paper="prc",
    ),
}


class Stability(Measurement):
    """Which images get noise, how much, and what counts as a jump."""

    flat_classes = True
    metrics = METRICS
    page = OnPage(
        "stability under noise",
        place=8,
        heading="Noise",
        charts=(
            Chart(
                *("noise_selection_change", "sigma", "Selection change under noise"),
                *("σ of the noise", "1 − IoU of experts"),
                words="Mean over MoE layers.",
                share=True,
                height=3.2,
            ),
            Chart(
                *("noise_score", "sigma", "{score} under noise"),
                *("σ of the noise", "{score}{unit}"),
                words="Test images, the same for every method.",
                share=None,
                height=3.2,
            ),
        ),
        about="noise_selection_change",
    )

    images: int | None = Field(
        100, ge=1, description="Test images, evenly spread, the same for every method; null: all."
    )
    overlays: int = Field(
        4, ge=0, le=8, description="Of these, shown with their patches' experts and ramps."
    )
    sigmas: tuple[Sigma, ...] = Field(
        SIGMAS, min_length=1, description="Of the noise; pixels lie in [0, 1]."
    )
    steps: int = Field(40, ge=1, description="Equal steps of the ramp.")

    @classmethod
    def applies(cls, subject: MeasuredModel) -> str | None:
        """Why not, in words: it follows the probability of the one class of a flat image."""
        return no_changed_images_reason(subject, "decision")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        """Put both kinds of noise; facts: pictures of a few images.

        ramp: sigmas; shown, along it each image's index in the split, label, the label's
        probability, and the predicted class. overlays: the images with noise and the experts of
        their patches, clean first; none of a dense model.
        """
        model = subject.model
        test = subject.data.test
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        labels = model.targets(torch.from_numpy(test.labels[where]))
        drawn = standard_normal_noise(where, images.shape[1:], SEED)
        _, clean = predict_in_batches(model, images)
        few = np.array([], int)
        if self.overlays:
            few = evenly_spaced_indices(len(labels), self.overlays)

        def noisy(sigma: float, out: Values) -> None:
            pixels = add_noise(images, drawn, sigma)
            put_noise(model, clean, pixels, labels, sigma, sigma == max(self.sigmas), out)

        def along(out: Values) -> None:
            sigmas = (SIGMA_MAX * np.arange(self.steps + 1) / self.steps).tolist()
            probs = class_probs_by_sigma(model, images, drawn, sigmas)
            put_ramps(probs, labels, where, sigmas, JUMP, few, out)

        for sigma in sorted(self.sigmas):
            out.piece(f"noise {sigma}", partial(noisy, sigma))
        out.piece("ramp", along)
        if len(few):
            out.facts["overlays"] = noisy_overlays(model, images[few], drawn[few], self)


def put_noise(
    model: Model,
    clean: tuple[RoutingRecord, ...],
    pixels: Tensor,
    labels: Tensor,
    sigma: float,
    is_column: bool,
    out: Values,
) -> None:
    """Put the score on images with noise, and how far the choice of experts moved."""
    prediction, noisy = predict_in_batches(model, pixels)
    scores = out.task.scores(prediction, labels)
    out.put("noise_score", out.task.interval(scores), sigma=sigma)
    if is_column:
        out.put("noise_score", scores, out.task.interval(scores))
    moved, same = changes_by_image(clean, noisy), expert_agreement(clean, noisy)
    for name, layers in (("noise_selection_change", moved), ("noise_agreement", same)):
        if layers:
            mean = Interval(sum(float(layer.numpy().mean()) for layer in layers) / len(layers))
            out.put(name, mean, sigma=sigma)
            if is_column:
                out.put(name, torch.stack(layers).mean(dim=0), mean)


def noisy_overlays(
    model: Model, images: np.ndarray, drawn: Tensor, settings: Stability
) -> list[dict[str, Any]]:
    """Return ``Overlays`` of the images at each sigma, 0 first; [] for a dense model."""
    rows = []
    for sigma in (0.0, *sorted(settings.sigmas)):
        pixels = add_noise(images, drawn, sigma)
        _, records = predict_in_batches(model, pixels)
        if records:
            shown = encode_expert_overlays(to_uint8(pixels.numpy()), records)
            rows.append({"sigma": sigma, "overlays": shown})
    return rows
