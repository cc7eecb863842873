"""Attack a model on a fixed subset of the test split: accuracy and routing change at each strength of each attack, and an audit of it.

    python -m stages.robustness <phase> <method> <seed>
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, field_validator
from torch import nn

from moecore.artifacts import load_model
from moecore.attacked import Precision, Target, name_of, subset
from moecore.attacks import Attack
from moecore.audit import Audit, audit, show
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.evaluation.classification import correct, nll
from moecore.evaluation.robust import packed, score, worst_case
from moecore.evaluation.routing import change_of_choice, change_of_processing
from moecore.files import StageError
from moecore.history import record
from moecore.params import read
from moecore.progress import progress
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
    precision: Precision = Field("float32", description="Of the forward passes of an attack; its images are scored in float32 either way.")
    survivors: bool = Field(False, description="Attack only images that are right when clean: accuracy is the same, routing change is not measured.")
    audit: Audit = Field(Audit(), description="Extra attacks that show whether the others are strong enough to be believed.")
    transfer: str | None = Field(None, description="A method whose model (same phase and seed) lends the audit its attack; null: none.")

    @field_validator("attacks")
    @classmethod
    def _named_apart(cls, attacks: tuple[Attack, ...]) -> tuple[Attack, ...]:
        if len({name_of(attack) for attack in attacks}) < len(attacks):
            raise ValueError("the same attack is listed twice")
        return attacks


class Params(Config):
    robustness: Robustness


def curve(attack: Attack, target: Target, epsilons: list[float]) -> Iterator[dict[str, Any]]:
    """One row per epsilon. An image counts as right where it is when clean, too: the clean image lies in every ball.

    Raises StageError where epsilon 0 does not reproduce the clean predictions.
    """
    (clean, before), pixels = target.scored(target.images), target.clean()
    for epsilon in epsilons:
        adversarial = target.attacked(attack, epsilon)
        logits, after = target.scored(adversarial)
        if epsilon == 0 and not torch.equal(logits, clean):
            raise StageError(f"robustness: {name_of(attack)} at epsilon 0 changes predictions; the model is not deterministic in evaluation mode")
        hits = correct(clean, target.labels) & correct(logits, target.labels)
        loss, still = float(nll(logits, target.labels).mean()), float((adversarial == pixels).flatten(1).all(1).double().mean())
        routing = ([], []) if target.only is not None else (change_of_choice(before, after), change_of_processing(before, after))
        changes = {"routing_change": routing[0], "processing_change": routing[1]}
        yield {"epsilon": epsilon, **score(hits), "loss": loss, "unchanged_images": still, "hits": packed(hits), **changes}


def skipped(settings: Robustness, model: nn.Module) -> dict[str, str]:
    """The attacks that this model has nothing for, by name, with the reason; their curve is null."""
    idle = [name_of(attack) for attack in settings.attacks if getattr(attack, "objective", "") == "routing_change" and model.moe is None]
    return dict.fromkeys(idle, "the model has no MoE layer whose routing could change")


def second(settings: Robustness, phase: Phase, method: str, seed: int) -> nn.Module | None:
    """The model that the transfer attack is made on; None where none is given, or this very one."""
    if settings.transfer in (None, method):
        return None
    return load_model(Path("artifacts") / phase / settings.transfer / str(seed)).to(tune().device)


def robustness(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, test = params.robustness, Prepared.open(Path("artifacts/data") / phase).test
    images, labels = subset(test.images, test.labels, settings.images, settings.seed)
    epsilons = sorted({0.0, *settings.epsilons})
    with record("robustness", params, phase=phase, method=method, seed=seed) as run:
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)
        target = Target(model, images, labels, settings.batch, settings.seed, settings.precision)
        clean = target.hits(images)
        target = target._replace(only=clean if settings.survivors else None)
        idle, curves = skipped(settings, model), {}
        with progress(f"robustness {phase} {method} seed {seed}", len(settings.attacks) * len(epsilons)) as bar:
            for number, attack in enumerate(settings.attacks):
                rows = curves[name_of(attack)] = None if name_of(attack) in idle else []
                for row in curve(attack, target, epsilons) if rows is not None else ():
                    rows.append(row)
                    bar.update(number * len(epsilons) + len(rows), accuracy=row["accuracy"])
        lines = audit(target, settings.audit, epsilons[-1], curves, settings.attacks, second(settings, phase, method, seed))
        show(lines, f"Audit of the attacks on {phase} {method} seed {seed}")
        worst, done = worst_case(curves, len(labels)), {name: rows for name, rows in curves.items() if rows}
        drawn = done | ({"worst case": worst} if len(done) > 1 else {})
        run.draw("robustness_curve", {name: [{**row, "value": row["accuracy"]} for row in rows] for name, rows in drawn.items()})
        strongest = {name: rows[-1]["accuracy"] for name, rows in done.items()}
        scores = {"clean_accuracy": float(clean.double().mean()), "accuracy_at_largest_epsilon": strongest}
        found = {"attacks": curves, "skipped": idle, "worst_case": worst, "audit": [line._asdict() for line in lines]}
        run.summary({"images": len(labels), **scores, **found})


if __name__ == "__main__":
    run_stage(robustness)
