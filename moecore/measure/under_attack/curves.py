"""What is left of a model's scores under attack, epsilon by epsilon.

Every score stands beside that of the clean image, which lies in every ball: an attack that happens
to mend an image changes nothing. N images.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Self

import numpy as np
from pydantic import Field
from torch import Tensor

from moecore.attacks.attack_setup import Target
from moecore.attacks.base import Attack
from moecore.core.config import Config
from moecore.data.prepared import evenly_spaced_indices
from moecore.measure.exploring.expert_overlay_data import EncodedPicture, encode_thumbnails
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Task


class ScoresAtEpsilon(Config):
    """The scores left at one epsilon: their mean with its 95 % interval, and each image's."""

    epsilon: float = Field(description="radius of the L∞ ball, in pixel units")
    score: float
    low: float | None
    high: float | None
    scores: str | tuple[float, ...] = Field(description="one an image, as the task packs them")

    @classmethod
    def of(
        cls, epsilon: float, task: Task, scores: Tensor, people: np.ndarray | None = None, **more
    ) -> Self:
        """scores: (N,), of the task; people: (N,), whose image each is; more: other fields."""
        interval = task.interval(scores, people)
        return cls(
            epsilon=epsilon,
            score=interval.value,
            low=interval.low,
            high=interval.high,
            scores=task.encode_scores(scores),
            **more,
        )


class AttackRow(ScoresAtEpsilon):
    """One attack at one epsilon."""

    loss: float = Field(description="the task's mean loss over the attacked images alone")
    unchanged_images: float = Field(description="share of the images that the attack left as is")
    routing_change: tuple[float, ...] = Field(description="by MoE layer; () where not measured")
    processing_change: tuple[float, ...] = Field(description="by MoE layer; () where not measured")
    items: dict[str, tuple[float, ...]] = Field(
        {}, description="of both changes, mean over layers, one an image"
    )


Curve = tuple[AttackRow, ...]  # one row an epsilon, in growing order
Curves = Mapping[str, Curve]  # of the attacks that were run, by their names


def worst_case(
    curves: Curves, task: Task, images: int, people: np.ndarray | None = None
) -> tuple[ScoresAtEpsilon, ...]:
    """One row an epsilon over all attacks: of each image the worst score that any of them left.

    () where no attack was run. Raises ValueError where attacks were run at different epsilons.
    """
    every = list(curves.values())
    if len({tuple(row.epsilon for row in rows) for rows in every}) > 1:
        raise ValueError("worst_case: the attacks were run at different epsilons")
    return tuple(
        ScoresAtEpsilon.of(rows[0].epsilon, task, worst_scores(task, rows, images), people)
        for rows in zip(*every, strict=True)
    )


def worst_scores(task: Task, rows: Sequence[ScoresAtEpsilon], images: int) -> Tensor:
    """Return each image's worst score of these rows; (N,)."""
    return reduce(task.worse_scores, [task.decode_scores(row.scores, images) for row in rows])


class AttackedPictures(Config):
    """A few images within one radius."""

    epsilon: float
    pictures: EncodedPicture  # (N, C, h, w)


class AttackedGallery(Config):
    """A few images as the strongest attack made them (adversarial-moe, figure 5)."""

    attack: str  # of all that were run the one that leaves the worst score at the largest radius
    rows: tuple[AttackedPictures, ...]  # in growing order of the radius; the first is clean


def attack_gallery(
    target: Target, attacks: Sequence[Attack], number: int, curves: Curves
) -> AttackedGallery | None:
    """``number`` images of the target, evenly spread, at each epsilon under the strongest attack.

    That is the one that leaves the worst score at the largest epsilon; of equal ones the loss
    decides. None of volumes, and where no attack was run or no picture is wanted.
    """
    if not number or not curves or target.images.ndim != 4:
        return None
    sign = 1 if target.task.score.better == "higher" else -1
    last = {name: rows[-1] for name, rows in curves.items()}
    strongest = min(last, key=lambda name: (sign * last[name].score, -last[name].loss))
    attack = next(one for one in attacks if one.name == strongest)
    where = evenly_spaced_indices(len(target.labels), number)
    few = target._replace(images=target.images[where], labels=target.labels[where], only=None)
    rows = [
        AttackedPictures(
            epsilon=row.epsilon, pictures=encode_thumbnails(few.attacked(attack, row.epsilon))
        )
        for row in curves[strongest]
    ]
    return AttackedGallery(attack=strongest, rows=rows)


class AuditLine(Config):
    """One question of the audit."""

    name: str
    holds: bool | None
    text: str


def unevaluated_audit_line(name: str, reason: str) -> AuditLine:
    """A line that could not be told; ``reason`` in words."""
    return AuditLine(name=name, holds=None, text=f"not judged: {reason}")


def is_share(task: Task) -> bool:
    """Return whether an image is simply right or wrong."""
    return task.needs_classes("share") is None


def is_equal_or_worse(task: Task, one: float, other: float) -> bool:
    """Return whether the score ``one`` is as bad as ``other``, or worse."""
    if task.score.better == "higher":
        return one <= other
    return one >= other


def format_score(task: Task, value: float) -> str:
    """A score in words."""
    if task.score.form == "share":
        return f"{value:.1%}"
    return f"{value:.4g}"


def worse_limit(task: Task, interval: Interval) -> float:
    """The end of an interval that holds the worse scores."""
    low, high = interval_limits(interval)
    if task.score.better == "higher":
        return low
    return high


def format_score_interval(task: Task, interval: Interval) -> str:
    """A score and its interval in words."""
    low, high = interval_limits(interval)
    between = f"{format_score(task, low)} to {format_score(task, high)}"
    return f"{task.score.label} {format_score(task, interval.value)} ({between})"


def interval_limits(interval: Interval) -> tuple[float, float]:
    """The ends of an interval; the value itself where it has none."""
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    return low, high


class AttackAudit(Config):
    """The audit."""

    lines: tuple[AuditLine, ...]
