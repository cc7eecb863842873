"""Attack test images on one method's model, and score them by the other methods' models.

If an attack made on another model does more harm than the direct one, the model hides its
gradients, and its measured robustness is not reliable (Carlini et al., 2019).
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks import attack_target, base, pgd
from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.measure.attack_audit import AuditLine, is_equal_or_worse, unevaluated_audit_line
from moecore.measure.base import SEED, MeasuredPart, PartStore
from moecore.measure.values import SCORE, Found, Metric, Values
from moecore.nn.backbones.base_model import Model
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Task

BATCH = 128  # images per forward pass
PLACES = ("made_on", "scored_by")  # methods
METRICS = {
    "transferred": Metric("{score} under transferred attack{unit}", SCORE, SCORE, over=PLACES),
    # Transferred − direct attack; all intervals hold simultaneously at 95 %.
    "transferred_difference": Metric("Difference from the direct attack", form=SCORE, over=PLACES),
}


class Transfer(MeasuredPart):
    """Settings of transferred attacks: which images are attacked, and how."""

    metrics = METRICS

    attack: base.Attack = pgd.Pgd(steps=20)
    epsilon: float = Field(4 / 255, ge=0, le=1, description="Radius of the L∞ ball, pixels [0, 1].")
    images: int = Field(100, ge=1, description="Test images, drawn once; the same for all methods.")
    precision: attack_target.Precision = Field(
        "float32", description="Of an attack's passes; its images are scored in float32 either way."
    )

    def misfits(self, around: Surroundings) -> Misfits:
        if around.is_text:
            yield (), f"found a section, but {around.data} is text; allowed: leave it out"


def measure(
    models: Mapping[str, Model], data: Prepared, settings: Transfer, parts: PartStore
) -> Found:
    """Score every model on the images that were attacked on every model; store finished pairs."""
    # facts: the attack's settings; score: of the task; skipped: method → why no image is made on
    # its model; reading: an ``AuditLine``.
    task = data.task
    (radius,) = settings.attack.radii([settings.epsilon])
    if reason := settings.attack.refuses(task):
        raise UserError(
            f"transfer.attack: {reason}; allowed: fgsm, pgd or apgd with objective task, balance "
            "or routing_change"
        )
    targets = build_transfer_targets(models, data, settings)

    # Pairs are scored source by source, so only the last source's images are cached.
    @lru_cache(maxsize=1)
    def attacked_images(name: str) -> Tensor:
        return targets[name].attacked(settings.attack, radius)

    def score(source: str, target: str) -> Tensor:
        scorer = targets[target]
        encoded = parts(
            f"{source} on {target}",
            lambda: scorer.task.encode_scores(scorer.worse_scores(attacked_images(source))),
        )
        return scorer.task.decode_scores(encoded, len(scorer.labels))

    reasons = {name: settings.attack.does_not_apply(models[name], task) for name in models}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    scores = {
        (source, target): score(source, target)
        for source in models
        if source not in skipped
        for target in models
    }
    out = Values(METRICS, task, parts)
    out.people = next(iter(targets.values())).people
    put_transfer(out, scores)
    out.facts |= {
        "score": task.score,
        "attack": settings.attack.name,
        "epsilon": radius,
        "images": min(settings.images, len(data.test.labels)),
        "methods": list(models),
        "skipped": skipped,
        "reading": check_no_stronger_transfer(task, out.found()),
    }
    return out.found()


def build_transfer_targets(
    models: Mapping[str, Model], data: Prepared, settings: Transfer
) -> dict[str, attack_target.Target]:
    test = data.test
    places = attack_target.draw_image_indices(len(test.labels), settings.images, SEED)
    images = test.images[places]
    labels = torch.from_numpy(test.labels[places])
    shared = {"precision": settings.precision, "people": test.people_at(places)}
    targets = {}
    for name, model in models.items():
        truth = model.targets(labels)
        task = data.task.with_gallery(truth)
        targets[name] = attack_target.Target(model, task, images, truth, BATCH, SEED, **shared)
    return targets


def put_transfer(out: Values, pairs: Mapping[tuple[str, str], Tensor]) -> None:
    """Put ``transferred`` scores, and differences from direct attacks; (source, target) → (N,)."""
    foreign = sum(source != target and (target, target) in pairs for source, target in pairs)
    # Bonferroni: one pair in twenty would lie outside a single 95 % interval by chance.
    level = 1 - 0.05 / max(foreign, 1)
    for (source, target), scores in pairs.items():
        at = {"made_on": source, "scored_by": target}
        out.put("transferred", out.task.interval(scores, out.people), **at)
        direct = pairs.get((target, target))
        if direct is not None:
            change = out.task.difference(scores, direct, level, out.people)
            out.put("transferred_difference", change, **at)


def check_no_stronger_transfer(task: Task, result: Found) -> AuditLine:
    """Return an ``AuditLine`` on whether no transferred attack does more harm than a direct one."""
    pairs = result.all("transferred_difference")
    foreign = [value for value in pairs if value.at["made_on"] != value.at["scored_by"]]
    if not foreign:
        return unevaluated_audit_line("transfer", "there is no second model that can be attacked")
    stronger = [
        f"from {value.at['made_on']} on {value.at['scored_by']}"
        for value in foreign
        if is_worse_beyond_chance(task, value.interval)
    ]
    text = f"{len(stronger)} of {len(foreign)} transferred attacks do more harm than the direct one"
    if stronger:
        text += f": {', '.join(stronger)}"
    return AuditLine(name="transfer", holds=not stronger, text=text)


def is_worse_beyond_chance(task: Task, difference: Interval) -> bool:
    limit = difference.high if task.score.better == "higher" else difference.low
    value = difference.value if limit is None else limit
    return value != 0 and is_equal_or_worse(task, value, 0.0)
