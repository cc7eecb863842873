"""Scores and routing under attack, attacked pictures, and the audit of the attacks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moecore.attacks.base import Attack
from moecore.data.card import parse_card_task
from moecore.measure.attack_audit import AttackedGallery
from moecore.measure.robustness import Robustness
from moecore.measure.values import Found, Metric, Place, Value, place_slug
from moecore.report.column import references, score_slug
from moecore.report.figures import charts
from moecore.report.figures.drawing import SheetLabels, Tile, displayable_image, sheet
from moecore.report.page.page_objects import NONE, Block, PageCell, PageTable, Picture, TableRow
from moecore.report.results import Figures, Pictures, draw_method_curves
from moecore.report.study_results import Phase
from moecore.report.tables.cells import PIXEL, format_epsilon, shorten_epsilons

WORST = "worst_case"
ACRONYMS = ("fgsm", "pgd", "apgd", "ce", "dlr", "fab")
MARKS = {True: "✓ holds", False: "✗ does not hold", None: "– not judged"}
LOOKS = {True: "verdict holds", False: "verdict differs", None: "verdict open"}
WORST_FIRST = (False, None, True)
FIGURES = {"pgd": " (figure 2 of the paper)", "apgd": " (figure 4b of the paper)"}
Audited = Mapping[str, Any]  # an ``AuditLine``


def fill_in(key: str, metric: Metric, score: str, at: Mapping[str, Place]) -> Metric:
    """Return ``metric`` with the name and texts of its column at an attack, epsilon and layer."""
    # score: as in column names. The worst case has no attack, planned names no largest epsilon.
    attack = str(at.get("attack", WORST))
    epsilon = at.get("epsilon", 0.0)
    is_mean = isinstance(epsilon, str)
    radius = "" if is_mean else format_epsilon(float(epsilon))
    texts = {"title": attack_title(attack), "epsilon": radius, "layer": str(at.get("layer", ""))}
    label, note, name = metric.label, metric.note, metric.name
    if not note:
        note = "accuracy under attack"
        if attack == WORST and score == "accuracy":
            texts["title"] = "Worst case"
            note = "accuracy where an image counts only if no attack broke it"
        elif attack == WORST:
            texts["title"] = "{score}, worst case"
            note = "largest error of each volume over all attacks"
        elif score != "accuracy":
            note = "mean error under attack"
            texts["title"] = f"{{score}}, {texts['title']}"
        name = attacked_name(score, attack)
        if metric.detail:
            name += "_mean" if is_mean else f"_at_{place_slug(radius)}"
        if is_mean:
            label = "{title}, mean"
            note = f"{note}, mean over {epsilon}"
    for place, word in texts.items():
        label, note = (text.replace(f"{{{place}}}", word) for text in (label, note))
    name = name.replace("{attack}", attack).replace("{layer}", texts["layer"])
    return metric._replace(name=name, label=label, note=note)


def attack_title(name: str) -> str:
    """Return an attack's name for readers: pgd-10 → PGD 10, apgd_ce → APGD CE."""
    parts = name.replace("_", "-").split("-")
    return " ".join(word.upper() if word in ACRONYMS else word for word in parts)


def describe_attacks(phase: Phase, settings: Mapping[str, Attack]) -> str:
    """Return a sentence on a phase's attacks and their largest ε; settings: name → attack."""
    texts = []
    own_radii = {name for name, attack in settings.items() if attack.radii(())}  # in the name
    for name in names_of_attacks(phase):
        attack = settings.get(name)
        steps = getattr(attack, "steps", None)
        if attack is not None and steps:
            changed = attack.model_copy(
                update={"steps": type(attack).model_fields["steps"].default}
            )
            texts.append(f"{attack_title(changed.name)} ({steps} steps)")
        else:
            texts.append(attack_title(name))
    results = phase.results(Robustness)
    values = [value for row in results for value in row.all("attacked")]
    epsilons = [
        float(value.at["epsilon"]) for value in values if value.at["attack"] not in own_radii
    ]
    if not epsilons:
        return ""
    changed_by = f"each pixel changed by at most {100 * max(epsilons):.2g} % of its range"
    return f"Attack: {', '.join(texts)}; {changed_by} (ε = {format_epsilon(max(epsilons))})."


def attacked_name(score: str, attack: str) -> str:
    if score == "accuracy":
        return f"accuracy_{attack}"
    return f"attacked_{score}_{attack}"


def attacks_of(result: Found) -> list[str]:
    """Return the names of the attacks that were run on the model, in their order."""
    return list(dict.fromkeys(str(value.at["attack"]) for value in result.all("attacked")))


def names_of_attacks(phase: Phase) -> list[str]:
    names = [name for result in phase.results(Robustness) for name in attacks_of(result)]
    return list(dict.fromkeys(names))


def scores_by_epsilon(result: Found, attack: str) -> list[Value]:
    """Return the scores under an attack or the worst case, by epsilon; [] if it was not run."""
    if attack == WORST:
        return result.all("worst")
    return [value for value in result.all("attacked") if value.at["attack"] == attack]


def changes_by_epsilon(result: Found, attack: str, layer: int = 0) -> dict[float, float]:
    """Return ε in 1/255 → routing change; layer: MoE layer from 1, 0 for the mean of all."""
    return {
        float(value.at["epsilon"]) * PIXEL: value.value
        for value in result.all("routing_change_layer" if layer else "routing_change")
        if (value.at["attack"], value.at.get("layer", 0)) == (attack, layer)
    }


def figures(result: Found) -> Figures:
    score = parse_card_task(result.facts["task"]).score
    curves = {
        name: charts.attack_points([scores_by_epsilon(result, name)], score)
        for name in [*attacks_of(result), WORST]
    }
    yield "score_under_attack", charts.draw_score_over_epsilon(curves, "attack", score)


def draw_under_attack(phase: Phase) -> Iterator[Picture]:
    """Yield pictures over epsilon: scores per attack and worst case, then routing changes."""
    attacks = names_of_attacks(phase)
    for attack in attacks:
        yield draw_attack_curve(phase, attack)
    if all(result.all("worst") for result in phase.results(Robustness)):
        yield draw_attack_curve(phase, WORST)
    for attack in attacks:
        yield from draw_method_curves(
            phase,
            Robustness,
            lambda result, attack=attack: changes_by_epsilon(result, attack),
            change_chart_spec(attack),
            "Mean over MoE layers.",
            label=f"routing under {attack}",
            limits=(0.0, 1.0),
        )
    for attack in attacks:
        yield from draw_routing_change_by_layer(phase, attack)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    about = attacked_name(score_slug(phase.task.score), WORST)
    pictures = []
    first = phase.first(Robustness)
    for method in references(phase.models):
        if method not in first or first[method].facts["attacked"] is None:
            continue
        shown = AttackedGallery.model_validate(first[method].facts["attacked"])
        tiles, names = [], []
        for row in shown.rows:
            tiles.append([Tile(displayable_image(image)) for image in row.pictures.array()])
            names.append(f"ε = {format_epsilon(row.epsilon)}" if row.epsilon else "clean")
        title = f"{attack_title(shown.attack)} on {method}"
        figure = sheet(tiles, SheetLabels(title, names), 1.1, 1.1)
        caption = f"{method}. Images as the strongest attack made them (figure 5)."
        label = f"{phase.name}: attacked pictures of {method}"
        pictures.append(Picture(figure, label, caption + phase.first_seed))
    yield Block("Attacked pictures", pictures=pictures, about=about)
    yield audit_block(phase)


def draw_attack_curve(phase: Phase, attack: str) -> Picture:
    score = phase.task.score
    curves = {
        method: charts.attack_points(
            [scores_by_epsilon(result, attack) for result in of_method], score
        )
        for method, of_method in phase.of(Robustness).items()
    }
    name = "the worst attack for each image" if attack == WORST else attack_title(attack)
    number = phase.results(Robustness)[0].facts["images"]
    images = f"{number} test images, the same for every method."
    return Picture(
        charts.draw_score_over_epsilon(curves, name, score),
        f"{phase.name}: {attack_title(attack)}",
        f"{images} Bands: 95 % intervals.",
    )


def draw_routing_change_by_layer(phase: Phase, attack: str) -> list[Picture]:
    """Return [a picture of the routing change over epsilon, a panel per MoE layer], or []."""
    seeds = phase.of(Robustness)
    changes = [result.all("routing_change_layer") for result in phase.results(Robustness)]
    number = max((int(value.at["layer"]) for values in changes for value in values), default=0)
    panels = {
        f"MoE {layer}": {
            method: charts.points_over_seeds(
                [changes_by_epsilon(result, attack, layer) for result in results], (0.0, 1.0)
            )
            for method, results in seeds.items()
        }
        for layer in range(1, 1 + number)
    }
    if not panels:
        return []
    source = FIGURES.get(re.split("[-_]", attack)[0], "")
    caption = f"By MoE layer{source}. {charts.interval_caption(seeds)}"
    chart = charts.panels_chart(panels, change_chart_spec(attack))
    return [Picture(chart, f"{phase.name}: layers under {attack}", caption)]


def change_chart_spec(attack: str) -> charts.ChartSpec:
    title = f"Routing change under {attack_title(attack)}"
    return charts.ChartSpec(title, f"ε in 1/{PIXEL}", "1 − IoU of experts", share=True)


def audit_block(phase: Phase) -> Block:
    lines = {
        method: [line for result in seeds for line in result.facts["audit"]]
        for method, seeds in phase.of(Robustness).items()
    }
    all_lines = [line for of_method in lines.values() for line in of_method]
    rows = [
        TableRow(
            PageCell(name.replace("_", " ")),
            [
                worst_audit_verdict_cell([line for line in of_method if line["name"] == name])
                for of_method in lines.values()
            ],
        )
        for name in dict.fromkeys(line["name"] for line in all_lines)
    ]
    grids = [PageTable(["Question", *lines], rows)] if rows else []
    verdicts = [line["holds"] for line in all_lines]
    judged = len(verdicts) - verdicts.count(None)
    finding = f"{verdicts.count(True)} of {judged} lines of the audit hold"
    return Block("Can the attacks be believed?", grids=grids, finding=finding)


def worst_audit_verdict_cell(audited: Sequence[Audited]) -> PageCell:
    """Return a cell with the worst verdict of all seeds on one check of the attacks."""
    if not audited:
        return NONE
    worst = min(audited, key=lambda line: WORST_FIRST.index(line["holds"]))
    return PageCell(
        MARKS[worst["holds"]],
        note=shorten_epsilons(worst["text"].removeprefix("not judged: ")),
        look=LOOKS[worst["holds"]],
    )


PICTURES = Pictures(
    "robustness",
    figures,
    is_on_page=False,
    draw=draw_under_attack,
    more=phase_blocks,
    fill_in=fill_in,
)
