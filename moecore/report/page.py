"""The report: one HTML file that needs nothing else, light or dark, readable on a phone."""

from collections.abc import Mapping
from html import escape
from typing import Any

from moecore.report.css import CSS
from moecore.report.curves import Row, robustness_rows
from moecore.report.figures import confusion_matrix, expert_load, expert_overlays, reliability_diagram, robustness_curve, training_curves
from moecore.report.markup import by_method, by_metric, facts, figure
from moecore.report.results import Measured, Results
from moecore.report.tables import table

Models = Mapping[str, Mapping[int, Measured]]
HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>Routing methods compared</title>'
TITLES = {"pretrain": "Pretrained", "finetune": "Fine-tuned"}


def page(results: Results) -> str:
    """The whole page; the same results give the same text. Raises StageError where results do not fit together."""
    parts = [_opening(results)]
    for phase, models in results.models.items():
        parts.append(f'<section id="{phase}"><h2>{_title(results, phase)}</h2>')
        parts += [_numbers(results, phase), *(part(models, phase) for part in PARTS), "</section>"]
    parts.append(_provenance(results))
    return f'<!doctype html>\n<html lang="en"><head>{HEAD}<style>{CSS}</style></head><body><main>{"".join(parts)}</main></body></html>\n'


def _opening(results: Results) -> str:
    methods = next(iter(results.models.values()))
    seeds = len(next(iter(methods.values())))
    data = " → ".join(escape(card["name"]) for card in results.cards.values())
    links = "".join(f'<a href="#{phase}">{_title(results, phase)}</a>' for phase in results.models)
    return (
        f"<h1>Who decides which expert sees a token?</h1><p>{_number(len(methods), 'method')}, {_number(seeds, 'seed')} each, on {data}. "
        "Every model is measured alike: accuracy, calibration, robustness and routing.</p>"
        f'<nav>{links}<a href="#settings">Data and settings</a></nav>'
    )


def _numbers(results: Results, phase: str) -> str:
    metrics, cells = table(results, phase)
    attack = list(next(iter(next(iter(results.models[phase].values())).values())).robustness["attacks"])[-1]
    headline = ("test_accuracy", "ece_after", f"accuracy_{attack}", f"routing_change_{attack}", "load_cv2", "active_parameters")
    kinds = {found.kind for row in cells.values() for found in row.values() if found}
    words = {"t": "Student's t over seeds", "wilson": "Wilson for shares", "bootstrap": "bootstrap over test images for calibration"}
    how = ", ".join(text for kind, text in words.items() if kind in kinds)
    return (
        by_method([metric for metric in metrics if metric.name in headline], cells)
        + f'<p class="quiet">Small figures: 95 % intervals ({how}). <span class="key best">Marked:</span> better than every other method '
        "by more than the intervals. No mark means no difference was shown.</p>"
        + f"<details><summary>All measurements</summary>{by_metric(metrics, cells)}</details>"
    )


def _training(models: Models, phase: str) -> str:
    curves = {method: [model.trained["curve"] for model in seeds.values()] for method, seeds in models.items()}
    return "<h3>Training and robustness</h3><div class=grid>" + figure(training_curves(curves), f"{phase}: training", "One line a seed.")


def _attacks(models: Models, phase: str) -> str:
    first = next(iter(next(iter(models.values())).values()))
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
    return "".join([*drawn, *movements]) + "</div>"


def _movement(models: list[Measured], attack: str) -> list[Row]:
    return robustness_rows(models, attack, "routing_change") if models[0].routing["layers"] else []


def _calibration(models: Models, phase: str) -> str:
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
    loads, patches = "", ""
    for method, seeds in models.items():
        found = next(iter(seeds.values())).routing
        if not found["layers"]:
            continue
        load = expert_load([layer["load"] for layer in found["layers"]], f"Expert load: {method}")
        loads += figure(load, f"{phase}: load of {method}", "Share of the choices. Dotted: balance.")
        if found["overlays"]["shape"][0]:
            drawn = expert_overlays(found["overlays"], f"Experts of {method}")
            patches += figure(drawn, f"{phase}: experts of {method}", "The expert with the largest weight in each patch.", png=True)
    parts = {"Experts (first seed)": loads, "Which expert sees which patch": patches}
    return "".join(f"<h3>{title}</h3><div class=grid>{drawn}</div>" for title, drawn in parts.items() if drawn)


def _confusion(models: Models, phase: str) -> str:
    drawn = ""
    for method, seeds in models.items():
        found = next(iter(seeds.values())).trained
        matrix = confusion_matrix(found["confusion"], found["classes"], f"Confusion: {method}")
        drawn += figure(matrix, f"{phase}: confusion of {method}", "Percent of each true class. First seed.")
    return f"<details><summary>Confusion matrices</summary><div class=grid>{drawn}</div></details>"


PARTS = (_training, _attacks, _calibration, _experts, _confusion)


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


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
