"""How steady choice of experts and prediction are under Gaussian noise (PRC, figures 5 and 1).

    python -m stages.stability <phase> <method> <seed>
"""

import importlib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from moecore.artifacts import load_model
from moecore.config import Config
from moecore.data.corrupt_digital import bytes_of
from moecore.data.corrupt_draws import directions, with_noise
from moecore.data.prepared import spread
from moecore.evaluation.classification import correct
from moecore.evaluation.intervals import bootstrap_mean, wilson
from moecore.evaluation.noise import changes_by_image, ramp_steps, true_probability
from moecore.evaluation.overlays import overlays
from moecore.evaluation.predict import predictions
from moecore.evaluation.routing import agreement
from moecore.history import Run
from moecore.kept import resumable
from moecore.params import read
from moecore.records import RoutingRecord
from moecore.refusals import flat_images_with_classes
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


CHUNK = 16  # images whose ramps are in memory at once; fixed, so that no result depends on settings.batch
Sigma = Annotated[float, Field(gt=0, le=1)]


class Stability(Config):
    """Which images get noise, how much, and what counts as a jump."""

    images: int | None = Field(100, ge=1, description="Test images, evenly spread over the split, the same for every method; null takes all.")
    overlays: int = Field(4, ge=0, le=8, description="Of these, how many are shown with their patches' experts and their ramps.")
    sigmas: tuple[Sigma, ...] = Field((0.05, 0.1, 0.2), min_length=1, description="Standard deviations of the noise; pixels lie in [0, 1].")
    sigma_max: float = Field(0.2, gt=0, le=1, description="Where the ramp of one fixed noise an image ends.")
    steps: int = Field(40, ge=1, description="Equal steps of the ramp.")
    jump: float = Field(0.1, gt=0, lt=1, description="A step is a jump where the true class's probability moves by more.")
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    seed: int = Field(0, ge=0, description="Of the noise; every method sees the same.")


class Params(Config):
    stability: Stability


def mean_of(values: Tensor) -> dict[str, float | None]:
    """Mean of one value an image, (N,), with its 95 % bootstrap interval."""
    return bootstrap_mean(values.double().numpy())._asdict()


def noise_row(model: nn.Module, clean: tuple[RoutingRecord, ...], pixels: Tensor, labels: Tensor, sigma: float, batch: int) -> dict[str, Any]:
    """Accuracy on images with noise, and per MoE layer how far the choice of experts moved; no routing values for a dense model."""
    logits, noisy = predictions(model, pixels, batch)
    hits = int(correct(logits, labels).sum())
    accuracy, low, high = wilson(hits, len(labels))
    changes = [mean_of(layer) for layer in changes_by_image(clean, noisy)]
    same = [agreement(a.probs, b.probs) for a, b in zip(clean, noisy, strict=True)]
    row = {"sigma": sigma, "accuracy": accuracy, "low": low, "high": high, "correct": hits}
    row |= {f"selection_{key}": [change[part] for change in changes] for key, part in (("change", "value"), ("low", "low"), ("high", "high"))}
    return row | {"agreement": float(np.mean(same)) if same else None, "agreement_by_layer": same}


def shown_under_noise(model: nn.Module, images: np.ndarray, drawn: Tensor, settings: Stability) -> list[dict[str, Any]]:
    """The images with their patches' experts, clean first, then at each sigma; [] for a dense model."""
    found = []
    for sigma in (0.0, *sorted(settings.sigmas)):
        pixels = with_noise(images, drawn, sigma)
        _, records = predictions(model, pixels, settings.batch)
        if records:
            found.append({"sigma": sigma, **overlays(bytes_of(pixels.numpy()), records)})
    return found


def ramp_probs(model: nn.Module, images: np.ndarray, drawn: Tensor, sigmas: list[float], batch: int) -> Tensor:
    """Class probabilities (N, S + 1, K) fp64 of every image at every sigma along its own direction."""
    parts = []
    for start in range(0, len(images), CHUNK):
        part = slice(start, start + CHUNK)
        pixels = torch.stack([with_noise(images[part], drawn[part], sigma) for sigma in sigmas], dim=1)
        logits, _ = predictions(model, pixels.flatten(0, 1), batch, routing=False)
        parts.append(logits.double().softmax(-1).unflatten(0, pixels.shape[:2]))
    return torch.cat(parts)


def ramp(probs: Tensor, labels: Tensor, where: np.ndarray, sigmas: list[float], settings: Stability) -> dict[str, Any]:
    """Means over the images of what happens along their ramps, the mean curves, and the curves of a few images."""
    steps, true, predicted = ramp_steps(probs, labels, settings.jump), true_probability(probs, labels), probs.argmax(-1)
    names = {"class_changes": "class_changes", "jumps": "jumps_mean", "total_variation": "total_variation", "largest_step": "largest_step"}
    found: dict[str, Any] = {names[name]: mean_of(values) for name, values in steps._asdict().items()}
    curves = [
        {"index": int(where[i]), "label": int(labels[i]), "probability": true[i].tolist(), "predicted": predicted[i].tolist()}
        for i in spread(len(labels), settings.overlays) if settings.overlays
    ]  # fmt: skip
    averages = {"mean_probability": true.mean(0).tolist(), "accuracy": (predicted == labels[:, None]).double().mean(0).tolist()}
    return {"sigmas": sigmas, "threshold": settings.jump, **found, **averages, "shown": curves}


def stability(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, test = params.stability, flat_images_with_classes(Path("artifacts/data") / phase, "stability").test
    where = spread(len(test.labels), settings.images)
    images, labels = test.images[where], torch.from_numpy(test.labels[where])
    drawn = directions(where, images.shape[1:], settings.seed)
    sigmas = (settings.sigma_max * np.arange(settings.steps + 1) / settings.steps).tolist()
    with resumable("stability", params, __file__, phase, method, seed) as (run, kept):
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)
        _, clean = predictions(model, images, settings.batch)

        def noisy(sigma: float) -> dict[str, Any]:
            return noise_row(model, clean, with_noise(images, drawn, sigma), labels, sigma, settings.batch)

        noise = [kept.part(f"noise {sigma}", lambda sigma=sigma: noisy(sigma)) for sigma in sorted(settings.sigmas)]
        few = spread(len(labels), settings.overlays) if settings.overlays else []
        patches = shown_under_noise(model, images[few], drawn[few], settings) if len(few) else []
        along = kept.part("ramp", lambda: ramp(ramp_probs(model, images, drawn, sigmas, settings.batch), labels, where, sigmas, settings))
        _draw(run, patches, along)
        run.summary({"images": len(labels), "noise": noise, "ramp": along, "overlays": patches})


def _draw(run: Run, patches: list[dict[str, Any]], along: dict[str, Any]) -> None:
    figures_noise = importlib.import_module("moecore.report.figures_noise")  # by name: a drawing is no input of a result

    if along["shown"]:
        run.figure("noise_ramp", figures_noise.noise_ramp(along["sigmas"], along["shown"]))
    if patches:
        run.figure("noise_overlays", figures_noise.noise_overlays(patches))


if __name__ == "__main__":
    run_stage(stability)
