"""Lines of the audit that compare the curves of two attacks: the stronger must not do less harm."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from moecore.attacks.base import Attack
from moecore.measure.under_attack.curves import (
    AttackRow,
    AuditLine,
    Curves,
    format_score,
    is_equal_or_worse,
    unevaluated_audit_line,
)
from moecore.tasks.base import Task

BOTH = "are not both among the attacks"
# Many small steps: fgsm's single one may overshoot, so that a larger ball helps it less.
CLIMBS = ("pgd", "apgd")


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
