"""The transfer of attacks: images that were made on one method's model, scored by another's.

Where an attack made elsewhere does more harm than the model's own, the model hides its gradients,
and its robustness must not be believed (Carlini et al., 2019). N images.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.attack_setup import Precision, Target, draw_image_indices
from moecore.attacks.base import Attack
from moecore.attacks.pgd import Pgd
from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.surroundings import Misfits, Surroundings
from moecore.data.prepared import Prepared
from moecore.measure.base import SEED, PartStore, load_or_compute
from moecore.measure.under_attack.curves import AuditLine, is_equal_or_worse, unevaluated_audit_line
from moecore.nn.backbones.base_model import Model
from moecore.statistics.intervals import Estimate
from moecore.tasks.base import Task

BATCH = 128  # images a forward pass


class Transfer(Config):
    """Which images are attacked, and how."""

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


class PairScores(Config):
    """What images made on one model left of another's scores."""

    scores: str | tuple[float, ...] = Field(description="one an image, as the task packs them")


class TransferCell(Config):
    """Images made on the model of one method, scored by the model of another, or by itself."""

    made_on: str
    scored_by: str
    score: Estimate
    difference: Estimate | None = Field(
        description="mean score − the direct attack's; all intervals hold together at 95 %"
    )


class Result(Config):
    """The matrix, row by row, and what it says of the attacks."""

    task: Task
    attack: str
    epsilon: float
    images: int
    methods: tuple[str, ...] = Field(description="whose models are attacked and score")
    skipped: dict[str, str] = Field(description="methods on whose model no image is made, and why")
    cells: tuple[TransferCell, ...]
    reading: AuditLine


class TargetsAndAttackedImages(NamedTuple):
    """The models on the same images, and the images that were attacked on each."""

    targets: Mapping[str, Target]
    images: Callable[[str], Tensor]  # by method: (N, C, H, W)


def measure(
    models: Mapping[str, Model], data: Prepared, settings: Transfer, parts: PartStore
) -> Result:
    """Every pair of models by the names of their methods, a part each.

    Raises UserError where the attack makes no sense for the task.
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
    people = next(iter(made.targets.values())).people
    cells = transfer_cells(task, left, people)
    return Result(
        task=task,
        attack=settings.attack.name,
        epsilon=settings.epsilon,
        images=min(settings.images, len(data.test.labels)),
        methods=tuple(models),
        skipped=skipped,
        cells=cells,
        reading=check_no_stronger_transfer(task, cells),
    )


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

    def compute() -> PairScores:
        left = made.targets[target].worse_scores(made.images(source))
        return PairScores(scores=task.encode_scores(left))

    kept = load_or_compute(parts, f"{source} on {target}", PairScores, compute)
    return task.decode_scores(kept.scores, len(made.targets[target].labels))


def transfer_cells(
    task: Task, left: Mapping[tuple[str, str], Tensor], people: np.ndarray | None = None
) -> tuple[TransferCell, ...]:
    """left: (source, target) → scores (N,); people: (N,), whose image each is, or None."""
    foreign = sum(source != target and (target, target) in left for source, target in left)
    # Bonferroni: of many pairs one in twenty would lie beyond a single interval by chance alone.
    level = 1 - 0.05 / max(foreign, 1)

    def difference(target: str, scores: Tensor) -> Estimate | None:
        direct = left.get((target, target))
        if direct is None:
            return None
        return Estimate.of(task.difference(scores, direct, level, people))

    return tuple(
        TransferCell(
            made_on=source,
            scored_by=target,
            score=Estimate.of(task.interval(scores, people)),
            difference=difference(target, scores),
        )
        for (source, target), scores in left.items()
    )


def check_no_stronger_transfer(task: Task, cells: tuple[TransferCell, ...]) -> AuditLine:
    """No attack from another model does more harm than the direct one, by more than chance."""
    foreign = {
        f"from {cell.made_on} on {cell.scored_by}": cell.difference
        for cell in cells
        if cell.made_on != cell.scored_by and cell.difference is not None
    }
    if not foreign:
        return unevaluated_audit_line("transfer", "there is no second model that can be attacked")
    stronger = [
        pair for pair, difference in foreign.items() if is_worse_beyond_chance(task, difference)
    ]
    text = f"{len(stronger)} of {len(foreign)} transferred attacks do more harm than the direct one"
    if stronger:
        text = f"{text}: {', '.join(stronger)}"
    return AuditLine(name="transfer", holds=not stronger, text=text)


def is_worse_beyond_chance(task: Task, difference: Estimate) -> bool:
    """Return whether the interval of (transferred − direct) is all on the worse side."""
    limit = difference.high if task.score.better == "higher" else difference.low
    value = difference.value if limit is None else limit
    return value != 0 and is_equal_or_worse(task, value, 0.0)
