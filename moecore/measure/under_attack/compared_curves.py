"""Lines of the audit that compare the curves of two attacks: the stronger must not do less harm."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from moecore.attacks import Attack
from moecore.measure.base import Skipped
from moecore.measure.under_attack.curves import (
    Curves,
    Line,
    Row,
    is_share,
    no_better,
    not_judged,
    shown,
)
from moecore.tasks.base import Task

BOTH = "are not both among the attacks"
# Many small steps: fgsm's single one may overshoot, so that a larger ball helps it less.
CLIMBS = ("pgd", "apgd")


def pgd_beats_fgsm(task: Task, curves: Curves, attacks: Sequence[Attack]) -> Line:
    """Many steps leave a score that is no better than one step's."""
    many = _strongest_row(curves, attacks, _of_kind("pgd"))
    one = _strongest_row(curves, attacks, _of_kind("fgsm"))
    if many is None or one is None:
        return not_judged("pgd_beats_fgsm", f"fgsm and pgd on the task's loss {BOTH}")
    text = (
        f"{task.score.label} {shown(task, many.score)} under pgd, "
        f"{shown(task, one.score)} under fgsm, at ε = {many.epsilon:g}"
    )
    return Line(name="pgd_beats_fgsm", holds=no_better(task, many.score, one.score), text=text)


def apgd_beats_pgd(task: Task, curves: Curves, attacks: Sequence[Attack]) -> Line:
    """APGD reaches at least what PGD does, on average."""
    best = _strongest_row(curves, attacks, _of_kind("apgd"))
    plain = _strongest_row(curves, attacks, _of_kind("pgd"))
    if best is None or plain is None:
        return not_judged("apgd_beats_pgd", f"apgd and pgd on the task's loss {BOTH}")
    where = f"at ε = {best.epsilon:g}"
    # An image that is right or wrong hides how far an attack went; the loss shows it.
    if is_share(task):
        text = f"mean loss {best.loss:.4g} under apgd, {plain.loss:.4g} under pgd, {where}"
        return Line(name="apgd_beats_pgd", holds=best.loss >= plain.loss, text=text)
    text = (
        f"{task.score.label} {shown(task, best.score)} under apgd, "
        f"{shown(task, plain.score)} under pgd, {where}"
    )
    return Line(name="apgd_beats_pgd", holds=no_better(task, best.score, plain.score), text=text)


def larger_epsilon(task: Task, curves: Curves, attacks: Sequence[Attack]) -> Line:
    """No attack of many steps leaves a better score in a larger ball, which holds the smaller."""
    falling = []
    judged = []
    for attack in attacks:
        rows = curves[attack.name]
        if attack.kind not in CLIMBS or not attack.climbs_task or isinstance(rows, Skipped):
            continue
        judged.append(attack.name)
        if not all(no_better(task, after.score, before.score) for before, after in pairwise(rows)):
            falling.append(attack.name)
    if not judged:
        reason = "neither pgd nor apgd on the task's loss is among the attacks"
        return not_judged("larger_epsilon", reason)
    what = task.score.label
    text = f"the {what} never gets better ({', '.join(judged)})"
    if falling:
        text = f"the {what} gets better in a larger ball under {', '.join(falling)}"
    return Line(name="larger_epsilon", holds=not falling, text=text)


def _strongest_row(
    curves: Curves, attacks: Sequence[Attack], wanted: Callable[[Attack], bool]
) -> Row | None:
    """The row of the largest epsilon of the first attack of that sort."""
    for attack in attacks:
        if wanted(attack):
            rows = curves[attack.name]
            if isinstance(rows, Skipped):
                return None
            return rows[-1]
    return None


def _of_kind(kind: str) -> Callable[[Attack], bool]:
    """The attacks of a kind on the task's loss."""
    return lambda attack: attack.kind == kind and attack.climbs_task
