"""What stands beside the curves under attack: the routing's change, attacked pictures, the audit.

And how results under attack are read.
"""

import re
from collections.abc import Mapping, Sequence

from moecore.measure.base import Skipped
from moecore.measure.robustness import Result
from moecore.measure.under_attack.curves import AttackRow, LeftScores, measured_curves
from moecore.measure.under_attack.curves import AuditLine as Audited
from moecore.report.column import mean_or_none
from moecore.report.figures.charts import (
    Look,
    curves_chart,
    interval_caption,
    panels_chart,
    points_over_seeds,
)
from moecore.report.figures.sheets import Frame, Tile, picture, sheet
from moecore.report.measured import Phase
from moecore.report.page.view import NONE, Block, Grid, Item, Line, Picture
from moecore.report.references import references
from moecore.report.tables.number_format import PIXEL, format_epsilon, with_named_epsilons

MARKS = {True: "✓ holds", False: "✗ does not hold", None: "– not judged"}
LOOKS = {True: "verdict holds", False: "verdict differs", None: "verdict open"}
WORST_FIRST = (False, None, True)

WORST = "worst_case"
FIGURES = {"pgd": " (figure 2 of the paper)", "apgd": " (figure 4b of the paper)"}
ACRONYMS = ("fgsm", "pgd", "apgd", "ce", "dlr")


def attacks_of(result: Result) -> list[str]:
    """The attacks that the model met; a routing attack has nothing for a dense one."""
    return list(measured_curves(result.attacks))


def rows_of(result: Result, attack: str) -> tuple[LeftScores, ...]:
    """An attack's rows by epsilon, or the worst case's; () where the model did not meet it."""
    if attack == WORST:
        return result.worst_case
    rows = result.attacks.get(attack, ())
    return () if isinstance(rows, Skipped) else rows


def moves_of(result: Result, attack: str) -> tuple[AttackRow, ...]:
    """The rows of one attack, with what it does to the routing."""
    return measured_curves(result.attacks).get(attack, ())


def attack_title(name: str) -> str:
    """An attack's name for readers: pgd-10 → PGD 10, apgd_ce → APGD CE."""
    words = name.replace("_", "-").split("-")
    return " ".join(word.upper() if word in ACRONYMS else word for word in words)


def strongest(result: Result, attack: str) -> str:
    """The largest epsilon of an attack: 8/255."""
    return format_epsilon(rows_of(result, attack)[-1].epsilon)


def moved_by(phase: Phase, attack: str) -> Picture | None:
    """The change of the routing under one attack; None where no method has it."""

    def of(result: Result) -> dict[float, float]:
        changes = {
            row.epsilon * PIXEL: mean_or_none(row.routing_change)
            for row in moves_of(result, attack)
        }
        return {x: value for x, value in changes.items() if value is not None}

    curves = {
        method: points_over_seeds([of(result) for result in seeds], (0.0, 1.0))
        for method, seeds in phase.of(Result).items()
    }
    if not any(curves.values()):
        return None
    title = f"Routing change under {attack_title(attack)}"
    look = Look(title, f"ε in 1/{PIXEL}", "1 − IoU of experts", share=True)
    caption = "Mean over MoE layers. " + interval_caption(phase.of(Result))
    return Picture(curves_chart(curves, look), f"{phase.name}: routing under {attack}", caption)


def moved_by_layer(phase: Phase, attack: str) -> Picture | None:
    """The change of the routing of each MoE layer under one attack; None where nothing moved."""
    layers = max((len(rows[-1].routing_change) for rows in every_move(phase, attack)), default=0)
    if layers == 0:
        return None

    def of(result: Result, layer: int) -> dict[float, float]:
        rows = [row for row in moves_of(result, attack) if layer < len(row.routing_change)]
        return {row.epsilon * PIXEL: row.routing_change[layer] for row in rows}

    panels = {
        f"MoE {layer + 1}": {
            method: points_over_seeds([of(result, layer) for result in seeds], (0.0, 1.0))
            for method, seeds in phase.of(Result).items()
        }
        for layer in range(layers)
    }
    title = f"Routing change under {attack_title(attack)}"
    look = Look(title, f"ε in 1/{PIXEL}", "1 − IoU of experts", share=True)
    drawn = FIGURES.get(re.split("[-_]", attack)[0], "")
    caption = f"By MoE layer{drawn}. {interval_caption(phase.of(Result))}"
    return Picture(panels_chart(panels, look), f"{phase.name}: layers under {attack}", caption)


def every_move(phase: Phase, attack: str) -> list[tuple[AttackRow, ...]]:
    """The rows of one attack of every model that met it."""
    moves = [moves_of(result, attack) for result in phase.results(Result)]
    return [rows for rows in moves if rows]


def attacked(phase: Phase) -> list[Picture]:
    """A few images under the strongest attack, of the methods that all others are held against."""
    pictures = []
    first = phase.first(Result)
    for method in references(phase.models):
        shown = first[method].attacked if method in first else None
        if shown is None:
            continue
        tiles = [[Tile(picture(one)) for one in row.pictures.array()] for row in shown.rows]
        names = [
            f"ε = {format_epsilon(row.epsilon)}" if row.epsilon else "clean" for row in shown.rows
        ]
        title = f"{attack_title(shown.attack)} on {method}"
        figure = sheet(tiles, Frame(title, names), 1.1, 1.1)
        caption = f"{method}. Images as the strongest attack made them (figure 5)."
        label = f"{phase.name}: attacked pictures of {method}"
        pictures.append(Picture(figure, label, caption + phase.first_seed))
    return pictures


def audit(lines: Mapping[str, Sequence[Sequence[Audited]]]) -> Block:
    """A row per question; lines: method → seed → the audit."""
    every = [line for seeds in lines.values() for audited in seeds for line in audited]
    rows = [
        Line(
            Item(name.replace("_", " ")),
            [
                answer([line for audited in seeds for line in audited if line.name == name])
                for seeds in lines.values()
            ],
        )
        for name in dict.fromkeys(line.name for line in every)
    ]
    grids = [Grid(["Question", *lines], rows)] if rows else []
    title = "Can the attacks be believed?"
    return Block(title, grids=grids, folded=True, finding=tally(every))


def answer(audited: Sequence[Audited]) -> Item:
    """What all seeds say of a question: the worst verdict, with its words."""
    if not audited:
        return NONE
    worst = min(audited, key=lambda line: WORST_FIRST.index(line.holds))
    return Item(
        MARKS[worst.holds],
        note=with_named_epsilons(worst.text.removeprefix("not judged: ")),
        look=LOOKS[worst.holds],
    )


def tally(audited: Sequence[Audited]) -> str:
    """How many of the questions that could be told hold."""
    verdicts = [line.holds for line in audited]
    told = len(verdicts) - verdicts.count(None)
    return f"{verdicts.count(True)} of {told} lines of the audit hold"
