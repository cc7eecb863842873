"""The report: one HTML file that needs nothing else, light or dark, readable on a phone."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moecore.report import parts, parts_robust
from moecore.report.by_paper import by_paper
from moecore.report.claims import Judged
from moecore.report.css import CSS
from moecore.report.markup import by_method, by_metric, facts
from moecore.report.metrics_adversarial import WORST, attacks_of
from moecore.report.parts_sweeps import sweeps
from moecore.report.results import Measured, Results
from moecore.report.standing import WORDS
from moecore.report.tables import table, ways
from moecore.report.verdicts import claims_section

HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>Routing methods compared</title>'
TITLES = {"pretrain": "Pretrained", "finetune": "Fine-tuned", "adversarial": "Adversarially fine-tuned"}
KINDS = {
    "t": "Student's t over seeds", "wilson": "Wilson for shares", "bootstrap": "bootstrap over test images for means",
}  # fmt: skip
PARTS = (
    parts_robust.curves, parts.agreement, parts_robust.corruptions, parts_robust.noise, parts.calibration, parts.experts, sweeps,
    parts.maps, parts.confusion,
)  # fmt: skip


def page(results: Results, judged: Sequence[Judged] = ()) -> str:
    """The whole page; the same results give the same text. Raises StageError where results do not fit together."""
    sections = [_opening(results, bool(judged)), claims_section(judged)]
    for phase, models in results.models.items():
        sections.append(f'<section id="{phase}"><h2>{_title(results, phase)}</h2>')
        sections += [_numbers(results, phase), *(part(models, phase) for part in PARTS), "</section>"]
    sections.append(_provenance(results))
    return f'<!doctype html>\n<html lang="en"><head>{HEAD}<style>{CSS}</style></head><body><main>{"".join(sections)}</main></body></html>\n'


def _opening(results: Results, claims: bool) -> str:
    methods = next(iter(results.models.values()))
    seeds = len(next(iter(methods.values())))
    data = " → ".join(escape(card["name"]) for card in results.cards.values())
    first = parts.first_of(methods)
    names = {"calibrate": "calibration", "lipschitz": "a Lipschitz estimate", "stability": "stability under noise"}
    measured = ["accuracy", *(names.get(stage, stage) for stage in Measured._fields if stage != "trained" and getattr(first, stage))]
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
    names = _headline(results, phase)
    headline = sorted((metric for metric in metrics if metric.name in names), key=lambda metric: names.index(metric.name))
    kinds = {found.kind for row in cells.values() for found in row.values() if found}
    how = ", ".join(text for kind, text in KINDS.items() if kind in kinds)
    quartiles = " Of timings: quartiles." if "quartiles" in kinds else ""
    known = ways(results, phase, metrics)
    tests = "; ".join(words for way, words in WORDS.items() if way in known)
    judged = f" beyond chance at 5 %: {tests}" if tests else ""
    return (
        by_method(headline, cells)
        + f'<p class="quiet">Small figures: 95 % intervals ({how}).{quartiles} <span class="key best">Marked:</span> better than every other method'
        f"{judged}. No mark means no difference was shown.</p>"
        + by_paper(metrics, cells)
        + f"<details><summary>All measurements</summary>{by_metric(metrics, cells)}</details>"
    )


def _headline(results: Results, phase: str) -> tuple[str, ...]:
    """Names of the first table's columns; under attack those of the worst case, or else of the last attack."""
    models = [model for seeds in results.models[phase].values() for model in seeds.values()]
    worst = any(model.robustness.get(WORST) for model in models)
    under = [name for attack in attacks_of(models)[-1:] for name in (f"accuracy_{WORST if worst else attack}", f"routing_change_{attack}")]
    return ("test_accuracy", "ece_after", *under, "mce", "load_cv2", "active_parameters", "latency_ms")


def _provenance(results: Results) -> str:
    cards = [f"<h3>{TITLES.get(phase, phase)}: {escape(card['name'])}</h3>{facts(_card(card))}" for phase, card in results.cards.items()]
    settings = f"<details><summary>params.yaml</summary><pre>{escape(results.settings)}</pre></details>"
    return f'<section id="settings"><h2>Data and settings</h2>{"".join(cards)}{settings}</section>'


def _card(card: Mapping[str, Any]) -> dict[str, str]:
    images = card.get("images", {split: sum(counts.values()) for split, counts in card["counts"].items()})  # its own where an image has several labels
    return {
        "Images": ", ".join(f"{split} {count:,}" for split, count in images.items()),
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
