"""How steady choice of experts and prediction are under Gaussian noise (PRC, figures 5 and 1)."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord
from moecore.data.corruptions import to_uint8
from moecore.data.image_noise import SIGMAS, add_noise, standard_normal_noise
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import (
    SEED,
    MeasuredModel,
    Measurement,
    PartStore,
    load_or_compute,
    no_changed_images_reason,
)
from moecore.measure.exploring.expert_overlay_data import Overlays, encode_expert_overlays
from moecore.measure.noise_ramp import RampSummary, class_probs_by_sigma, summarize_ramps
from moecore.measure.routing_metrics.layer_metrics import (
    changes_by_image,
    expert_agreement,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.crossed import encode_item_values
from moecore.tasks.base import Task

SIGMA_MAX = 0.2  # where the ramp of one fixed noise an image ends
JUMP = 0.1  # a step of the true class's probability above it is a jump
Sigma = Annotated[float, Field(gt=0, le=1)]


class Stability(Measurement):
    """Which images get noise, how much, and what counts as a jump."""

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

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Both kinds of noise, and pictures of the first."""
        model = subject.model
        test = subject.data.test
        where = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[where]
        labels = model.targets(torch.from_numpy(test.labels[where]))
        drawn = standard_normal_noise(where, images.shape[1:], SEED)
        _, clean = predict_in_batches(model, images)

        def noisy(sigma: float) -> NoiseRow:
            pixels = add_noise(images, drawn, sigma)
            return noise_row(model, clean, pixels, labels, subject.data.task, sigma)

        def along() -> RampSummary:
            sigmas = (SIGMA_MAX * np.arange(self.steps + 1) / self.steps).tolist()
            probs = class_probs_by_sigma(model, images, drawn, sigmas)
            return summarize_ramps(probs, labels, where, sigmas, JUMP, few)

        if self.overlays:
            few = evenly_spaced_indices(len(labels), self.overlays)
        else:
            few = np.array([], int)
        noise = tuple(
            load_or_compute(parts, f"noise {sigma}", NoiseRow, lambda sigma=sigma: noisy(sigma))
            for sigma in sorted(self.sigmas)
        )
        return Result(
            images=len(labels),
            noise=noise,
            ramp=load_or_compute(parts, "ramp", RampSummary, along),
            overlays=noisy_overlays(model, images[few], drawn[few], self) if len(few) else (),
        )


class NoiseRow(Config):
    """Images with noise of one sigma; lists have a value per MoE layer, none for a dense model."""

    sigma: float
    score: float  # the task's, with its 95 % limits
    low: float | None
    high: float | None
    selection_change: tuple[float, ...]  # 1 − IoU of the experts chosen
    agreement: float | None  # share of tokens with the same best expert; mean over layers
    # Of score, selection_change and agreement one number per image, by ``encode_item_values``.
    items: dict[str, str] = {}


class NoisyOverlays(Overlays):
    """Images with noise, and the experts of their patches."""

    sigma: float  # 0: the clean images


class Result(Config):
    """Noise drawn for each sigma, and along one fixed direction an image."""

    images: int
    noise: tuple[NoiseRow, ...]
    ramp: RampSummary
    overlays: tuple[NoisyOverlays, ...]  # clean first; none for a dense model


def noise_row(
    model: Model,
    clean: tuple[RoutingRecord, ...],
    pixels: Tensor,
    labels: Tensor,
    task: Task,
    sigma: float,
) -> NoiseRow:
    """The score on images with noise, and per MoE layer how far the choice of experts moved."""
    prediction, noisy = predict_in_batches(model, pixels)
    hits = task.scores(prediction, labels)
    score = task.interval(hits)
    moved = changes_by_image(clean, noisy)
    same = [float(layer.mean()) for layer in expert_agreement(clean, noisy)]
    return NoiseRow(
        sigma=sigma,
        score=score.value,
        low=score.low,
        high=score.high,
        selection_change=[float(layer.numpy().mean()) for layer in moved],
        agreement=float(np.mean(same)) if same else None,
        items=noise_items(hits, moved, clean, noisy),
    )


def noise_items(
    scores: Tensor,
    moved: list[Tensor],
    clean: tuple[RoutingRecord, ...],
    noisy: tuple[RoutingRecord, ...],
) -> dict[str, str]:
    """Scores (N,), and means over the MoE layers of what each image's routing does, packed."""
    columns = {"score": scores.double()}
    if moved:
        columns["selection_change"] = torch.stack(moved).mean(dim=0)
        columns["agreement"] = torch.stack(expert_agreement(clean, noisy)).mean(dim=0)
    return {name: encode_item_values(values.numpy()) for name, values in columns.items()}


def noisy_overlays(
    model: Model, images: np.ndarray, drawn: Tensor, settings: Stability
) -> tuple[NoisyOverlays, ...]:
    """The images with their patches' experts, clean first; () for a dense model."""
    rows = []
    for sigma in (0.0, *sorted(settings.sigmas)):
        pixels = add_noise(images, drawn, sigma)
        _, records = predict_in_batches(model, pixels)
        if records:
            shown = encode_expert_overlays(to_uint8(pixels.numpy()), records)
            rows.append(NoisyOverlays(sigma=sigma, **shown.model_dump()))
    return tuple(rows)
