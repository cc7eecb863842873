"""What is left of a model's predictions on a fixed subset of the test split under attack.

Score and change of routing at each strength of each attack, and an audit. N images, K outputs.
"""

from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from moecore.attacks.attack_setup import Precision, Target, draw_image_indices
from moecore.attacks.base import Attack
from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.core.surroundings import Misfits, Surroundings
from moecore.measure.base import SEED, MeasuredModel, PartStore, Skipped, load_or_compute
from moecore.measure.routing_metrics.layer_metrics import (
    changes_by_image,
    iou_by_image,
    processing_change_by_layer,
    routing_change_by_layer,
)
from moecore.measure.under_attack.audit import AuditSettings, run_audit
from moecore.measure.under_attack.curves import (
    AttackAudit,
    AttackedGallery,
    AttackRow,
    AuditLine,
    Curve,
    ScoresAtEpsilon,
    attack_gallery,
    people_if_repeated,
    worst_case,
)
from moecore.statistics.crossed import encode_item_values
from moecore.tasks.base import Task

PICTURES = 3  # attacked images shown, under the strongest attack
Epsilon = Annotated[float, Field(ge=0, le=1)]


class Robustness(Config):
    """Which images are attacked, how, and how strongly."""

    images: int = Field(
        512, ge=1, description="Test images, drawn once; the same for every method."
    )
    epsilons: tuple[Epsilon, ...] = Field(
        min_length=1, description="Radii of the L∞ ball in pixel units [0, 1]; 0 is added."
    )
    attacks: tuple[Attack, ...] = Field(min_length=1)
    batch: int = Field(
        128, ge=1, description="Images a pass; cut to whole groups that share a capacity."
    )
    precision: Precision = Field(
        "float32", description="Of an attack's passes; its images are scored in float32 either way."
    )
    survivors: bool = Field(
        False, description="Attack only images that are right when clean; no routing change."
    )
    audit: AuditSettings = Field(
        AuditSettings(), description="Extra attacks that show whether the others can be believed."
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield text, which has no pixels, and survivors where no image is right or wrong."""
        if around.is_text:
            yield (), f"found a section, but {around.data} is text; allowed: leave it out"
        if self.survivors and (reason := around.lacks("share")):
            yield ("survivors",), f"found true, but {reason}; allowed: false"

    @property
    def parts(self) -> int:
        """Into how many a measurement falls, where no attack is skipped."""
        return len(self.attacks) * len({0.0, *self.epsilons}) + 1

    @field_validator("attacks")
    @classmethod
    def _named_apart(cls, attacks: tuple[Attack, ...]) -> tuple[Attack, ...]:
        if len({attack.name for attack in attacks}) < len(attacks):
            raise ValueError("the same attack is listed twice")
        return attacks


class Result(Config):
    """Scores under attack; ``task`` says how they are packed and shown."""

    task: Task
    images: int
    clean_score: float
    attacks: dict[str, Curve | Skipped] = Field(description="by attack: a row an epsilon")
    worst_case: tuple[ScoresAtEpsilon, ...] = Field(
        description="over all attacks, a row an epsilon"
    )
    audit: tuple[AuditLine, ...]
    attacked: AttackedGallery | None = None  # none of volumes, without an attack or a picture
    people: tuple[int, ...] | None = Field(
        None, description="whose image each is, where people have several"
    )


class CleanAnswers(NamedTuple):
    """What a model says of the clean images."""

    prediction: Tensor  # (N, K)
    routing: tuple[RoutingRecord, ...]  # by MoE layer
    scores: Tensor  # (N,)


def measure(subject: MeasuredModel, settings: Robustness, parts: PartStore) -> Result:
    """Every attack at every epsilon, a part each, the worst case over them, and the audit.

    Raises UserError for settings that make no sense for the task, and for a model that is not
    deterministic in evaluation mode.
    """
    task = subject.data.task
    check_attack_settings(settings, task)
    target = target_on_drawn_images(subject, settings)
    labels = target.labels
    prediction, routing = target.predict_images(target.images)
    clean = CleanAnswers(prediction, routing, task.scores(prediction, labels))
    if settings.survivors:
        target = target._replace(only=clean.scores)
    # Epsilon 0 shows that the model is deterministic, and where the curves begin.
    epsilons = sorted({0.0, *settings.epsilons})
    curves = {
        attack.name: attack_curve(attack, target, clean, epsilons, parts)
        for attack in settings.attacks
    }
    lines = load_or_compute(
        parts,
        "audit",
        AttackAudit,
        lambda: AttackAudit(
            lines=run_audit(target, settings.audit, epsilons[-1], curves, settings.attacks)
        ),
    ).lines
    return Result(
        task=task,
        images=len(labels),
        clean_score=float(clean.scores.double().mean()),
        attacks=curves,
        worst_case=worst_case(curves, task, len(labels), target.people),
        audit=lines,
        attacked=attack_gallery(target, settings.attacks, PICTURES, curves),
        people=people_if_repeated(target.people),
    )


def target_on_drawn_images(subject: MeasuredModel, settings: Robustness) -> Target:
    """The model and the drawn test images, with whose each is."""
    test = subject.data.test
    places = draw_image_indices(len(test.labels), settings.images, SEED)
    labels = subject.model.targets(torch.from_numpy(test.labels[places]))
    return Target(
        subject.model,
        subject.data.task.with_gallery(labels),
        test.images[places],
        labels,
        settings.batch,
        SEED,
        settings.precision,
        people=test.people_at(places),
    )


def check_attack_settings(settings: Robustness, task: Task) -> None:
    """Raise UserError for what has no meaning with such labels, before anything is computed."""
    if settings.survivors and (reason := task.needs_classes("share")):
        raise UserError(f"robustness.survivors: found true, but {reason}; allowed: false")
    for number, attack in enumerate(settings.attacks):
        if reason := attack.refuses(task):
            allowed = "fgsm, pgd or apgd with objective task, balance or routing_change"
            raise UserError(f"robustness.attacks[{number}]: {reason}; allowed: {allowed}")


def attack_curve(
    attack: Attack, target: Target, clean: CleanAnswers, epsilons: list[float], parts: PartStore
) -> Curve | Skipped:
    """One row an epsilon; or why this model has nothing for the attack."""
    if reason := attack.does_not_apply(target.model, target.task):
        return Skipped(skipped=reason)

    def row(epsilon: float) -> AttackRow:
        name = f"{attack.name} at {epsilon}"
        return load_or_compute(
            parts,
            name,
            AttackRow,
            lambda: measure_attack_at_epsilon(attack, target, clean, epsilon),
        )

    return tuple(row(epsilon) for epsilon in epsilons)


def measure_attack_at_epsilon(
    attack: Attack, target: Target, clean: CleanAnswers, epsilon: float
) -> AttackRow:
    """Return what is left at an epsilon; UserError where 0 changes predictions."""
    adversarial = target.attacked(attack, epsilon)
    prediction, routing = target.predict_images(adversarial)
    if epsilon == 0 and not torch.equal(prediction, clean.prediction):
        raise UserError(
            f"robustness: {attack.name} at epsilon 0 changes predictions; the model is not "
            "deterministic in evaluation mode"
        )
    task = target.task
    unchanged = (adversarial == target.clean_images()).flatten(1).all(1)
    # Where only some images were attacked, the others' routing would count as unmoved.
    moved = target.only is None
    return AttackRow.of(
        epsilon,
        task,
        task.worse_scores(clean.scores, task.scores(prediction, target.labels)),
        target.people,
        loss=float(task.test_loss(prediction, target.labels).mean()),
        unchanged_images=float(unchanged.double().mean()),
        routing_change=routing_change_by_layer(clean.routing, routing) if moved else (),
        processing_change=processing_change_by_layer(clean.routing, routing) if moved else (),
        items=routing_change_items(clean.routing, routing, target.people) if moved else {},
    )


def routing_change_items(
    before: tuple[RoutingRecord, ...], after: tuple[RoutingRecord, ...], people: np.ndarray | None
) -> dict[str, str]:
    """Both changes of the routing, one number an item, mean over layers; {} for a dense model."""
    layers = list(zip(before, after, strict=True))
    if not layers:
        return {}
    processed = [1 - iou_by_image(a.combine != 0, b.combine != 0) for a, b in layers]
    return {
        name: encode_item_values(torch.stack(changes).mean(dim=0).numpy(), people)
        for name, changes in (
            ("routing_change", changes_by_image(before, after)),
            ("processing_change", processed),
        )
    }
