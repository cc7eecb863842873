"""Scores and routing under attack, and whether the attacks can be believed."""

from collections.abc import Callable, Iterator

import numpy as np

from moecore.measure.robustness import Result
from moecore.measure.under_attack.curves import worst_scores
from moecore.report.column import (
    SCORE,
    Ahead,
    Column,
    Each,
    decode_items,
    key_of,
    limits_of,
    mean_or_none,
    score_title,
)
from moecore.report.figures.charts import attack_points, under_attack
from moecore.report.measured import Measured, Phase
from moecore.report.measures.attack_blocks import (
    WORST,
    attack_title,
    attacked,
    attacks_of,
    audit,
    moved_by,
    moved_by_layer,
    moves_of,
    rows_of,
    strongest,
)
from moecore.report.measures.shown import Figures
from moecore.report.page.view import Block, Picture
from moecore.statistics.crossed import values_by_person
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score


def hits_under(model: Measured, attack: str) -> np.ndarray | None:
    """Which images (N,) are right at the largest epsilon, of the worst case whatever the attack.

    None where an image is not simply right or wrong.
    """
    result = model.of(Result)
    if result is None or result.task.needs_classes("share") is not None:
        return None
    return left_under(result, attack)


def left_under(result: Result, attack: str) -> np.ndarray | None:
    """The scores (N,) at the largest epsilon, of the worst case whatever the attack; or None."""
    names = attacks_of(result) if attack == WORST else [attack]
    last = [rows_of(result, name)[-1] for name in names if rows_of(result, name)]
    return worst_scores(result.task, last, result.images).numpy() if last else None


def items_under(attack: str) -> Callable[[Result], np.ndarray | None]:
    """The same as one value per item: of people, where they have several images."""

    def read(result: Result) -> np.ndarray | None:
        left = left_under(result, attack)
        people = None if result.people is None else np.array(result.people)
        return None if left is None else values_by_person(left, people)

    return read


def asked(ahead: Ahead) -> list[str]:
    """The attacks of a study that is still to be run."""
    return [attack.name for attack in ahead.study.robustness.attacks]


def scored(ahead: Ahead, attack: str) -> str:
    """The name of the score under an attack."""
    share = ahead.score == "accuracy"
    return f"{ahead.score}_{attack}" if share else f"attacked_{ahead.score}_{attack}"


def score_under(attack: str, result: Result) -> Column:
    """The score at the largest epsilon of an attack, or of the worst of them for each image."""

    def read(result: Result) -> Interval | None:
        rows = rows_of(result, attack)
        return Interval(rows[-1].score, rows[-1].low, rows[-1].high) if rows else None

    score = result.task.score
    share = score.form == "share"
    title, note = words_under(attack, score)
    name = f"{key_of(score)}_{attack}" if share else f"attacked_{score.name}_{attack}"
    return Column(
        name,
        f"{title}, ε\u00a0=\u00a0{strongest(result, attack)}",  # never broken into two lines
        read,
        score.better,
        score.form,
        note,
        "adversarial",
        hits=lambda model: hits_under(model, attack),
        items=items_under(attack),
        limits=limits_of(score),
    )


def words_under(attack: str, score: Score) -> tuple[str, str]:
    """The label without its epsilon, and the note."""
    if score.form == "share":
        if attack == WORST:
            return "Worst case", "accuracy where an image counts only if no attack broke it"
        return attack_title(attack), "accuracy under attack"
    if attack == WORST:
        return f"{score_title(score)}, worst case", "largest error of each volume over all attacks"
    return f"{score_title(score)}, {attack_title(attack)}", "mean error under attack"


def change_under(name: str, word: str, what: str) -> Each:
    """Change of the experts that are chosen, or that process a token, under each attack."""

    def column(attack: str, result: Result) -> Column:
        def read(result: Result) -> float | None:
            rows = moves_of(result, attack)
            return mean_or_none(getattr(rows[-1], name)) if rows else None

        def items(result: Result) -> np.ndarray | None:
            rows = moves_of(result, attack)
            return decode_items(rows[-1].items.get(name)) if rows else None

        at = strongest(result, attack)
        return Column(
            f"{name}_{attack}",
            f"{word} change, {attack_title(attack)}, ε\u00a0=\u00a0{at}",
            read,
            "lower",
            note=f"1 − IoU of the experts that {what} a token at ε = {at}, mean over layers",
            paper="adversarial",
            items=items,
        )

    return Each(attacks_of, column, lambda ahead: [f"{name}_{one}" for one in asked(ahead)])


def change_by_layer(attack_and_layer: str, result: Result) -> Column:
    """Change of the chosen experts of one MoE layer under one attack."""
    attack, layer = attack_and_layer.rsplit(" ", 1)
    place = int(layer) - 1

    def read(result: Result) -> float | None:
        rows = moves_of(result, attack)
        moved = rows[-1].routing_change if rows else ()
        return moved[place] if place < len(moved) else None

    at = strongest(result, attack)
    return Column(
        f"routing_change_{attack}_layer_{layer}",
        f"Routing change, {attack_title(attack)}, MoE {layer}, ε\u00a0=\u00a0{at}",
        read,
        "lower",
        note=f"1 − IoU of the experts that are chosen at ε = {at} in MoE layer {layer}",
        paper="adversarial",
        detail=True,
    )


def attacks_and_layers(result: Result) -> list[str]:
    """pgd-10 1, pgd-10 2, …"""
    return [
        f"{attack} {layer}"
        for attack in attacks_of(result)
        for layer in range(1, 1 + len(moves_of(result, attack)[-1].routing_change))
    ]


def layers_ahead(ahead: Ahead) -> list[str]:
    """The names of those columns, of as many layers as the model has blocks."""
    names = asked(ahead)
    return [f"routing_change_{one}_layer_{layer}" for one in names for layer in ahead.layers]


COLUMNS = (
    Each(
        attacks_of,
        score_under,
        lambda ahead: [scored(ahead, attack) for attack in asked(ahead)],
        SCORE,
    ),
    Each(
        lambda result: [WORST] if result.worst_case else [],
        score_under,
        lambda ahead: [scored(ahead, WORST)],
        SCORE,
    ),
    change_under("routing_change", "Routing", "are chosen for"),
    change_under("processing_change", "Processing", "process"),
    Each(attacks_and_layers, change_by_layer, layers_ahead),
)


def figures(result: Result) -> Figures:
    """The score over epsilon, a line per attack."""
    curves = {
        name: attack_points([rows_of(result, name)], result.task.score)
        for name in [*attacks_of(result), WORST]
    }
    yield "score_under_attack", under_attack(curves, "attack", result.task.score)


def part(phase: Phase) -> Iterator[Block]:
    """The score over epsilon for each attack and their worst, the routing's change, the audit."""
    results = phase.results(Result)
    if not results:
        return
    attacks = list(dict.fromkeys(name for result in results for name in attacks_of(result)))
    drawn = [curve_of(phase, attack) for attack in attacks]
    if all(result.worst_case for result in results):
        drawn.append(curve_of(phase, WORST))
    moved = [of(phase, attack) for of in (moved_by, moved_by_layer) for attack in attacks]
    every = [*drawn, *(one for one in moved if one is not None)]
    about = score_under(WORST if results[0].worst_case else attacks[-1], results[0]).name
    yield Block("Robustness", pictures=every, folded=True, about=about)
    yield Block("Attacked pictures", pictures=attacked(phase), folded=True, about=about)
    lines = {
        method: [result.audit for result in seeds] for method, seeds in phase.of(Result).items()
    }
    yield audit(lines)


def curve_of(phase: Phase, attack: str) -> Picture:
    """One attack, a line per method."""
    seeds = phase.of(Result)
    first = phase.results(Result)[0]
    curves = {
        method: attack_points([rows_of(result, attack) for result in of_method], first.task.score)
        for method, of_method in seeds.items()
    }
    what = "the worst attack for each image" if attack == WORST else attack_title(attack)
    images = f"{first.images} test images, the same for every method."
    return Picture(
        under_attack(curves, what, first.task.score),
        f"{phase.name}: {attack_title(attack)}",
        f"{images} Bands: 95 % intervals.",
    )
