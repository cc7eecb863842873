"""The transfer of attacks: images that were made on one method's model, scored by another's.

Where an attack made elsewhere does more harm than the model's own, the model hides its gradients,
and its robustness must not be believed (Carlini et al., 2019). N images.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.attack_setup import Precision, Target, draw_image_indices
from moecore.attacks.base import Attack
from moecore.attacks.pgd import Pgd
from moecore.core.files import UserError
from moecore.core.surroundings import Misfits, Surroundings
from moecore.data.prepared import Prepared
from moecore.measure.base import SEED, MeasuredPart, PartStore
from moecore.measure.under_attack.audit import AuditLine, is_equal_or_worse, unevaluated_audit_line
from moecore.measure.values import SCORE, Found, Metric, Values
from moecore.nn.backbones.base_model import Model
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Task

BATCH = 128  # images a forward pass
PAIR = ("made_on", "scored_by")  # methods
METRICS = {
    "transferred": Metric("{score} under transferred attack{unit}", SCORE, SCORE, over=PAIR),
    # From the direct attack's; all intervals hold together at 95 %.
    "transferred_difference": Metric("Difference from the direct attack", form=SCORE, over=PAIR),
}


class Transfer(MeasuredPart):
    """Which images are attacked, and how."""

    metrics = METRICS

    attack: Attack = Pgd(steps=20)
    epsilon: float = Field(
        4 / 255, ge=0, le=1, description="Radius of the L∞ ball in pixel units [0, 1]."
    )
    images: int = Field(
        100, ge=1, description="Test images, drawn once; the same for every method."
    )
    precision: Precision = Field(
        "float32", description="Of an attack's passes; its images are scored in float32 either way."
    )

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield text, which has no pixels."""
        if around.is_text:
            yield (), f"found a section, but {around.data} is text; allowed: leave it out"


class TargetsAndAttackedImages(NamedTuple):
    """The models on the same images, and the images that were attacked on each."""

    targets: Mapping[str, Target]
    images: Callable[[str], Tensor]  # by method: (N, C, H, W)


def measure(
    models: Mapping[str, Model], data: Prepared, settings: Transfer, parts: PartStore
) -> Found:
    """Score every pair of models by the names of their methods, a part each.

    facts: what was attacked; score, that of the task; skipped, method → why no image is made on
    its model; reading, an ``AuditLine``. Raises UserError where the attack makes no sense for the
    task.
    """
    task = data.task
    if reason := settings.attack.refuses(task):
        allowed = "fgsm, pgd or apgd with objective task, balance or routing_change"
        raise UserError(f"transfer.attack: {reason}; allowed: {allowed}")
    made = build_transfer_targets(models, data, settings)
    reasons = {name: settings.attack.does_not_apply(models[name], task) for name in models}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    left = {
        (source, target): transferred_scores(made, source, target, parts)
        for source in models
        if source not in skipped
        for target in models
    }
    out = Values(METRICS, task, parts)
    out.people = next(iter(made.targets.values())).people
    put_transfer(out, left)
    out.facts |= {
        "score": task.score,
        "attack": settings.attack.name,
        "epsilon": settings.epsilon,
        "images": min(settings.images, len(data.test.labels)),
        "methods": list(models),
        "skipped": skipped,
        "reading": check_no_stronger_transfer(task, out.found()),
    }
    return out.found()


def build_transfer_targets(
    models: Mapping[str, Model], data: Prepared, settings: Transfer
) -> TargetsAndAttackedImages:
    """The targets; an attack is made when its images are first asked for."""
    test = data.test
    places = draw_image_indices(len(test.labels), settings.images, SEED)
    images = test.images[places]
    labels = torch.from_numpy(test.labels[places])
    targets = {
        name: Target(
            model,
            data.task.with_gallery(model.targets(labels)),
            images,
            model.targets(labels),
            BATCH,
            SEED,
            settings.precision,
            people=test.people_at(places),
        )
        for name, model in models.items()
    }

    # The pairs come source by source, so the last one's images are enough.
    @lru_cache(maxsize=1)
    def attacked(name: str) -> Tensor:
        return targets[name].attacked(settings.attack, settings.epsilon)

    return TargetsAndAttackedImages(targets, attacked)


def transferred_scores(
    made: TargetsAndAttackedImages, source: str, target: str, parts: PartStore
) -> Tensor:
    """Return what images made on ``source`` leave of the scores of ``target``; (N,)."""
    task = made.targets[target].task
    kept = parts(
        f"{source} on {target}",
        lambda: task.encode_scores(made.targets[target].worse_scores(made.images(source))),
    )
    return task.decode_scores(kept, len(made.targets[target].labels))


def put_transfer(out: Values, left: Mapping[tuple[str, str], Tensor]) -> None:
    """left: (source, target) → scores (N,)."""
    foreign = sum(source != target and (target, target) in left for source, target in left)
    # Bonferroni: of many pairs one in twenty would lie beyond a single interval by chance alone.
    level = 1 - 0.05 / max(foreign, 1)
    for (source, target), scores in left.items():
        at = {"made_on": source, "scored_by": target}
        out.put("transferred", out.task.interval(scores, out.people), **at)
        direct = left.get((target, target))
        if direct is not None:
            change = out.task.difference(scores, direct, level, out.people)
            out.put("transferred_difference", change, **at)


def check_no_stronger_transfer(task: Task, result: Found) -> AuditLine:
    """No attack from another model does more harm than the direct one, by more than chance."""
    foreign = [
        one
        for one in result.all("transferred_difference")
        if one.at["made_on"] != one.at["scored_by"]
    ]
    if not foreign:
        return unevaluated_audit_line("transfer", "there is no second model that can be attacked")
    stronger = [
        f"from {one.at['made_on']} on {one.at['scored_by']}"
        for one in foreign
        if is_worse_beyond_chance(task, one.interval)
    ]
    text = f"{len(stronger)} of {len(foreign)} transferred attacks do more harm than the direct one"
    if stronger:
        text = f"{text}: {', '.join(stronger)}"
    return AuditLine(name="transfer", holds=not stronger, text=text)


def is_worse_beyond_chance(task: Task, difference: Interval) -> bool:
    """Return whether the interval of (transferred − direct) is all on the worse side."""
    limit = difference.high if task.score.better == "higher" else difference.low
    value = difference.value if limit is None else limit
    return value != 0 and is_equal_or_worse(task, value, 0.0)
