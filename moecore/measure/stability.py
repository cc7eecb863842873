"""Stability of routing and prediction under Gaussian noise (PRC, figures 5 and 1)."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.data.corruptions import NOISE_SIGMAS, add_noise, standard_normal_noise, to_uint8
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.base import SEED, MeasuredModel, Measurement
from moecore.measure.routing_metrics.expert_profiles import encode_expert_overlays
from moecore.measure.routing_metrics.layer_metrics import compute_choice_iou_drop, expert_agreement
from moecore.measure.values import SCORE, Chart, Metric, OnPage, Values
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import BATCH, predict_in_batches
from moecore.statistics.intervals import Interval

SIGMA_MAX = 0.2  # end of the ramp of noise, one fixed direction per image
CHUNK_SIZE = 16  # images whose ramps are in memory at once; fixed: no result depends on `batch`
JUMP = 0.1  # larger steps of the true class's probability are jumps
Sigma = Annotated[float, Field(gt=0, le=1)]
METRICS = {  # the columns are under the largest noise
    "noise_score": Metric(
        "{score}{unit}, noise", SCORE, SCORE, note="under the largest noise", name="noise_{score}"
    ),
    "noise_selection_change": Metric(
        "Selection change, noise",
        "lower",
        note="1 − IoU of the chosen experts under the largest noise, mean over layers",
    ),
    "noise_agreement": Metric(
        "Same expert, noise", "higher", "share", note="same first expert under the largest noise"
    ),
    "jumps": Metric(
        "Prediction jumps",
        "lower",
        note="steps along a ramp of noise in which the true class's probability jumps, mean over "
        "images",
    ),
}
METRICS = {name: metric._replace(paper="prc") for name, metric in METRICS.items()}


class Stability(Measurement):
    """Score and routing under noise, and jumps of the prediction along a ramp of noise."""

    flat_classes = True
    classes_for = "decision"
    changes_images = True
    metrics = METRICS
    page = OnPage(
        "stability under noise",
        place=8,
        heading="Noise",
        charts=(
            Chart(
                "noise_selection_change",
                "sigma",
                title="Selection change under noise",
                x="σ of the noise",
                y="1 − IoU of experts",
                words="Mean over MoE layers.",
                share=True,
                height=3.2,
            ),
            Chart(
                "noise_score",
                "sigma",
                title="{score} under noise",
                x="σ of the noise",
                y="{score}{unit}",
                words="Test images, the same for every method.",
                share=None,
                height=3.2,
            ),
        ),
        about="noise_selection_change",
    )

    images: int | None = Field(100, ge=1, description="Test images, evenly spread; null: all.")
    overlays: int = Field(4, ge=0, le=8, description="Images shown with their experts and ramps.")
    sigmas: tuple[Sigma, ...] = Field(
        NOISE_SIGMAS, min_length=1, description="σ of noise in [0, 1]."
    )
    steps: int = Field(40, ge=1, description="Equal steps of the ramp.")

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: ramp, its sigmas and, of a few images, index in the split, label, the label's
        # probability and the predicted class; overlays, of these images at each sigma, clean first
        # (none for a dense model).
        model = subject.model
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.labels), self.images)
        images = test.images[indices]
        labels = model.targets(torch.from_numpy(test.labels[indices]))
        noise = standard_normal_noise(indices, images.shape[1:], SEED)
        _, clean = predict_in_batches(model, images)
        few = np.array([], int)
        if self.overlays:
            few = evenly_spaced_indices(len(labels), self.overlays)

        def put_sigma(sigma: float, out: Values) -> None:
            prediction, noisy = predict_in_batches(model, add_noise(images, noise, sigma))
            scores = out.task.scores(prediction, labels)
            is_column = sigma == max(self.sigmas)
            out.put("noise_score", out.task.interval(scores), sigma=sigma)
            if is_column:
                out.put("noise_score", scores, out.task.interval(scores))
            for name, layers in (
                ("noise_selection_change", compute_choice_iou_drop(clean, noisy)),
                ("noise_agreement", expert_agreement(clean, noisy)),
            ):
                if not layers:
                    continue
                mean = Interval(sum(float(layer.numpy().mean()) for layer in layers) / len(layers))
                out.put(name, mean, sigma=sigma)
                if is_column:
                    out.put(name, torch.stack(layers).mean(dim=0), mean)

        def put_ramp(out: Values) -> None:
            sigmas = (SIGMA_MAX * np.arange(self.steps + 1) / self.steps).tolist()
            probs = class_probs_by_sigma(model, images, noise, sigmas)
            put_ramps(probs, labels, indices, sigmas, few, out)

        for sigma in sorted(self.sigmas):
            out.piece(f"noise {sigma}", partial(put_sigma, sigma))
        out.piece("ramp", put_ramp)
        if len(few):
            rows = []  # none for a dense model
            for sigma in (0.0, *sorted(self.sigmas)) if clean else ():
                pixels = add_noise(images[few], noise[few], sigma)
                _, records = predict_in_batches(model, pixels)
                overlays = encode_expert_overlays(to_uint8(pixels.numpy()), records)
                rows.append({"sigma": sigma, "overlays": overlays})
            out.facts["overlays"] = rows


def count_jumps(probs: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Count the steps that change the true class's probability by more than ``threshold``, (N,)."""
    # A step is between neighbouring points: a steep continuous change counts, too. probs:
    # (N, S + 1, K) at S + 1 points of a ramp of noise, the first clean; labels: (N,).
    return (label_probability(probs, labels).diff(dim=1).abs() > threshold).sum(1)


def label_probability(probs: Tensor, labels: Tensor) -> Tensor:
    """Return the true class's probability, (N, S + 1) fp64, along ramps (N, S + 1, K)."""
    return probs.double().gather(2, labels[:, None, None].expand(-1, probs.shape[1], 1)).squeeze(2)


def class_probs_by_sigma(
    model: Model, images: np.ndarray, noise: Tensor, sigmas: Sequence[float], batch: int = BATCH
) -> Tensor:
    """Return class probabilities (N, S + 1, K) fp64 of every image at every sigma."""
    # images: uint8 (N, C, H, W); noise: (N, C, H, W), one direction per image.
    chunks = []
    for start in range(0, len(images), CHUNK_SIZE):
        chunk = slice(start, start + CHUNK_SIZE)
        noisy = [add_noise(images[chunk], noise[chunk], sigma) for sigma in sigmas]
        pixels = torch.stack(noisy, dim=1)
        logits, _ = predict_in_batches(model, pixels.flatten(0, 1), batch, routing=False)
        chunks.append(logits.double().softmax(-1).unflatten(0, pixels.shape[:2]))
    return torch.cat(chunks)


def put_ramps(
    probs: Tensor,  # (N, S + 1, K)
    labels: Tensor,  # (N,)
    indices: np.ndarray,  # of the images in the split
    sigmas: Sequence[float],
    shown: Sequence[int] | np.ndarray,
    out: Values,
) -> None:
    """Put ``jumps`` along ramps, and facts.ramp: curves of the images at positions ``shown``."""
    out.put("jumps", count_jumps(probs, labels, JUMP))
    true = label_probability(probs, labels)
    predicted = probs.argmax(-1)
    curves = [
        {
            "index": int(indices[i]),
            "label": int(labels[i]),
            "probability": true[i],
            "predicted": predicted[i],
        }
        for i in shown
    ]
    out.facts["ramp"] = {"sigmas": sigmas, "shown": curves}
