"""Scores and routing under attack and corruption, the audit of attacks, and their transfer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from moecore.attacks.base import Attack
from moecore.data.card import parse_card_task
from moecore.measure import attack_audit, corruptions, transfer_attacks
from moecore.measure.robustness import Robustness
from moecore.measure.values import Found, Metric, Place, Value, place_slug
from moecore.report.column import reference_methods, score_slug, score_title
from moecore.report.figures import charts, drawing
from moecore.report.page import page_objects
from moecore.report.page.page_objects import (
    DASH,
    EMPTY,
    PageBlock,
    PageCell,
    PageTable,
    Picture,
    TableRow,
    percent_table,
)
from moecore.report.result_types import PhaseResults
from moecore.report.results_and_displays import Figures, Pictures, draw_method_curves
from moecore.report.tables.cells import PIXEL, NumberFormat, format_epsilon, format_epsilons_in_text
from moecore.statistics.comparisons import crossed_difference, linearize_ratio
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score

WORST_CASE = "worst_case"
ACRONYMS = ("fgsm", "pgd", "apgd", "fab", "ce", "dlr", "t", "l2")
AUDIT_MARKS = {True: "✓ holds", False: "✗ does not hold", None: "– not judged"}
AUDIT_LOOKS = {True: "verdict holds", False: "verdict differs", None: "verdict open"}
VERDICTS_WORST_FIRST = (False, None, True)
EQUAL_ACCURACY_NOTE = (
    "At equal standard accuracy: the share of images that stay right, ours minus theirs, of the "
    "images that both models have right without an attack."
)
PAPER_FIGURE_BY_ATTACK = {"pgd": " (figure 2 of the paper)", "apgd": " (figure 4b of the paper)"}
Audited = Mapping[str, Any]  # an ``AuditLine``


def fill_in_attack_metric(key: str, metric: Metric, score: str, at: Mapping[str, Place]) -> Metric:
    """Return ``metric`` with the name and texts of its column at an attack, epsilon and layer."""
    # score: as in column names. The worst case has no attack, planned names no largest epsilon.
    attack = str(at.get("attack", WORST_CASE))
    epsilon = at.get("epsilon", 0.0)
    is_mean = isinstance(epsilon, str)
    radius = "" if is_mean else format_epsilon(float(epsilon))
    texts = {"title": attack_title(attack), "epsilon": radius, "layer": str(at.get("layer", ""))}
    label, note, name = metric.label, metric.note, metric.name.replace("{score}", score)
    if key == "clean":
        texts["title"] = "Standard accuracy" if score == "accuracy" else "{score}, no attack"
    elif not note:
        note = "accuracy under attack"
        if attack == WORST_CASE and score == "accuracy":
            texts["title"] = "Worst case"
            note = "accuracy where an image counts only if no attack broke it"
        elif attack == WORST_CASE:
            texts["title"] = "{score}, worst case"
            note = "largest error of each volume over all attacks"
        elif score != "accuracy":
            note = "mean error under attack"
            texts["title"] = f"{{score}}, {texts['title']}"
        name = attacked_score_column(score, attack)
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
    """Return an attack's name as RobustBench writes it: pgd-10 → PGD 10, apgd-dlr → APGD-DLR."""
    parts = re.split("[-_]", name.replace("cross_entropy", "ce"))
    title = " ".join(word.upper() if word in ACRONYMS else word for word in parts)
    title = re.sub(r"\b(APGD|FAB) (CE|DLR|T)\b", r"\1-\2", title)
    title = re.sub(r" strong (\d+)", r" strong, \1 starts", title)
    return re.sub("^auto ?attack", "AutoAttack", title)


def describe_attacks(phase: PhaseResults, settings: Mapping[str, Attack]) -> str:
    """Return a sentence on a phase's attacks and their largest ε; settings: name → attack."""
    texts = []
    own_radii = {name for name, attack in settings.items() if attack.radii(())}  # in the name
    for name in names_of_attacks(phase):
        attack = settings.get(name)
        steps = getattr(attack, "steps", None)
        if attack is not None and steps:
            usual = attack.model_copy(update={"steps": type(attack).model_fields["steps"].default})
            texts.append(f"{attack_title(usual.name)} ({steps} steps)")
        else:
            texts.append(attack_title(name))
    results = phase.results(Robustness)
    places = [value.at for row in results for value in row.all("attacked")]
    epsilons = [float(at["epsilon"]) for at in places if at["attack"] not in own_radii]
    if not epsilons:
        return ""
    changed_by = f"each pixel changed by at most {100 * max(epsilons):.2g} % of its range"
    return f"Attack: {', '.join(texts)}; {changed_by} (ε = {format_epsilon(max(epsilons))})."


def attacked_score_column(score: str, attack: str) -> str:
    if score == "accuracy":
        return f"accuracy_{attack}"
    return f"attacked_{score}_{attack}"


def attack_names_of_result(result: Found, metric: str = "attacked") -> list[str]:
    return list(dict.fromkeys(str(value.at["attack"]) for value in result.all(metric)))


def names_of_attacks(phase: PhaseResults, metric: str = "attacked") -> list[str]:
    names = [
        name
        for result in phase.results(Robustness)
        for name in attack_names_of_result(result, metric)
    ]
    return list(dict.fromkeys(names))


def attacks_with_curves(result: Found) -> list[str]:
    """Return the attacks that have a score at each epsilon of the worst case, and at no other."""
    radii = {value.at["epsilon"] for value in result.all("worst")}
    return [
        name
        for name in attack_names_of_result(result)
        if {value.at["epsilon"] for value in scores_by_epsilon(result, name)} == radii
    ]


def scores_by_epsilon(result: Found, attack: str) -> list[Value]:
    """Return the scores under an attack or the worst case, by epsilon; [] if it was not run."""
    if attack == WORST_CASE:
        return result.all("worst")
    return [value for value in result.all("attacked") if value.at["attack"] == attack]


def changes_by_epsilon(result: Found, attack: str, layer: int = 0) -> dict[float, float]:
    """Return ε · 255 → routing change, of MoE layer ``layer`` from 1, or of their mean (0)."""
    return {
        float(value.at["epsilon"]) * PIXEL: value.value
        for value in result.all("routing_change_layer" if layer else "routing_change")
        if (value.at["attack"], value.at.get("layer", 0)) == (attack, layer)
    }


def draw_score_under_attacks(result: Found) -> Figures:
    score = parse_card_task(result.facts["task"]).score
    curves = {
        attack_title(name): charts.attack_points([scores_by_epsilon(result, name)], score)
        for name in [*attacks_with_curves(result), WORST_CASE]
    }
    yield "score_under_attack", charts.draw_score_over_epsilon(curves, "attack", score)


def draw_scores_and_routing(phase: PhaseResults) -> Iterator[Picture]:
    """Yield pictures over epsilon: scores per attack and worst case, then routing changes."""
    results = phase.results(Robustness)
    attacks = dict.fromkeys(name for result in results for name in attacks_with_curves(result))
    for attack in attacks:
        yield draw_attack_curve(phase, attack)
    if all(result.all("worst") for result in results):
        yield draw_attack_curve(phase, WORST_CASE)
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


def attack_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    about = attacked_score_column(score_slug(phase.task.score), WORST_CASE)
    pictures = []
    first = phase.first(Robustness)
    for method in reference_methods(phase.models):
        if method not in first or first[method].facts["attacked"] is None:
            continue
        shown = attack_audit.StrongestAttackGallery.model_validate(first[method].facts["attacked"])
        tiles, names = [], []
        for row in shown.rows:
            tiles.append(
                [
                    drawing.ImageTile(drawing.displayable_image(image))
                    for image in row.pictures.array()
                ]
            )
            names.append(f"ε = {format_epsilon(row.epsilon)}" if row.epsilon else "clean")
        title = f"{attack_title(shown.attack)} on {method}"
        figure = drawing.draw_picture_sheet(tiles, drawing.SheetLabels(title, names), 1.1, 1.1)
        caption = f"{method}. Images as the strongest attack made them (figure 5)."
        label = f"{phase.name}: attacked pictures of {method}"
        pictures.append(Picture(figure, label, caption + phase.seed_note))
    yield robust_accuracy_block(phase)
    yield PageBlock("Attacked pictures", pictures=pictures, about=about)
    yield audit_block(phase)


def robust_accuracy_block(phase: PhaseResults) -> PageBlock:
    """Return a table with a row per method and attack: the score without attack and at each ε."""
    score = phase.task.score
    shown = {
        method: results
        for method, results in phase.of(Robustness).items()
        if results and results[0].all("worst")
    }
    reference = next(reversed(reference_methods(phase.models)), "")
    fixed_radius_titles = {  # attacks at one radius of their own; they use the last column
        attack_title(name)
        for result, *_ in shown.values()
        for name in set(attack_names_of_result(result)).difference(attacks_with_curves(result))
    }
    last = [EMPTY] if fixed_radius_titles else []
    worst = [value for result, *_ in shown.values() for value in result.all("worst")]
    epsilons = dict.fromkeys(float(value.at["epsilon"]) for value in worst)
    heads = [f"ε = {format_epsilon(epsilon)}" for epsilon in epsilons if epsilon]
    lines = []
    for method, results in shown.items():
        lines.append(TableRow(PageCell(method)))
        for title, seeds in curves_by_title(results).items():
            intervals = [charts.interval_over_seeds(values) for values in zip(*seeds, strict=True)]
            number_format = NumberFormat.of(score.form, intervals)
            cells = [
                PageCell(number_format.value(interval.value), number_format.limits(interval))
                for interval in intervals
            ]
            if title in fixed_radius_titles:
                cells[1:1] = [EMPTY] * len(heads)
            else:
                cells += last
            lines.append(TableRow(PageCell(title), cells))
        if score.form == "share" and method != reference and reference in shown:
            gains = gains_where_both_right(results, shown[reference])
            title = f"worst case − {reference}, at equal standard accuracy"
            lines.append(TableRow(PageCell(title), [EMPTY, *map(difference_cell, gains), *last]))
    heads += ["own ε"] * len(last)
    grids = [page_objects.PageTable(["Attack", "Standard", *heads], lines)] if lines else []
    notes = ["Standard: without an attack, on the same images."]
    if score.form == "share":
        notes.append(EQUAL_ACCURACY_NOTE)
    about = attacked_score_column(score_slug(score), WORST_CASE)
    return PageBlock(f"{score_title(score)} at each ε", notes, grids, about=about)


def curves_by_title(results: Sequence[Found]) -> dict[str, list[list[Value]]]:
    """Return title → per seed, scores by ε: each attack, each router attack, the worst case."""
    curves = {"Worst case": [result.all("worst") for result in results]}
    for attack in attack_names_of_result(results[0]):
        curves[attack_title(attack)] = [scores_by_epsilon(result, attack) for result in results]
    for part in dict.fromkeys(str(value.at["part"]) for value in results[0].all("part")):
        curves[f"– {attack_title(part)}"] = [
            [value for value in result.all("part") if value.at["part"] == part]
            for result in results
        ]
    return curves


def gains_where_both_right(ours: Sequence[Found], theirs: Sequence[Found]) -> list[Interval | None]:
    """Return the difference in worst-case accuracy at each ε > 0 on images both have right.

    Per seed it is Σ b·(a − a′) / Σ b over images; b: both models are right without an attack; a,
    a′: right under every attack. Paired by image and seed; all None if a seed has Σ b = 0.
    """
    rows = []  # per seed: (ε, images)
    for pair in zip(ours, theirs, strict=True):
        arrays = [[value.item_values for value in result.all("worst")] for result in pair]
        mine, other = (np.array(hits, float) for hits in arrays)
        both = mine[0] * other[0]
        if not both.any():
            return [None] * (len(mine) - 1)
        rows.append([linearize_ratio(both * change, both) for change in (mine - other)[1:]])
    return [crossed_difference(np.stack(seeds)).interval() for seeds in zip(*rows, strict=True)]


def difference_cell(share: Interval | None) -> PageCell:
    if share is None:
        return DASH
    number_format = NumberFormat.of("share", [share])
    return PageCell(number_format.difference(share.value), number_format.difference_limits(share))


def draw_attack_curve(phase: PhaseResults, attack: str) -> Picture:
    score = phase.task.score
    curves = {}
    for method, seeds in phase.of(Robustness).items():
        scores = [scores_by_epsilon(result, attack) for result in seeds]
        curves[method] = charts.attack_points(scores, score)
    name = "the worst attack for each image" if attack == WORST_CASE else attack_title(attack)
    number = phase.results(Robustness)[0].facts["images"]
    images = f"{number} test images, the same for every method."
    chart = charts.draw_score_over_epsilon(curves, name, score)
    label = f"{phase.name}: {attack_title(attack)}"
    return Picture(chart, label, f"{images} Bands: 95 % intervals.")


def draw_routing_change_by_layer(phase: PhaseResults, attack: str) -> list[Picture]:
    """Return [a picture of the routing change over epsilon, a panel per MoE layer], or []."""
    seeds = phase.of(Robustness)
    changes = [result.all("routing_change_layer") for result in phase.results(Robustness)]
    number = max((int(value.at["layer"]) for values in changes for value in values), default=0)
    panels: dict[str, dict[str, list[charts.CurvePoint]]] = {}
    for layer, (method, results) in product(range(1, 1 + number), seeds.items()):
        curves = [changes_by_epsilon(result, attack, layer) for result in results]
        panels.setdefault(f"MoE {layer}", {})[method] = charts.points_over_seeds(curves, (0.0, 1.0))
    if not panels:
        return []
    source = PAPER_FIGURE_BY_ATTACK.get(re.split("[-_]", attack)[0], "")
    caption = f"By MoE layer{source}. {charts.interval_caption(seeds)}"
    chart = charts.panels_chart(panels, change_chart_spec(attack))
    return [Picture(chart, f"{phase.name}: layers under {attack}", caption)]


def change_chart_spec(attack: str) -> charts.ChartSpec:
    title = f"Routing change under {attack_title(attack)}"
    return charts.ChartSpec(title, f"ε in 1/{PIXEL}", "1 − IoU of experts", share=True)


def audit_block(phase: PhaseResults) -> PageBlock:
    lines = {
        method: [line for result in seeds for line in result.facts["audit"]]
        for method, seeds in phase.of(Robustness).items()
    }
    all_lines = [line for of_method in lines.values() for line in of_method]
    rows = []
    for name in dict.fromkeys(line["name"] for line in all_lines):
        named = [[line for line in each if line["name"] == name] for each in lines.values()]
        cells = list(map(worst_audit_verdict_cell, named))
        rows.append(TableRow(PageCell(name.replace("_", " ")), cells))
    grids = [page_objects.PageTable(["Question", *lines], rows)] if rows else []
    verdicts = [line["holds"] for line in all_lines]
    judged = len(verdicts) - verdicts.count(None)
    finding = f"{verdicts.count(True)} of {judged} lines of the audit hold"
    return PageBlock("Can the attacks be believed?", grids=grids, finding=finding)


def worst_audit_verdict_cell(audited: Sequence[Audited]) -> PageCell:
    if not audited:
        return DASH
    worst = min(audited, key=lambda line: VERDICTS_WORST_FIRST.index(line["holds"]))
    note = format_epsilons_in_text(worst["text"].removeprefix("not judged: "))
    return PageCell(AUDIT_MARKS[worst["holds"]], note, look=AUDIT_LOOKS[worst["holds"]])


def draw_transfer(result: Found) -> Figures:
    if result.values:
        yield "transfer", draw_transfer_matrix(result)


def transfer_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    """Yield a block on transferred attacks: scores, and whether direct attacks are too weak."""
    result: Found | None = phase.together.get(transfer_attacks.Transfer)
    if result is None:
        return
    facts = result.facts
    reading = facts["reading"]
    verdict = f"{AUDIT_MARKS[reading['holds']]}: {format_epsilons_in_text(reading['text'])}"
    text = (
        f"{attack_title(facts['attack'])} at ε = {format_epsilon(facts['epsilon'])} on "
        f"{facts['images']} test images. A row: the model on which the images were made. "
        "A column: the model that scores them. The diagonal is the direct attack; the other scores "
        "have their difference from it below, with intervals that hold simultaneously at 95 %. If "
        "a transferred attack does more harm than the direct one, the direct one is too weak to be "
        "believed (Carlini et al., 2019)."
    )
    pictures = [Picture(figure, f"{phase.name}: {name}") for name, figure in draw_transfer(result)]
    notes = [f"No image is made on {name}: {reason}." for name, reason in facts["skipped"].items()]
    if phase.seeds > 1:
        notes.append("First seed.")
    grids = [transfer_table(result)]
    yield PageBlock("Transfer of attacks", [text], grids, pictures, below=notes, finding=verdict)


def transfer_table(result: Found) -> PageTable:
    methods = result.facts["methods"]
    lines = [
        TableRow(PageCell(source), [transfer_cell(result, source, target) for target in methods])
        for source in methods
        if source not in result.facts["skipped"]
    ]
    return PageTable(["Made on", *methods], lines)


def transfer_cell(result: Found, source: str, target: str) -> PageCell:
    at = {"made_on": source, "scored_by": target}
    form = result.facts["score"]["form"]
    score = result.find("transferred", **at)
    difference = result.interval("transferred_difference", **at)
    if score is None:
        return DASH
    text = NumberFormat(form).value(score.value)
    if source == target:
        return PageCell(text, "direct", look="direct", value=score.value)
    if difference is None:
        return PageCell(text, value=score.value)
    number_format = NumberFormat.of(form, [difference])
    small = number_format.difference(difference.value)
    if limits := number_format.difference_limits(difference):
        small = f"{small} ({limits})"
    return PageCell(text, small, value=score.value)


def draw_transfer_matrix(result: Found) -> drawing.Figure:
    """Draw a heatmap of the scores, attacked × scoring model; dark: high score or large error."""
    lines = transfer_table(result).lines
    values = np.array([[item.value for item in line.items] for line in lines], dtype=float)
    texts = [[item.text.removesuffix(" %") for item in line.items] for line in lines]
    score = Score(**result.facts["score"])
    shades = values if score.form == "share" else values / np.nanmax(values)
    title = f"{score_title(score)} under transferred {attack_title(result.facts['attack'])}"
    names = [line.head.text for line in lines]
    methods = result.facts["methods"]
    labels = charts.HeatmapLabels(title, names, methods, "scored by", "made on", slanted=True)
    size = (1.9 + 0.5 * len(methods), 1.7 + 0.36 * len(lines))
    caption = "Of the images that were made on each model."
    return charts.draw_heatmap(shades, np.where(np.isnan(values), "", texts), labels, size, caption)


def draw_corruptions(result: Found) -> Figures:
    grid = corruption_by_severity_table(result)
    table = np.array([[item.share for item in line.items] for line in grid.lines], dtype=float)
    names = [line.head.text for line in grid.lines]
    severities = grid.columns[1:]
    labels = charts.HeatmapLabels("Error under corruption", names, severities, "Severity")
    size = (2.4 + 0.5 * len(severities), 0.9 + 0.27 * len(names))
    figure = charts.draw_heatmap(table, charts.percent_annotations(table), labels, size, "Percent.")
    yield "corruption_errors", figure


def corruption_by_severity_table(result: Found) -> PageTable:
    errors = corruptions.errors_of(result)
    severities = sorted({severity for row in errors.values() for severity in row})
    rows = {
        str(name).replace("_", " "): [row.get(severity) for severity in severities]
        for name, row in errors.items()
    }
    grid = percent_table("Severity", rows, [str(severity) for severity in severities])
    return grid._replace(below="Error in percent.")


def corruption_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    tiles = [
        corruption_by_severity_table(result)._replace(title=name)
        for name, result in phase.first(corruptions.Corruptions).items()
    ]
    yield PageBlock("Each corruption", tiles=tiles)


ATTACK_PICTURES = Pictures(
    "robustness", draw_score_under_attacks, is_on_page=False, draw=draw_scores_and_routing
)
PICTURES = [
    ATTACK_PICTURES._replace(more=attack_blocks, fill_in=fill_in_attack_metric),
    Pictures("corruptions", draw_corruptions, is_on_page=False, more=corruption_blocks),
]
