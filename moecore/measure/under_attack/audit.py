"""The self-audit of an evaluation under attack: signs that the attacks are too weak to be believed.

Every line says what was found; ``holds`` is None where it could not be told. N images.
Sources: Carlini et al. (2019); Croce & Hein (2020).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks import Attack
from moecore.attacks.gradient import image_gradient
from moecore.attacks.pgd import Pgd
from moecore.attacks.target import Target
from moecore.core.config import Config
from moecore.measure.under_attack.compared_curves import (
    apgd_beats_pgd,
    larger_epsilon,
    pgd_beats_fgsm,
)
from moecore.measure.under_attack.curves import (
    Curves,
    Line,
    is_share,
    limits,
    no_better,
    not_judged,
    shown,
    with_limits,
    worse_limit,
)
from moecore.nn.layers.smooth import softened
from moecore.nn.predict import batches, device_of, evaluating
from moecore.statistics.intervals import bootstrap_mean
from moecore.tasks.base import Task


class Audit(Config):
    """The extra attacks of the audit, all PGD from the clean image on the task's loss."""

    images: int = Field(
        100, ge=1, description="The first of the attacked images; all where there are fewer."
    )
    steps: int = Field(20, ge=1, description="Steps of PGD; one line doubles them.")
    large_epsilon: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Radius at which accuracy must be down to chance, the error of a real target "
        "up to a constant's.",
    )


def audit(
    target: Target, settings: Audit, epsilon: float, curves: Curves, attacks: Sequence[Attack]
) -> tuple[Line, ...]:
    """All lines.

    target: what the curves were measured on; epsilon: their largest; attacks: their settings.
    """
    images = settings.images
    part = target.first(images)
    direct = Pgd(steps=settings.steps)
    longer = Pgd(steps=2 * settings.steps)
    left = part.worst(part.attacked(direct, epsilon))
    left_longer = part.worst(part.attacked(longer, epsilon))
    task = target.task
    lines = [
        deterministic(part),
        zero_gradients(part),
        pgd_beats_fgsm(task, curves, attacks),
        apgd_beats_pgd(task, curves, attacks),
        chance(part, direct, settings.large_epsilon),
        more_steps(task, left, left_longer, settings.steps, epsilon, part.people),
        surrogate(part, direct, epsilon, left),
    ]
    if is_share(task):
        return tuple(lines)
    return (*lines, larger_epsilon(task, curves, attacks))


def deterministic(target: Target) -> Line:
    """Two forward passes over the same images give the same bits."""
    device = device_of(target.model)

    def said() -> Tensor:
        every = batches(target.images, target.batch, device)
        return torch.cat([target.model(images).prediction for images in every])

    # Both within one ``evaluating``: two would give them the same random numbers, which hides that
    # the model draws any.
    with evaluating(target.model), torch.no_grad():
        first = said()
        second = said()
    same = torch.equal(first, second)
    apart = float((first - second).abs().max())
    if same:
        words = "are bit-equal"
    else:
        words = f"differ by up to {apart:.3g}"
    text = f"two forward passes over {len(first)} images {words}"
    return Line(name="deterministic", holds=same, text=text)


def zero_gradients(target: Target) -> Line:
    """No clean image has a gradient of nothing but zeros, as saturated or blocked losses give."""
    device = device_of(target.model)
    images = batches(target.images, target.batch, device)
    shares = []
    with evaluating(target.model):
        for pixels, labels in zip(images, target.labels.split(target.batch), strict=True):
            gradient = image_gradient(target.model, target.task, pixels, labels.to(device))
            shares.append((gradient == 0).flatten(1).double().mean(dim=1).cpu())
    share = torch.cat(shares)
    blind = int((share == 1).sum())
    text = (
        f"{blind} of {len(share)} images have no gradient at all; "
        f"{float(share.mean()):.2%} of all pixels' gradients are 0"
    )
    return Line(name="zero_gradients", holds=blind == 0, text=text)


def chance(target: Target, attack: Pgd, epsilon: float) -> Line:
    """Check that in a ball that holds nearly every image the score is no better than a guess."""
    task = target.task
    left = target.worst(target.attacked(attack, epsilon))
    found = task.interval(left, target.people)
    guess = task.guess(target.labels)
    text = f"{with_limits(task, found)} at ε = {epsilon:g}; a guess has {shown(task, guess)}"
    return Line(name="chance", holds=no_better(task, worse_limit(task, found), guess), text=text)


def more_steps(
    task: Task,
    left: Tensor,
    longer: Tensor,
    steps: int,
    epsilon: float,
    people: np.ndarray | None = None,
) -> Line:
    """Twice the steps leave no worse score than the interval allows; both (N,) scores."""
    found = task.interval(left, people)
    then = float(longer.double().mean())
    text = (
        f"{with_limits(task, found)} under pgd of {steps} steps, "
        f"{shown(task, then)} of {2 * steps}, at ε = {epsilon:g}"
    )
    return Line(name="more_steps", holds=no_better(task, worse_limit(task, found), then), text=text)


def surrogate(target: Target, attack: Pgd, epsilon: float, direct: Tensor) -> Line:
    """Images made on a model of all experts at once do no more harm than the direct attack's.

    direct: (N,), the scores that the direct attack left.
    """
    if getattr(target.model, "moe", None) is None:
        return not_judged("surrogate", "the model has no MoE layer")
    soft = target._replace(model=softened(target.model))
    theirs = target.worst(soft.attacked(attack, epsilon))
    task = target.task
    if is_share(task):
        ours = int(direct.sum())
        stand = int(theirs.sum())
        text = (
            f"{stand} of {len(theirs)} images stand the attack from the soft all-experts "
            f"surrogate, {ours} the direct one, at ε = {epsilon:g}"
        )
        return Line(name="surrogate", holds=ours <= stand, text=text)
    # Image by image: what is more by chance alone is no sign.
    change = (theirs - direct).double().numpy()
    low, high = limits(bootstrap_mean(change, lowest=-math.inf, people=target.people))
    text = (
        f"{task.score.label} {shown(task, float(theirs.mean()))} under the attack from the soft "
        f"all-experts surrogate, {shown(task, float(direct.mean()))} under the direct one "
        f"({low:+.3g} to {high:+.3g}), at ε = {epsilon:g}"
    )
    return Line(name="surrogate", holds=low <= 0, text=text)
