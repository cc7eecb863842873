"""Scores under attack at each epsilon.

An image's score is the worse of attacked and clean, as every ball contains the clean image: an
attack that corrects a wrong answer changes nothing. N images.
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
    """Scores at one epsilon: their mean with its 95 % interval, and each image's."""

    epsilon: float = Field(description="radius of the L∞ ball, in pixel units")
    score: float
    low: float | None
    high: float | None
    scores: str | tuple[float, ...] = Field(description="one per image, as the task packs them")

    @classmethod
    def of(
        cls, epsilon: float, task: Task, scores: Tensor, people: np.ndarray | None = None, **more
    ) -> Self:
        """Return a row of scores (N,); ``more``: fields of a subclass."""
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
    """Scores, loss and routing under one attack at one epsilon."""

    loss: float = Field(description="the task's mean loss over the attacked images alone")
    unchanged_images: float = Field(description="share of the images that the attack left as is")
    routing_change: tuple[float, ...] = Field(description="by MoE layer; () where not measured")
    processing_change: tuple[float, ...] = Field(description="by MoE layer; () where not measured")
    items: dict[str, tuple[float, ...]] = Field(
        {}, description="both changes, mean over layers, one value per image"
    )


Curve = tuple[AttackRow, ...]  # one row per epsilon, in ascending order
Curves = Mapping[str, Curve]  # attack name → curve, of attacks that were run


def worst_case(
    curves: Curves, task: Task, images: int, people: np.ndarray | None = None
) -> tuple[ScoresAtEpsilon, ...]:
    """Return one row per epsilon: each image's worst score over all attacks; () without attacks."""
    if len({tuple(row.epsilon for row in rows) for rows in curves.values()}) > 1:
        raise ValueError("worst_case: the attacks were run at different epsilons")
    return tuple(
        ScoresAtEpsilon.of(rows[0].epsilon, task, worst_scores(task, rows, images), people)
        for rows in zip(*curves.values(), strict=True)
    )


def worst_scores(task: Task, rows: Sequence[ScoresAtEpsilon], images: int) -> Tensor:
    """Return each image's worst score of these rows; (N,)."""
    return reduce(task.worse_scores, [task.decode_scores(row.scores, images) for row in rows])


class AttackedPictures(Config):
    """A few images attacked at one epsilon."""

    epsilon: float
    pictures: EncodedPicture  # (N, C, h, w)


class AttackedGallery(Config):
    """A few images under the strongest attack (adversarial-moe, figure 5)."""

    attack: str  # the attack with the worst score at the largest epsilon
    rows: tuple[AttackedPictures, ...]  # in ascending order of epsilon; the first is clean


def attack_gallery(
    target: Target, attacks: Sequence[Attack], number: int, curves: Curves
) -> AttackedGallery | None:
    """Return ``number`` images at each epsilon under the strongest attack, evenly spread.

    It has the worst score at the largest epsilon; in a tie the larger loss. None for volumes, and
    without attacks or images.
    """
    if not number or not curves or target.images.ndim != 4:
        return None
    sign = 1 if target.task.score.better == "higher" else -1
    last = {name: rows[-1] for name, rows in curves.items()}
    strongest = min(last, key=lambda name: (sign * last[name].score, -last[name].loss))
    attack = next(attack for attack in attacks if attack.name == strongest)
    indices = evenly_spaced_indices(len(target.labels), number)
    few = target._replace(images=target.images[indices], labels=target.labels[indices], only=None)
    rows = [
        AttackedPictures(
            epsilon=row.epsilon, pictures=encode_thumbnails(few.attacked(attack, row.epsilon))
        )
        for row in curves[strongest]
    ]
    return AttackedGallery(attack=strongest, rows=rows)


class AuditLine(Config):
    """Result of one check of the audit."""

    name: str
    holds: bool | None
    text: str


def unevaluated_audit_line(name: str, reason: str) -> AuditLine:
    """Return the line of a check that could not be made."""
    return AuditLine(name=name, holds=None, text=f"not judged: {reason}")


def is_share(task: Task) -> bool:
    """Return whether each image is right or wrong."""
    return task.needs_classes("share") is None


def is_equal_or_worse(task: Task, score: float, other: float) -> bool:
    """Return whether ``score`` is equal to ``other`` or worse."""
    if task.score.better == "higher":
        return score <= other
    return score >= other


def format_score(task: Task, value: float) -> str:
    """Return a score as text."""
    if task.score.form == "share":
        return f"{value:.1%}"
    return f"{value:.4g}"


def worse_limit(task: Task, interval: Interval) -> float:
    """Return the limit of an interval on the side of worse scores."""
    low, high = interval_limits(interval)
    if task.score.better == "higher":
        return low
    return high


def format_score_interval(task: Task, interval: Interval) -> str:
    """Return a score and its limits as text."""
    low, high = interval_limits(interval)
    limits = f"{format_score(task, low)} to {format_score(task, high)}"
    return f"{task.score.label} {format_score(task, interval.value)} ({limits})"


def interval_limits(interval: Interval) -> tuple[float, float]:
    """Return the limits of an interval; without limits, the value."""
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    return low, high
