"""Attack a model on a fixed subset of the test split: accuracy and routing change at each strength of each attack.

    python -m stages.robustness <phase> <method> <seed>
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from moecore.artifacts import load_model
from moecore.attacks import Attack
from moecore.config import Config
from moecore.data.prepared import Prepared, Split
from moecore.evaluation.classification import correct
from moecore.evaluation.intervals import wilson
from moecore.evaluation.predict import batches, evaluating, predictions
from moecore.evaluation.routing import change_of_choice, change_of_processing
from moecore.files import StageError
from moecore.history import record
from moecore.params import read
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune


Epsilon = Annotated[float, Field(ge=0, le=1)]


class Robustness(Config):
    """Which images are attacked, how, and how strongly."""

    images: int = Field(512, ge=1, description="Test images, drawn once with `seed`; the same for every method.")
    epsilons: tuple[Epsilon, ...] = Field(min_length=1, description="Radii of the L∞ ball in pixel units [0, 1]; 0 is added.")
    attacks: tuple[Attack, ...] = Field(min_length=1)
    batch: int = Field(128, ge=1, description="Images a forward pass; no result depends on it.")
    seed: int = Field(0, ge=0, description="Draws the subset and the random starts.")

    @field_validator("attacks")
    @classmethod
    def _named_apart(cls, attacks: tuple[Attack, ...]) -> tuple[Attack, ...]:
        if len({name_of(attack) for attack in attacks}) < len(attacks):
            raise ValueError("the same attack is listed twice")
        return attacks


class Params(Config):
    robustness: Robustness


def name_of(attack: Attack) -> str:
    """The kind and whatever differs from its defaults: pgd, pgd-10, pgd-10-strong."""
    return "-".join([attack.kind, *(str(v) for k, v in attack.model_dump(exclude_defaults=True).items() if k != "kind")])


def subset(split: Split, number: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """A seeded draw without replacement of ``number`` images, in their order in the split; all where there are fewer."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(split.labels))[:number])
    return split.images[chosen], torch.from_numpy(split.labels[chosen])


def attacked(attack: Attack, model, images: np.ndarray, labels: Tensor, epsilon: float, settings: Robustness) -> Tensor:
    """Adversarial images (N, C, H, W) on the CPU; the model is attacked in evaluation mode."""
    generator, device = torch.Generator().manual_seed(settings.seed), next(model.parameters()).device
    with evaluating(model):
        parts = zip(batches(images, settings.batch, device), labels.to(device).split(settings.batch), strict=True)
        return torch.cat([attack(model, pixels, targets, epsilon, generator).cpu() for pixels, targets in parts])


def curve(attack: Attack, model, images: np.ndarray, labels: Tensor, settings: Robustness) -> list[dict[str, Any]]:
    """One row per epsilon, 0 first. Raises StageError where epsilon 0 does not reproduce the clean predictions."""
    clean, before = predictions(model, images, settings.batch)
    rows = []
    for epsilon in sorted({0.0, *settings.epsilons}):
        adversarial = attacked(attack, model, images, labels, epsilon, settings)
        logits, after = predictions(model, adversarial, settings.batch)
        if epsilon == 0 and not torch.equal(logits, clean):
            raise StageError(f"robustness: {name_of(attack)} at epsilon 0 changes predictions; the model is not deterministic in evaluation mode")
        hits = int(correct(logits, labels).sum())
        still = (adversarial == torch.cat(list(batches(images, settings.batch)))).flatten(1).all(1).double().mean()
        accuracy, low, high = wilson(hits, len(labels))
        changes = {"routing_change": change_of_choice(before, after), "processing_change": change_of_processing(before, after)}
        score = {"epsilon": epsilon, "accuracy": accuracy, "low": low, "high": high, "correct": hits}
        rows.append({**score, "unchanged_images": float(still), **changes})
    return rows


def robustness(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings = params.robustness
    images, labels = subset(Prepared.open(Path("artifacts/data") / phase).test, settings.images, settings.seed)
    with record("robustness", params, phase=phase, method=method, seed=seed) as run:
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)
        curves = {name_of(attack): curve(attack, model, images, labels, settings) for attack in settings.attacks}
        run.draw("robustness_curve", {name: [{**row, "value": row["accuracy"]} for row in rows] for name, rows in curves.items()})
        strongest = {name: rows[-1]["accuracy"] for name, rows in curves.items()}
        clean = next(iter(curves.values()))[0]["accuracy"]
        run.summary({"images": len(labels), "clean_accuracy": clean, "accuracy_at_largest_epsilon": strongest, "attacks": curves})


if __name__ == "__main__":
    run_stage(robustness)
