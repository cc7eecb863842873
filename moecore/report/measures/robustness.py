"""Scores and routing under attack, attacked pictures, and whether the attacks can be believed."""

import re
from collections.abc import Iterator, Sequence

from moecore.measure.robustness import Result
from moecore.measure.under_attack.curves import (
    AttackRow,
    measured_curves,
)
from moecore.measure.under_attack.curves import AuditLine as Audited
from moecore.report.column import (
    SCORE,
    Column,
    ColumnPerRow,
    ContextDependentColumns,
    mean_or_none,
    score_slug,
)
from moecore.report.figures.charts import (
    ChartSpec,
    attack_points,
    draw_score_over_epsilon,
    interval_caption,
    panels_chart,
    points_over_seeds,
)
from moecore.report.figures.sheets import SheetLabels, Tile, displayable_image, sheet
from moecore.report.measures.attacked_scores import (
    WORST,
    attack_scores_by_epsilon,
    attack_title,
    attacked_name,
    attacked_score_columns,
    attacks_of,
    planned_attacked_score_names,
    planned_attacks,
    planned_score_names_by_epsilon,
    score_by_epsilon_columns,
)
from moecore.report.measures.result_display import Figures, Shown, draw_method_curves, items_reader
from moecore.report.page.view import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.reference_methods import references
from moecore.report.tables.number_format import PIXEL, format_epsilon, shorten_epsilons
from moecore.report.typed_results import Phase, list_without_none

MARKS = {True: "✓ holds", False: "✗ does not hold", None: "– not judged"}
LOOKS = {True: "verdict holds", False: "verdict differs", None: "verdict open"}
WORST_FIRST = (False, None, True)

FIGURES = {"pgd": " (figure 2 of the paper)", "apgd": " (figure 4b of the paper)"}


def attack_change_columns(name: str, word: str, what: str) -> ColumnPerRow:
    """Change of the experts that are chosen, or that process a token, under each attack."""
    column = Column(
        f"{name}_{{}}",
        f"{word} change, {{}}, ε\u00a0=\u00a0{{}}",
        lambda row: mean_or_none(getattr(row, name)),
        "lower",
        note=f"1 − IoU of the experts that {what} a token at ε = {{1}}, mean over layers",
        paper="adversarial",
        items=items_reader(name),
    )
    words = lambda attack, row: [attack_title(attack), format_epsilon(row.epsilon)]
    return ColumnPerRow(largest_epsilon_rows, column, planned_attacks, words)


def largest_epsilon_rows(result: Result) -> dict[str, AttackRow]:
    """Attack → its row of the largest epsilon."""
    return {attack: rows[-1] for attack, rows in measured_curves(result.attacks).items()}


def rows_by_attack_and_layer(result: Result) -> dict[str, tuple[AttackRow, int]]:
    """pgd-10_layer_1 and so on → the attack's row of the largest epsilon, and the layer from 0."""
    return {
        f"{attack}_layer_{layer + 1}": (row, layer)
        for attack, row in largest_epsilon_rows(result).items()
        for layer in range(len(row.routing_change))
    }


def attack_and_layer_words(key: str, moved: tuple[AttackRow, int]) -> list[str]:
    """The attack, the number of the layer, epsilon."""
    attack, layer = key.rsplit("_layer_", 1)
    return [attack_title(attack), layer, format_epsilon(moved[0].epsilon)]


COLUMNS = (
    ContextDependentColumns(attacked_score_columns, planned_attacked_score_names, SCORE, SCORE),
    ContextDependentColumns(score_by_epsilon_columns, planned_score_names_by_epsilon, SCORE, SCORE),
    attack_change_columns("routing_change", "Routing", "are chosen for"),
    attack_change_columns("processing_change", "Processing", "process"),
    ColumnPerRow(
        rows_by_attack_and_layer,
        Column(
            "routing_change_{}",
            "Routing change, {}, MoE {}, ε\u00a0=\u00a0{}",
            lambda moved: moved[0].routing_change[moved[1]],
            "lower",
            note="1 − IoU of the experts that are chosen at ε = {2} in MoE layer {1}",
            paper="adversarial",
            detail=True,
        ),
        lambda ahead: [
            f"{attack}_layer_{layer}" for attack in planned_attacks(ahead) for layer in ahead.layers
        ],
        attack_and_layer_words,
    ),
)


def figures(result: Result) -> Figures:
    """The score over epsilon, a line per attack."""
    curves = {
        name: attack_points([attack_scores_by_epsilon(result, name)], result.task.score)
        for name in [*attacks_of(result), WORST]
    }
    yield "score_under_attack", draw_score_over_epsilon(curves, "attack", result.task.score)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The score over epsilon for each attack and their worst, the routing's change, the audit."""
    results = phase.results(Result)
    attacks = list(dict.fromkeys(name for result in results for name in attacks_of(result)))
    drawn = [draw_attack_curve(phase, attack) for attack in attacks]
    if all(result.worst_case for result in results):
        drawn.append(draw_attack_curve(phase, WORST))
    for draw in (draw_changes, draw_routing_change_by_layer):
        drawn += [picture for attack in attacks for picture in draw(phase, attack)]
    worst = WORST if results[0].worst_case else attacks[-1]
    about = attacked_name(score_slug(results[0].task.score), worst)
    yield Block("Robustness", pictures=drawn, about=about)
    yield Block("Attacked pictures", pictures=draw_attacked_images(phase), about=about)
    yield audit_block(phase)


def draw_attack_curve(phase: Phase, attack: str) -> Picture:
    seeds = phase.of(Result)
    first = phase.results(Result)[0]
    curves = {
        method: attack_points(
            [attack_scores_by_epsilon(result, attack) for result in of_method], first.task.score
        )
        for method, of_method in seeds.items()
    }
    what = {WORST: "the worst attack for each image"}.get(attack, attack_title(attack))
    images = f"{first.images} test images, the same for every method."
    return Picture(
        draw_score_over_epsilon(curves, what, first.task.score),
        f"{phase.name}: {attack_title(attack)}",
        f"{images} Bands: 95 % intervals.",
    )


def draw_changes(phase: Phase, attack: str) -> list[Picture]:
    """The change of the routing under one attack; [] where no method has it."""

    def changes(result: Result) -> dict[float, float | None]:
        rows = measured_curves(result.attacks).get(attack, ())
        return {row.epsilon * PIXEL: mean_or_none(row.routing_change) for row in rows}

    look = change_chart_spec(attack)
    label = f"routing under {attack}"
    words = "Mean over MoE layers."
    return draw_method_curves(phase, Result, changes, look, words, label, (0.0, 1.0))


def draw_routing_change_by_layer(phase: Phase, attack: str) -> list[Picture]:
    """The change of the routing of each MoE layer under one attack; [] where nothing moved."""

    def changes(result: Result, layer: int) -> dict[float, float]:
        rows = measured_curves(result.attacks).get(attack, ())
        having = [row for row in rows if layer < len(row.routing_change)]
        return {row.epsilon * PIXEL: row.routing_change[layer] for row in having}

    seeds = phase.of(Result)
    last = list_without_none(
        largest_epsilon_rows(result).get(attack) for result in phase.results(Result)
    )
    panels = {
        f"MoE {layer + 1}": {
            method: points_over_seeds([changes(result, layer) for result in results], (0.0, 1.0))
            for method, results in seeds.items()
        }
        for layer in range(max((len(row.routing_change) for row in last), default=0))
    }
    if not panels:
        return []
    drawn = FIGURES.get(re.split("[-_]", attack)[0], "")
    caption = f"By MoE layer{drawn}. {interval_caption(seeds)}"
    chart = panels_chart(panels, change_chart_spec(attack))
    return [Picture(chart, f"{phase.name}: layers under {attack}", caption)]


def change_chart_spec(attack: str) -> ChartSpec:
    title = f"Routing change under {attack_title(attack)}"
    return ChartSpec(title, f"ε in 1/{PIXEL}", "1 − IoU of experts", share=True)


def draw_attacked_images(phase: Phase) -> list[Picture]:
    """A few images under the strongest attack, of the methods that all others are held against."""
    pictures = []
    first = phase.first(Result)
    for method in references(phase.models):
        shown = getattr(first.get(method), "attacked", None)
        if shown is None:
            continue
        tiles = [
            [Tile(displayable_image(one)) for one in row.pictures.array()] for row in shown.rows
        ]
        names = [
            {0: "clean"}.get(row.epsilon, f"ε = {format_epsilon(row.epsilon)}")
            for row in shown.rows
        ]
        title = f"{attack_title(shown.attack)} on {method}"
        figure = sheet(tiles, SheetLabels(title, names), 1.1, 1.1)
        caption = f"{method}. Images as the strongest attack made them (figure 5)."
        label = f"{phase.name}: attacked pictures of {method}"
        pictures.append(Picture(figure, label, caption + phase.first_seed))
    return pictures


def audit_block(phase: Phase) -> Block:
    """A row per question."""
    lines = {
        method: [line for result in seeds for line in result.audit]
        for method, seeds in phase.of(Result).items()
    }
    every = [line for of_method in lines.values() for line in of_method]
    rows = [
        TableRow(
            PageCell(name.replace("_", " ")),
            [
                worst_audit_verdict_cell([line for line in one if line.name == name])
                for one in lines.values()
            ],
        )
        for name in dict.fromkeys(line.name for line in every)
    ]
    grids = [PageTable(["Question", *lines], rows)] if rows else []
    return Block("Can the attacks be believed?", grids=grids, finding=describe_audit_tally(every))


def worst_audit_verdict_cell(audited: Sequence[Audited]) -> PageCell:
    """Return what all seeds say of a question: the worst verdict, with its words."""
    if not audited:
        return NONE
    worst = min(audited, key=lambda line: WORST_FIRST.index(line.holds))
    return PageCell(
        MARKS[worst.holds],
        note=shorten_epsilons(worst.text.removeprefix("not judged: ")),
        look=LOOKS[worst.holds],
    )


def describe_audit_tally(audited: Sequence[Audited]) -> str:
    """Return how many of the questions that could be told hold."""
    verdicts = [line.holds for line in audited]
    told = len(verdicts) - verdicts.count(None)
    return f"{verdicts.count(True)} of {told} lines of the audit hold"


SHOWN = Shown("robustness", "robustness", Result, COLUMNS, figures, phase_blocks, place=4)
