"""The self-audit of an evaluation under attack: signs that the attacks are too weak to be believed.

Every line says what was found; ``holds`` is None where it could not be told. N images.
Sources: Carlini et al. (2019); Croce & Hein (2020).
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.attacks.attack_setup import Target
from moecore.attacks.base import Attack
from moecore.attacks.gradient import image_gradient
from moecore.attacks.pgd import Pgd
from moecore.core.config import Config
from moecore.measure.under_attack.curves import (
    AttackRow,
    AuditLine,
    Curves,
    format_score,
    format_score_interval,
    interval_limits,
    is_equal_or_worse,
    is_share,
    unevaluated_audit_line,
    worse_limit,
)
from moecore.nn.layers.layer_lipschitz_bound import soften_model
from moecore.nn.predict import eval_mode, image_batches, model_device
from moecore.statistics.intervals import bootstrap_mean
from moecore.tasks.base import Task

LARGE_EPSILON = 0.5  # radius at which accuracy must be down to chance
BOTH = "are not both among the attacks"
# Many small steps: fgsm's single one may overshoot, so that a larger ball helps it less.
CLIMBS = ("pgd", "apgd")


class AuditSettings(Config):
    """The extra attacks of the audit, all PGD from the clean image on the task's loss."""

    images: int = Field(
        100, ge=1, description="The first of the attacked images; all where there are fewer."
    )
    steps: int = Field(20, ge=1, description="Steps of PGD; one line doubles them.")


def run_audit(
    target: Target,
    settings: AuditSettings,
    epsilon: float,
    curves: Curves,
    attacks: Sequence[Attack],
) -> tuple[AuditLine, ...]:
    """All lines of a target, at the largest epsilon, with the attacks' settings."""
    images = settings.images
    part = target.first(images)
    direct = Pgd(steps=settings.steps)
    longer = Pgd(steps=2 * settings.steps)
    left = part.worse_scores(part.attacked(direct, epsilon))
    left_longer = part.worse_scores(part.attacked(longer, epsilon))
    task = target.task
    lines = [
        check_deterministic(part),
        check_zero_gradients(part),
        check_pgd_beats_fgsm(task, curves, attacks),
        check_apgd_beats_pgd(task, curves, attacks),
        check_huge_radius(part, direct, LARGE_EPSILON),
        check_more_steps(task, left, left_longer, settings.steps, epsilon, part.people),
        check_surrogate(part, direct, epsilon, left),
    ]
    if is_share(task):
        return tuple(lines)
    return (*lines, check_larger_epsilon(task, curves, attacks))


def check_deterministic(target: Target) -> AuditLine:
    """Two forward passes over the same images give the same bits."""
    device = model_device(target.model)

    def said() -> Tensor:
        every = image_batches(target.images, target.batch, device)
        return torch.cat([target.model(images).prediction for images in every])

    # Both within one ``eval_mode``: two would give them the same random numbers, which hides that
    # the model draws any.
    with eval_mode(target.model), torch.no_grad():
        first = said()
        second = said()
    same = torch.equal(first, second)
    apart = float((first - second).abs().max())
    if same:
        words = "are bit-equal"
    else:
        words = f"differ by up to {apart:.3g}"
    text = f"two forward passes over {len(first)} images {words}"
    return AuditLine(name="deterministic", holds=same, text=text)


def check_zero_gradients(target: Target) -> AuditLine:
    """No clean image has a gradient of nothing but zeros, as saturated or blocked losses give."""
    device = model_device(target.model)
    images = image_batches(target.images, target.batch, device)
    shares = []
    with eval_mode(target.model):
        for pixels, labels in zip(images, target.labels.split(target.batch), strict=True):
            gradient = image_gradient(target.model, target.task, pixels, labels.to(device))
            shares.append((gradient == 0).flatten(1).double().mean(dim=1).cpu())
    share = torch.cat(shares)
    blind = int((share == 1).sum())
    text = (
        f"{blind} of {len(share)} images have no gradient at all; "
        f"{float(share.mean()):.2%} of all pixels' gradients are 0"
    )
    return AuditLine(name="zero_gradients", holds=blind == 0, text=text)


def check_huge_radius(target: Target, attack: Pgd, epsilon: float) -> AuditLine:
    """Check that in a ball that holds nearly every image the score is no better than a guess."""
    task = target.task
    left = target.worse_scores(target.attacked(attack, epsilon))
    interval = task.interval(left, target.people)
    guess = task.baseline_score(target.labels)
    shown = format_score_interval(task, interval)
    text = f"{shown} at ε = {epsilon:g}; a guess has {format_score(task, guess)}"
    holds = is_equal_or_worse(task, worse_limit(task, interval), guess)
    return AuditLine(name="chance", holds=holds, text=text)


def check_more_steps(
    task: Task,
    left: Tensor,
    longer: Tensor,
    steps: int,
    epsilon: float,
    people: np.ndarray | None = None,
) -> AuditLine:
    """Twice the steps leave no worse score than the interval allows; both (N,) scores."""
    interval = task.interval(left, people)
    then = float(longer.double().mean())
    text = (
        f"{format_score_interval(task, interval)} under pgd of {steps} steps, "
        f"{format_score(task, then)} of {2 * steps}, at ε = {epsilon:g}"
    )
    return AuditLine(
        name="more_steps",
        holds=is_equal_or_worse(task, worse_limit(task, interval), then),
        text=text,
    )


def check_surrogate(target: Target, attack: Pgd, epsilon: float, direct: Tensor) -> AuditLine:
    """Images made on a model of all experts at once do no more harm than the direct attack's.

    direct: (N,), the scores that the direct attack left.
    """
    if getattr(target.model, "moe", None) is None:
        return unevaluated_audit_line("surrogate", "the model has no MoE layer")
    soft = target._replace(model=soften_model(target.model))
    theirs = target.worse_scores(soft.attacked(attack, epsilon))
    task = target.task
    if is_share(task):
        ours = int(direct.sum())
        stand = int(theirs.sum())
        text = (
            f"{stand} of {len(theirs)} images stand the attack from the soft all-experts "
            f"surrogate, {ours} the direct one, at ε = {epsilon:g}"
        )
        return AuditLine(name="surrogate", holds=ours <= stand, text=text)
    # Image by image: what is more by chance alone is no sign.
    change = (theirs - direct).double().numpy()
    low, high = interval_limits(bootstrap_mean(change, lowest=-math.inf, people=target.people))
    text = (
        f"{task.score.label} {format_score(task, float(theirs.mean()))} under the attack from the "
        f"soft all-experts surrogate, {format_score(task, float(direct.mean()))} under the direct "
        f"one ({low:+.3g} to {high:+.3g}), at ε = {epsilon:g}"
    )
    return AuditLine(name="surrogate", holds=low <= 0, text=text)


def check_pgd_beats_fgsm(task: Task, curves: Curves, attacks: Sequence[Attack]) -> AuditLine:
    """Many steps leave a score that is no better than one step's."""
    many = _strongest_row(curves, attacks, _is_of_kind("pgd"))
    one = _strongest_row(curves, attacks, _is_of_kind("fgsm"))
    if many is None or one is None:
        return unevaluated_audit_line("pgd_beats_fgsm", f"fgsm and pgd on the task's loss {BOTH}")
    text = (
        f"{task.score.label} {format_score(task, many.score)} under pgd, "
        f"{format_score(task, one.score)} under fgsm, at ε = {many.epsilon:g}"
    )
    return AuditLine(
        name="pgd_beats_fgsm", holds=is_equal_or_worse(task, many.score, one.score), text=text
    )


def check_apgd_beats_pgd(task: Task, curves: Curves, attacks: Sequence[Attack]) -> AuditLine:
    """APGD reaches at least PGD's mean loss, or leaves a score that is no better.

    A few images that PGD drives far raise its mean loss, though APGD breaks as many; an image that
    is right or wrong hides how far an attack went. An attack that is too weak falls short of both.
    """
    best = _strongest_row(curves, attacks, _is_of_kind("apgd"))
    plain = _strongest_row(curves, attacks, _is_of_kind("pgd"))
    if best is None or plain is None:
        return unevaluated_audit_line("apgd_beats_pgd", f"apgd and pgd on the task's loss {BOTH}")
    text = (
        f"mean loss {best.loss:.4g} under apgd, {plain.loss:.4g} under pgd; "
        f"{task.score.label} {format_score(task, best.score)} under apgd, "
        f"{format_score(task, plain.score)} under pgd, at ε = {best.epsilon:g}"
    )
    holds = best.loss >= plain.loss or is_equal_or_worse(task, best.score, plain.score)
    return AuditLine(name="apgd_beats_pgd", holds=holds, text=text)


def check_larger_epsilon(task: Task, curves: Curves, attacks: Sequence[Attack]) -> AuditLine:
    """No attack of many steps leaves a better score in a larger ball, which holds the smaller."""
    falling = []
    judged = []
    for attack in attacks:
        rows = curves.get(attack.name)
        if attack.kind not in CLIMBS or not attack.climbs_task or rows is None:
            continue
        judged.append(attack.name)
        if not all(
            is_equal_or_worse(task, after.score, before.score) for before, after in pairwise(rows)
        ):
            falling.append(attack.name)
    if not judged:
        reason = "neither pgd nor apgd on the task's loss is among the attacks"
        return unevaluated_audit_line("larger_epsilon", reason)
    what = task.score.label
    text = f"the {what} never gets better ({', '.join(judged)})"
    if falling:
        text = f"the {what} gets better in a larger ball under {', '.join(falling)}"
    return AuditLine(name="larger_epsilon", holds=not falling, text=text)


def _strongest_row(
    curves: Curves, attacks: Sequence[Attack], wanted: Callable[[Attack], bool]
) -> AttackRow | None:
    """The row of the largest epsilon of the first attack of that sort."""
    for attack in attacks:
        if wanted(attack):
            rows = curves.get(attack.name)
            return None if rows is None else rows[-1]
    return None


def _is_of_kind(kind: str) -> Callable[[Attack], bool]:
    """The attacks of a kind on the task's loss."""
    return lambda attack: attack.kind == kind and attack.climbs_task
