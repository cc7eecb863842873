"""The report: one HTML file that needs nothing else, light or dark, readable on a phone."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moecore.report.agreement import PANELS, agreement_rows, routing_agreement
from moecore.report.by_paper import by_paper
from moecore.report.claims import Judged
from moecore.report.css import CSS
from moecore.report.curves import Row, robustness_rows
from moecore.report.figures import confusion_matrix, expert_load, expert_maps, expert_overlays, reliability_diagram, robustness_curve, training_curves
from moecore.report.markup import by_method, by_metric, facts, figure
from moecore.report.results import Measured, Results
from moecore.report.tables import table
from moecore.report.verdicts import claims_section

Models = Mapping[str, Mapping[int, Measured]]
HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>Routing methods compared</title>'
TITLES = {"pretrain": "Pretrained", "finetune": "Fine-tuned"}


def page(results: Results, judged: Sequence[Judged] = ()) -> str:
    """The whole page; the same results give the same text. Raises StageError where results do not fit together."""
    parts = [_opening(results, bool(judged)), claims_section(judged)]
    for phase, models in results.models.items():
        parts.append(f'<section id="{phase}"><h2>{_title(results, phase)}</h2>')
        parts += [_numbers(results, phase), *(part(models, phase) for part in PARTS), "</section>"]
    parts.append(_provenance(results))
    return f'<!doctype html>\n<html lang="en"><head>{HEAD}<style>{CSS}</style></head><body><main>{"".join(parts)}</main></body></html>\n'


def _opening(results: Results, claims: bool) -> str:
    methods = next(iter(results.models.values()))
    seeds = len(next(iter(methods.values())))
    data = " → ".join(escape(card["name"]) for card in results.cards.values())
    first = _any(methods)
    parts = {"calibration": first.calibrate, "robustness": first.robustness, "routing": first.routing, "invariance": first.invariance}
    measured = ["accuracy", *(name for name, found in parts.items() if found)]
    alike = f"{', '.join(measured[:-1])} and {measured[-1]}" if measured[1:] else "accuracy"
    links = '<a href="#claims">Claims</a>' if claims else ""
    links += "".join(f'<a href="#{phase}">{_title(results, phase)}</a>' for phase in results.models)
    return (
        f"<h1>Who decides which expert sees a token?</h1><p>{_number(len(methods), 'method')}, {_number(seeds, 'seed')} each, on {data}. "
        f"Every model is measured alike: {alike}.</p>"
        f'<nav>{links}<a href="#settings">Data and settings</a></nav>'
    )


def _numbers(results: Results, phase: str) -> str:
    metrics, cells = table(results, phase)
    attacks = list(_any(results.models[phase]).robustness.get("attacks", {}))[-1:]
    under = (name for attack in attacks for name in (f"accuracy_{attack}", f"routing_change_{attack}"))
    headline = ("test_accuracy", "ece_after", *under, "load_cv2", "active_parameters")
    kinds = {found.kind for row in cells.values() for found in row.values() if found}
    words = {"t": "Student's t over seeds", "wilson": "Wilson for shares", "bootstrap": "bootstrap over test images for calibration"}
    how = ", ".join(text for kind, text in words.items() if kind in kinds)
    return (
        by_method(sorted((metric for metric in metrics if metric.name in headline), key=lambda metric: headline.index(metric.name)), cells)
        + f'<p class="quiet">Small figures: 95 % intervals ({how}). <span class="key best">Marked:</span> better than every other method '
        "by more than the intervals. No mark means no difference was shown.</p>"
        + by_paper(metrics, cells)
        + f"<details><summary>All measurements</summary>{by_metric(metrics, cells)}</details>"
    )


def _curves(models: Models, phase: str) -> str:
    """Training, and robustness where it was measured."""
    robust = bool(_any(models).robustness)
    drawn = _training(models, phase) + (_attacks(models, phase) if robust else "")
    return f"<h3>Training{' and robustness' if robust else ''}</h3><div class=grid>{drawn}</div>"


def _training(models: Models, phase: str) -> str:
    curves = {method: [model.trained["curve"] for model in seeds.values()] for method, seeds in models.items()}
    return figure(training_curves(curves), f"{phase}: training", "One line a seed.")


def _attacks(models: Models, phase: str) -> str:
    first = _any(models)
    drawn, movements = [], []
    for attack in first.robustness["attacks"]:
        curves = {method: robustness_rows(list(seeds.values()), attack) for method, seeds in models.items()}
        caption = f"{first.robustness['images']} test images, the same for every method. Bands: 95 % intervals."
        drawn.append(figure(robustness_curve(curves, f"Accuracy under {attack}"), f"{phase}: {attack}", caption))
        moved = {method: _movement(list(seeds.values()), attack) for method, seeds in models.items()}
        if any(moved.values()):
            curve = robustness_curve(moved, f"Routing change under {attack}", "1 − IoU of experts", whole=False)
            caption = "Share of a token's chosen experts that changes; mean over MoE layers and seeds."
            movements.append(figure(curve, f"{phase}: routing under {attack}", caption))
    return "".join([*drawn, *movements])


def _movement(models: list[Measured], attack: str) -> list[Row]:
    """Rows of the routing change; none for a dense model, whose lists are empty."""
    routed = all(row["routing_change"] for row in models[0].robustness["attacks"][attack])
    return robustness_rows(models, attack, "routing_change") if routed else []


def _agreement(models: Models, phase: str) -> str:
    """How the routing settles; nothing where no training recorded it."""
    curves = {name: {method: agreement_rows(list(seeds.values()), name) for method, seeds in models.items()} for name in PANELS}
    if not any(any(rows.values()) for rows in curves.values()):
        return ""
    caption = "Share of tokens with the same first expert, mean over MoE layers. Bands: 95 % intervals over seeds."
    return f"<h3>How the routing settles</h3><div class=wide>{figure(routing_agreement(curves), f'{phase}: agreement', caption)}</div>"


def _maps(models: Models, phase: str) -> str:
    """Mean routing of each class in the last MoE layer over the epochs; nothing where no training recorded it."""
    drawn = ""
    for method, seeds in models.items():
        found = next(iter(seeds.values())).trained
        if maps := found.get("class_maps"):
            rows = {f"epoch {epoch}": [layers[-1] for layers in classes] for epoch, classes in maps.items()}
            heat = expert_maps(rows, found["classes"], f"Mean routing of each class: {method}")
            drawn += figure(heat, f"{phase}: classes of {method}", "Last MoE layer, first seed.", png=True)
    return f"<details><summary>Which class goes to which expert</summary>{drawn}</details>" if drawn else ""


def _calibration(models: Models, phase: str) -> str:
    """Reliability before and after; nothing where it was not measured."""
    if not _any(models).calibrate:
        return ""
    first = {method: next(iter(seeds.values())).calibrate for method, seeds in models.items()}
    fitted = ", ".join(f"{method} {found['temperature']:.2f}{' (at its limit)' if found['at_limit'] else ''}" for method, found in first.items())
    captions = {"before": "A point is a bin of confidence; the larger, the more images. First seed.", "after": f"Temperatures: {fitted}."}
    drawn = []
    for when, caption in captions.items():
        bins = {method: found[when]["bins"] for method, found in first.items()}
        title = f"Reliability {when} calibration"
        drawn.append(figure(reliability_diagram(bins, title), f"{phase}: {title}", caption))
    return f"<h3>Calibration</h3><div class=grid>{''.join(drawn)}</div>"


def _experts(models: Models, phase: str) -> str:
    """Load and patches of the methods with MoE layers; nothing where there are none."""
    loads, patches, many = "", "", len(models) > 6
    for method, seeds in models.items():
        found = next(iter(seeds.values())).routing
        if not found.get("layers"):
            continue
        load = expert_load([layer["load"] for layer in found["layers"]], f"Expert load: {method}")
        loads += figure(load, f"{phase}: load of {method}", "Share of the choices. Dotted: balance.")
        if found["overlays"]["shape"][0]:
            drawn = expert_overlays(found["overlays"], f"Experts of {method}")
            patches += figure(drawn, f"{phase}: experts of {method}", "The expert with the largest weight in each patch.", png=True)
    parts = {"Experts (first seed)": loads, "Which expert sees which patch": patches}
    form = "<details><summary>{}</summary><div class=grid>{}</div></details>" if many else "<h3>{}</h3><div class=grid>{}</div>"
    return "".join(form.format(title, drawn) for title, drawn in parts.items() if drawn)


def _confusion(models: Models, phase: str) -> str:
    drawn = ""
    for method, seeds in models.items():
        found = next(iter(seeds.values())).trained
        matrix = confusion_matrix(found["confusion"], found["classes"], f"Confusion: {method}")
        drawn += figure(matrix, f"{phase}: confusion of {method}", "Percent of each true class. First seed.")
    return f"<details><summary>Confusion matrices</summary><div class=grid>{drawn}</div></details>"


PARTS = (_curves, _agreement, _calibration, _experts, _maps, _confusion)


def _provenance(results: Results) -> str:
    cards = [f"<h3>{TITLES.get(phase, phase)}: {escape(card['name'])}</h3>{facts(_card(card))}" for phase, card in results.cards.items()]
    settings = f"<details><summary>params.yaml</summary><pre>{escape(results.settings)}</pre></details>"
    return f'<section id="settings"><h2>Data and settings</h2>{"".join(cards)}{settings}</section>'


def _card(card: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Images": ", ".join(f"{split} {sum(counts.values()):,}" for split, counts in card["counts"].items()),
        "Classes": ", ".join(card["classes"]) if len(card["classes"]) <= 20 else f"{len(card['classes'])}",
        "Shape": f"{card['channels']} × {card['size']} × {card['size']}",
        "Licence": card["licence"],
        "Source": card["source"],
        "Split seed": card["seed"],
    }


def _title(results: Results, phase: str) -> str:
    return f"{TITLES.get(phase, phase)} on {escape(results.cards[phase]['name'])}"


def _any(models: Models) -> Measured:
    """The first model; all of a study went through the same stages."""
    return next(iter(next(iter(models.values())).values()))


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
