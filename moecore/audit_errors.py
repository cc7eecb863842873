"""The self-audit of an evaluation under attack where the target is a real number: the lines of moecore.audit in terms of errors.

An image's error is the larger one of its clean and its attacked image, as everywhere (moecore.evaluation.robust_errors).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from moecore.attacked import Target, name_of
from moecore.attacks import Attack
from moecore.attacks.pgd import Pgd
from moecore.audit import Audit, Line, Rows, deterministic, zero_gradients
from moecore.evaluation.intervals import bootstrap_mean
from moecore.evaluation.robust_errors import error_score
from moecore.layers.soft import softened

CLIMBS = ("pgd", "apgd")  # many small steps: fgsm's single one may overshoot, so that a larger ball helps it less


def audit_errors(
    target: Target, settings: Audit, epsilon: float, curves: Mapping[str, Rows | None], attacks: Sequence[Attack], other: nn.Module | None
) -> list[Line]:
    """All lines; arguments as of ``moecore.audit.audit``, the rows of the curves with mae and loss."""
    part = target._replace(images=target.images[: settings.images], labels=target.labels[: settings.images], only=None)
    direct, longer = Pgd(steps=settings.steps), Pgd(steps=2 * settings.steps)
    wrong = worst_error(part, part.attacked(direct, epsilon))
    return [
        deterministic(part),
        zero_gradients(part),
        pgd_beats_fgsm(curves, attacks),
        apgd_beats_pgd(curves, attacks),
        larger_epsilon(curves, attacks),
        no_better_than_a_constant(part, direct, settings.large_epsilon),
        more_steps(wrong, worst_error(part, part.attacked(longer, epsilon)), settings.steps, epsilon),
        surrogate(part, direct, epsilon, wrong),
        transfer(part, direct, epsilon, wrong, other),
    ]


def worst_error(target: Target, adversarial: Tensor) -> Tensor:
    """The larger error of each image, clean or attacked; (N,) fp64."""
    return torch.maximum(target.errors(target.images), target.errors(adversarial))


def pgd_beats_fgsm(curves: Mapping[str, Rows | None], attacks: Sequence[Attack]) -> Line:
    """Many steps reach at least the error of one."""
    return _stronger(curves, attacks, "pgd", "fgsm")


def apgd_beats_pgd(curves: Mapping[str, Rows | None], attacks: Sequence[Attack]) -> Line:
    """APGD reaches at least PGD's error, on average."""
    return _stronger(curves, attacks, "apgd", "pgd")


def larger_epsilon(curves: Mapping[str, Rows | None], attacks: Sequence[Attack]) -> Line:
    """No attack of many steps reaches a smaller mean error in a larger ball, which holds all of the smaller one."""
    found = {name: [row["mae"] for row in rows] for name, rows in _climbs(curves, attacks).items()}
    if not found:
        return Line("larger_epsilon", None, "not judged: neither pgd nor apgd on the task's loss is among the attacks")
    falling = [name for name, errors in found.items() if any(after < before for before, after in pairwise(errors))]
    words = f"the mean error falls in a larger ball under {', '.join(falling)}" if falling else f"the mean error never falls ({', '.join(found)})"
    return Line("larger_epsilon", not falling, words)


def no_better_than_a_constant(target: Target, attack: Pgd, epsilon: float) -> Line:
    """In a ball that holds nearly every image, the error is at least that of the median of these labels."""
    found, constant = error_score(worst_error(target, target.attacked(attack, epsilon))), median_error(target.labels)
    words = f"mean error {found['mae']:.4g} ({found['low']:.4g} to {found['high']:.4g}) at ε = {epsilon:g}; a constant has {constant:.4g}"
    return Line("chance", found["high"] >= constant, words)


def median_error(labels: Tensor) -> float:
    """The mean absolute error (N,) of the labels' own median (the mean of the two middle ones)."""
    known = labels.double()
    return float((known - known.quantile(0.5)).abs().mean())


def more_steps(wrong: Tensor, longer: Tensor, steps: int, epsilon: float) -> Line:
    """Twice the steps reach no larger mean error than the interval allows; both (N,)."""
    found, then = error_score(wrong), float(longer.double().mean())
    between = f"{found['low']:.4g} to {found['high']:.4g}"
    words = f"mean error {found['mae']:.4g} ({between}) under pgd of {steps} steps, {then:.4g} of {2 * steps}, at ε = {epsilon:g}"
    return Line("more_steps", then <= found["high"], words)


def surrogate(target: Target, attack: Pgd, epsilon: float, direct: Tensor) -> Line:
    """Images made on a model of all experts at once reach no larger error than the direct attack's, ``direct`` (N,)."""
    if getattr(target.model, "moe", None) is None:
        return Line("surrogate", None, "not judged: the model has no MoE layer")
    made = target._replace(model=softened(target.model)).attacked(attack, epsilon)
    return _compared("surrogate", "from the soft all-experts surrogate", worst_error(target, made), direct, epsilon)


def transfer(target: Target, attack: Pgd, epsilon: float, direct: Tensor, other: nn.Module | None) -> Line:
    """Images made on another model reach no larger error than the direct attack's, ``direct`` (N,)."""
    if other is None:
        return Line("transfer", None, "not judged: no second model is given, or it is this one")
    made = target._replace(model=other).attacked(attack, epsilon)
    return _compared("transfer", "from the second model", worst_error(target, made), direct, epsilon)


def _compared(name: str, whence: str, theirs: Tensor, ours: Tensor, epsilon: float) -> Line:
    """Image by image: what is more by chance alone is no sign. ``theirs`` and ``ours``: (N,)."""
    found = bootstrap_mean((theirs - ours).double().numpy(), lowest=-math.inf)
    words = f"mean error {float(theirs.mean()):.4g} under the attack {whence}, {float(ours.mean()):.4g} under the direct one"
    return Line(name, found.low <= 0, f"{words} ({found.low:+.3g} to {found.high:+.3g}), at ε = {epsilon:g}")


def _stronger(curves: Mapping[str, Rows | None], attacks: Sequence[Attack], one: str, other: str) -> Line:
    """The attack of kind ``one`` reaches at least the mean error of ``other``, at the largest epsilon."""
    ours, theirs = _last(curves, attacks, one), _last(curves, attacks, other)
    if ours is None or theirs is None:
        return Line(f"{one}_beats_{other}", None, f"not judged: {one} and {other} on the task's loss are not both among the attacks")
    words = f"mean error {ours['mae']:.4g} under {one}, {theirs['mae']:.4g} under {other}, at ε = {ours['epsilon']:g}"
    return Line(f"{one}_beats_{other}", ours["mae"] >= theirs["mae"], words)


def _climbs(curves: Mapping[str, Rows | None], attacks: Sequence[Attack]) -> dict[str, Rows]:
    wanted = (name_of(attack) for attack in attacks if attack.kind in CLIMBS and attack.objective == "task")
    return {name: rows for name in wanted if (rows := curves[name]) is not None}


def _last(curves: Mapping[str, Rows | None], attacks: Sequence[Attack], kind: str) -> Mapping[str, Any] | None:
    """The row of the largest epsilon of the first attack of that kind on the task's loss."""
    rows = next((curves[name_of(attack)] for attack in attacks if attack.kind == kind and attack.objective == "task"), None)
    return None if rows is None else rows[-1]
