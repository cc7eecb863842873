"""Attack a model on a fixed subset of the test split: accuracy and routing change at each strength of each attack, and an audit of it.

Where the target is a real number the mean absolute error stands in the place of accuracy.

    python -m stages.robustness <phase> <method> <seed>
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from moecore.artifacts import load_model
from moecore.attacked import Precision, Target, name_of, subset
from moecore.attacks import Attack
from moecore.attacks.objectives import task
from moecore.audit import Audit, audit, show
from moecore.audit_errors import audit_errors
from moecore.config import Config
from moecore.data.prepared import Prepared
from moecore.evaluation.classification import correct, nll
from moecore.evaluation.robust import packed, score, worst_case
from moecore.evaluation.robust_errors import error_score, worst_errors
from moecore.evaluation.routing import change_of_choice, change_of_processing
from moecore.files import StageError
from moecore.history import Run
from moecore.kept import Kept, resumable
from moecore.params import read
from moecore.progress import progress
from moecore.records import RoutingRecord, real
from moecore.selection import Phase
from moecore.stage import run_stage
from moecore.training.runtime import tune

Epsilon = Annotated[float, Field(ge=0, le=1)]
Scored = tuple[Tensor, tuple[RoutingRecord, ...]]  # predictions (N, K) and a record per MoE layer


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


def curve(attack: Attack, target: Target, clean: Scored, epsilons: list[float], kept: Kept) -> Iterator[dict[str, Any]]:
    """One row per epsilon, as ``row_of`` makes it where it is not kept yet; clean: what the model says of the clean images."""
    for epsilon in epsilons:
        yield kept.part(f"{name_of(attack)} at {epsilon}", lambda: row_of(attack, target, clean, epsilon))


def row_of(attack: Attack, target: Target, clean: Scored, epsilon: float) -> dict[str, Any]:
    """What is left at an epsilon. An image counts as right where it is when clean, too: the clean image lies in every ball.

    With real labels its error is the larger one of the two; ``loss`` is then the mean error of the attacked images alone.
    Raises StageError where epsilon 0 does not reproduce the clean predictions.
    """
    adversarial, before = target.attacked(attack, epsilon), clean[1]
    logits, after = target.scored(adversarial)
    if epsilon == 0 and not torch.equal(logits, clean[0]):
        raise StageError(f"robustness: {name_of(attack)} at epsilon 0 changes predictions; the model is not deterministic in evaluation mode")
    loss, still = loss_of(logits, target.labels), float((adversarial == target.clean()).flatten(1).all(1).double().mean())
    routing = ([], []) if target.only is not None else (change_of_choice(before, after), change_of_processing(before, after))
    changes = {"routing_change": routing[0], "processing_change": routing[1]}
    return {"epsilon": epsilon, **standing(clean[0], logits, target.labels), "loss": loss, "unchanged_images": still, **changes}


def loss_of(predicted: Tensor, labels: Tensor) -> float:
    """The task's mean loss: nll, or the absolute error for real labels."""
    return float((task(predicted.double(), labels) if real(labels) else nll(predicted, labels)).mean())


def standing(clean: Tensor, attacked: Tensor, labels: Tensor) -> dict[str, Any]:
    """What is left of the predictions (N, K) of clean images under attack: accuracy with the hits, or mae with the errors."""
    if real(labels):
        errors = torch.maximum(task(clean.double(), labels), task(attacked.double(), labels))
        return {**error_score(errors), "errors": errors.tolist()}
    hits = correct(clean, labels) & correct(attacked, labels)
    return {**score(hits), "hits": packed(hits)}


def skipped(settings: Robustness, model: nn.Module) -> dict[str, str]:
    """The attacks that this model has nothing for, by name, with the reason; their curve is null."""
    idle = [name_of(attack) for attack in settings.attacks if getattr(attack, "objective", "") == "routing_change" and model.moe is None]
    return dict.fromkeys(idle, "the model has no MoE layer whose routing could change")


def second(settings: Robustness, phase: Phase, method: str, seed: int) -> nn.Module | None:
    """The model that the transfer attack is made on; None where none is given, or this very one."""
    if settings.transfer in (None, method):
        return None
    return load_model(Path("artifacts") / phase / settings.transfer / str(seed)).to(tune().device)


def checked(settings: Robustness, labels: Tensor) -> None:
    """Raise StageError for what has no meaning with real labels, before anything is computed."""
    if not real(labels):
        return
    if settings.survivors:
        raise StageError("robustness.survivors: found true, but a real target is never simply right; allowed: false")
    for number, attack in enumerate(settings.attacks):
        if not hasattr(attack, "objective") or attack.objective in ("cross_entropy", "dlr"):
            found = f"{attack.kind} with objective {attack.objective}" if hasattr(attack, "objective") else attack.kind
            allowed = "fgsm, pgd or apgd with objective task, balance or routing_change"
            raise StageError(f"robustness.attacks[{number}]: {found} needs classes, and the target is a real number; allowed: {allowed}")


def curves_of(
    settings: Robustness, target: Target, epsilons: list[float], idle: dict[str, str], title: str, kept: Kept
) -> dict[str, list[dict[str, Any]] | None]:
    """The rows of every attack by its name; None for an idle one."""
    curves: dict[str, list[dict[str, Any]] | None] = {}
    clean = target.scored(target.images)
    with progress(title, len(settings.attacks) * len(epsilons)) as bar:
        for number, attack in enumerate(settings.attacks):
            rows = curves[name_of(attack)] = None if name_of(attack) in idle else []
            for row in curve(attack, target, clean, epsilons, kept) if rows is not None else ():
                rows.append(row)
                shown = "mae" if "mae" in row else "accuracy"
                bar.update(number * len(epsilons) + len(rows), **{shown: row[shown]})
    return curves


def draw(run: Run, drawn: dict[str, list[dict[str, Any]]], name: str) -> None:
    """``name``, accuracy or mae, over epsilon."""
    values = {attack: [{**row, "value": row[name]} for row in rows] for attack, rows in drawn.items()}
    if name == "accuracy":
        run.draw("robustness_curve", values)
    else:  # by name: a drawing is no input of a result
        run.figure("robustness_curve", importlib.import_module("moecore.report.figures_errors").error_curve(values))


def robustness(phase: Phase, method: str, seed: int) -> None:
    params = read(Params)
    settings, test = params.robustness, Prepared.open(Path("artifacts/data") / phase).test
    images, labels = subset(test.images, test.labels, settings.images, settings.seed)
    epsilons, name = sorted({0.0, *settings.epsilons}), "mae" if real(labels) else "accuracy"
    checked(settings, labels)
    with resumable("robustness", params, __file__, phase, method, seed) as (run, kept):
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(tune().device)
        target = Target(model, images, labels, settings.batch, settings.seed, settings.precision)
        clean = target.errors(images) if real(labels) else target.hits(images)
        target = target._replace(only=clean if settings.survivors else None)
        idle = skipped(settings, model)
        curves = curves_of(settings, target, epsilons, idle, f"robustness {phase} {method} seed {seed}", kept)
        judge = audit_errors if real(labels) else audit
        lines = judge(target, settings.audit, epsilons[-1], curves, settings.attacks, second(settings, phase, method, seed))
        show(lines, f"Audit of the attacks on {phase} {method} seed {seed}")
        worst = worst_errors(curves) if real(labels) else worst_case(curves, len(labels))
        done = {attack: rows for attack, rows in curves.items() if rows}
        draw(run, done | ({"worst case": worst} if len(done) > 1 else {}), name)
        strongest = {attack: rows[-1][name] for attack, rows in done.items()}
        scores = {f"clean_{name}": float(clean.double().mean()), f"{name}_at_largest_epsilon": strongest}
        found = {"attacks": curves, "skipped": idle, "worst_case": worst, "audit": [line._asdict() for line in lines]}
        run.summary({"images": len(labels), **scores, **found})


if __name__ == "__main__":
    run_stage(robustness)
