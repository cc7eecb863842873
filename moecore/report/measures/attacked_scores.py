"""The score that a model keeps under each attack: at the largest epsilon, at each, and the mean."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moecore.measure.robustness import Result
from moecore.measure.under_attack.curves import ScoresAtEpsilon, measured_curves, worst_scores
from moecore.measure.values import place_slug
from moecore.report.column import (
    Column,
    ColumnContext,
    PlannedPhase,
    score_interval_kind,
    score_slug,
    score_title,
)
from moecore.report.tables.number_format import format_epsilon
from moecore.report.typed_results import Measured
from moecore.statistics.crossed import linearize_by_person
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score

WORST = "worst_case"
ACRONYMS = ("fgsm", "pgd", "apgd", "ce", "dlr")


def attacks_of(result: Result) -> list[str]:
    """The attacks that the model met; a routing attack has nothing for a dense one."""
    return list(measured_curves(result.attacks))


def attack_scores_by_epsilon(result: Result, attack: str) -> tuple[ScoresAtEpsilon, ...]:
    """An attack's rows by epsilon, or the worst case's; () where the model did not meet it."""
    if attack == WORST:
        return result.worst_case
    return measured_curves(result.attacks).get(attack, ())


def attack_title(name: str) -> str:
    """An attack's name for readers: pgd-10 → PGD 10, apgd_ce → APGD CE."""
    words = name.replace("_", "-").split("-")
    return " ".join(word.upper() if word in ACRONYMS else word for word in words)


def format_largest_epsilon(result: Result, attack: str) -> str:
    """The largest epsilon of an attack: 8/255."""
    return format_epsilon(attack_scores_by_epsilon(result, attack)[-1].epsilon)


def hits_at_largest_epsilon(model: Measured, attack: str) -> np.ndarray | None:
    """Return which images (N,) are right at the largest epsilon, of the worst case under all.

    None where an image is not simply right or wrong.
    """
    result = model.of(Result)
    if result is None or result.task.needs_classes("share") is not None:
        return None
    return image_scores_at_epsilon(result, attack)


def image_scores_at_epsilon(result: Result, attack: str, place: int = -1) -> np.ndarray | None:
    """The scores (N,) at an epsilon, of the worst case whatever the attack; None without any.

    place: of the epsilon among all in growing order, of which the first is 0.
    """
    names = {WORST: attacks_of(result)}.get(attack, [attack])
    curves = [attack_scores_by_epsilon(result, name) for name in names]
    rows = [curve[place] for curve in curves if curve]
    return worst_scores(result.task, rows, result.images).numpy() if rows else None


def attacked_items_reader(
    attack: str, places: Sequence[int] = (-1,)
) -> Callable[[Result], np.ndarray | None]:
    """Return what reads one value per item, the mean over the epsilons at these places.

    Of people, where they have several images.
    """

    def read(result: Result) -> np.ndarray | None:
        left = [image_scores_at_epsilon(result, attack, place) for place in places]
        known = [scores for scores in left if scores is not None]
        people = None if result.people is None else np.array(result.people)
        return linearize_by_person(np.mean(known, axis=0), people) if known else None

    return read


def planned_attacks(ahead: PlannedPhase) -> list[str]:
    return [attack.name for attack in ahead.study.robustness.attacks]


def attacked_name(score: str, attack: str) -> str:
    """Return the name of the column of a score, as names of columns have it, under an attack."""
    beginning = {"accuracy": ""}.get(score, "attacked_")
    return f"{beginning}{score}_{attack}"


def planned_attacked_score_names(ahead: PlannedPhase) -> list[str]:
    """Return the names of the columns at the largest epsilon."""
    return [attacked_name(ahead.score, attack) for attack in [*planned_attacks(ahead), WORST]]


def planned_score_names_by_epsilon(ahead: PlannedPhase) -> list[str]:
    """Return the names of those at each epsilon, and of their mean."""
    radii = [radius for radius in ahead.study.robustness.epsilons if radius]
    ends = [*(f"at_{epsilon_slug(radius)}" for radius in radii), "mean"]
    return [f"{name}_{end}" for name in planned_attacked_score_names(ahead) for end in ends]


def epsilon_slug(radius: float) -> str:
    """An epsilon inside the name of a column: 8_255, 0_001."""
    return place_slug(format_epsilon(radius))


def first_result_by_attack(seen: ColumnContext) -> dict[str, Result]:
    """Attack, or the worst case → the first result that has it."""
    first: dict[str, Result] = {}
    for result in seen.results:
        for attack in attacks_of(result):
            first.setdefault(attack, result)
    if worst := [result for result in seen.results if result.worst_case]:
        first[WORST] = worst[0]
    return first


def attacked_score_columns(seen: ColumnContext) -> list[Column]:
    """The score at the largest epsilon of each attack, and of the worst of them for each image."""
    return [
        score_column_under_attack(attack, result)
        for attack, result in first_result_by_attack(seen).items()
    ]


def score_by_epsilon_columns(seen: ColumnContext) -> Iterator[Column]:
    """Yield the same at each epsilon, and the mean over them: over a range of strengths."""
    for attack, result in first_result_by_attack(seen).items():
        whole = score_column_under_attack(attack, result)
        title, note = attack_title_and_note(attack, result.task.score)
        curve = attack_scores_by_epsilon(result, attack)
        for place, row in enumerate(curve[1:], 1):
            at = f"{title}, ε\u00a0=\u00a0{format_epsilon(row.epsilon)}"
            name = f"{whole.name}_at_{epsilon_slug(row.epsilon)}"
            yield averaged_score_column(whole, attack, range(place, place + 1))._replace(
                name=name, label=at, note=note
            )
        radii = f"{note}, mean over {len(curve) - 1} epsilons"
        mean = averaged_score_column(whole, attack, range(1, len(curve)))
        yield mean._replace(name=f"{whole.name}_mean", label=f"{title}, mean", note=radii)


def averaged_score_column(whole: Column, attack: str, places: Sequence[int]) -> Column:
    """The column ``whole`` of the mean over the epsilons at these places."""

    def read(result: Result) -> float | None:
        curve = attack_scores_by_epsilon(result, attack)
        return float(np.mean([curve[place].score for place in places])) if curve else None

    items = attacked_items_reader(attack, places)
    return whole._replace(read=read, hits=None, items=items, limits="bootstrap", detail=True)


def score_column_under_attack(attack: str, result: Result) -> Column:
    """The score at the largest epsilon of an attack, or of the worst of them for each image."""

    def read(result: Result) -> Interval | None:
        last = attack_scores_by_epsilon(result, attack)[-1:]
        return next((Interval(row.score, row.low, row.high) for row in last), None)

    score = result.task.score
    title, note = attack_title_and_note(attack, score)
    return Column(
        attacked_name(score_slug(score), attack),
        # never broken into two lines
        f"{title}, ε\u00a0=\u00a0{format_largest_epsilon(result, attack)}",
        read,
        score.better,
        score.form,
        note,
        "adversarial",
        hits=lambda model: hits_at_largest_epsilon(model, attack),
        items=attacked_items_reader(attack),
        limits=score_interval_kind(score),
    )


def attack_title_and_note(attack: str, score: Score) -> tuple[str, str]:
    if score.form == "share":
        if attack == WORST:
            return "Worst case", "accuracy where an image counts only if no attack broke it"
        return attack_title(attack), "accuracy under attack"
    if attack == WORST:
        return f"{score_title(score)}, worst case", "largest error of each volume over all attacks"
    return f"{score_title(score)}, {attack_title(attack)}", "mean error under attack"
