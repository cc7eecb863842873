"""The report: one HTML file that needs nothing else, light or dark, readable on a phone."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moecore.data.prepared import is_real
from moecore.report import parts, parts_ages, parts_robust
from moecore.report.by_paper import by_paper
from moecore.report.claims import Judged
from moecore.report.css import CSS
from moecore.report.markup import by_method, by_metric, facts
from moecore.report.metrics_adversarial import WORST, attacks_of
from moecore.report.metrics_ages import of_ages
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
    parts_ages.ages, parts_ages.regions, parts_ages.checks, parts_robust.curves, parts.agreement, parts_robust.corruptions, parts_robust.noise, parts.calibration, parts.experts, sweeps,
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
    names = {"calibrate": "calibration", "lipschitz": "a Lipschitz estimate", "stability": "stability under noise", "cohort_checks": "checks on the cohort"}
    score = "error" if "test_mae" in first.trained else "accuracy"
    measured = [score, *(names.get(stage, stage) for stage in Measured._fields if stage != "trained" and getattr(first, stage))]
    alike = f"{', '.join(measured[:-1])} and {measured[-1]}" if measured[1:] else score
    links = '<a href="#claims">Claims</a>' if claims else ""
    links += "".join(f'<a href="#{phase}">{_title(results, phase)}</a>' for phase in results.models)
    return (
        f"{_warning(results)}<h1>Who decides which expert sees a token?</h1><p>{_number(len(methods), 'method')}, {_number(seeds, 'seed')} each, on {data}. "
        f"Every model is measured alike: {alike}.</p>"
        f'<nav>{links}<a href="#settings">Data and settings</a></nav>'
    )


def _warning(results: Results) -> str:
    """What must be read first where data are simulated."""
    if not results.simulated:
        return ""
    names = ", ".join(escape(name) for name in results.simulated)
    return (
        f'<p class="simulated"><b>SIMULATED DATA</b> ({names}). These volumes were made by a program. The numbers show that the software finds an effect '
        "that was put in; they say nothing about people, patients or diseases.</p>"
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
    controls = [method for method in cells if method in results.controls]
    return (
        by_method(headline, cells, controls=controls)
        + f'<p class="quiet">Small figures: 95 % intervals ({how}).{quartiles} <span class="key best">Marked:</span> better than every other method'
        f"{judged}. No mark means no difference was shown.{_aside(controls)}</p>"
        + by_paper(metrics, cells)
        + f"<details><summary>All measurements</summary>{by_metric(metrics, cells)}</details>"
    )


def _aside(controls: Sequence[str]) -> str:
    """Why controls have no mark; nothing where there are none."""
    learned = "such a method learned from labels dealt out anew, and an answer that never changes is robust without knowing anything"
    return f" Marks leave out {escape(', '.join(controls))} (control): {learned}." if controls else ""


def _headline(results: Results, phase: str) -> tuple[str, ...]:
    """Names of the first table's columns; under attack those of the worst case, or else of the last attack."""
    models = [model for seeds in results.models[phase].values() for model in seeds.values()]
    worst = any(model.robustness.get(WORST) for model in models)
    if of_ages(models):
        attacked = [f"attacked_mae_{WORST if worst else attack}" for attack in attacks_of(models)[-1:]]
        checks = ("isolated_wm", "isolated_gm", "isolated_csf", "probe_wm", "probe_gm", "probe_csf", "own_expert_gain", "monotone", "rescan")
        return ("test_mae", "median_mae", "mae_of_median", "mae_pooled", *attacked, *checks, "load_cv2", "active_parameters", "latency_ms")
    under = [name for attack in attacks_of(models)[-1:] for name in (f"accuracy_{WORST if worst else attack}", f"routing_change_{attack}")]
    return ("test_accuracy", "ece_after", *under, "mce", "load_cv2", "active_parameters", "latency_ms")


def _provenance(results: Results) -> str:
    cards = [f"<h3>{TITLES.get(phase, phase)}: {escape(card['name'])}</h3>{facts(_card(card))}" for phase, card in results.cards.items()]
    settings = f"<details><summary>params.yaml</summary><pre>{escape(results.settings)}</pre></details>"
    return f'<section id="settings"><h2>Data and settings</h2>{"".join(cards)}{settings}</section>'


def _card(card: Mapping[str, Any]) -> dict[str, str]:
    if is_real(card):
        return _cohort(card)
    images = card.get("images", {split: sum(counts.values()) for split, counts in card["counts"].items()})  # its own where an image has several labels
    return {
        "Images": ", ".join(f"{split} {count:,}" for split, count in images.items()),
        "Classes": ", ".join(card["classes"]) if len(card["classes"]) <= 20 else f"{len(card['classes'])}",
        "Shape": f"{card['channels']} × {card['size']} × {card['size']}",
        "Licence": card["licence"],
        "Source": card["source"],
        "Split seed": card["seed"],
    }


def _cohort(card: Mapping[str, Any]) -> dict[str, str]:
    """What stands in the card of a cohort of volumes with ages."""
    low, high = card["target_range"]
    sexes = {split: ", ".join(f"{name} {number}" for name, number in counts.items()) for split, counts in card["counts"].items()}
    return {
        "Data": "SIMULATED" if card["simulated"] else "scans of people",
        "Volumes": "; ".join(f"{split} {card['images'][split]:,} ({sexes[split]})" for split in card["counts"]),
        "Ages in training": f"{low:.1f} to {high:.1f} {card['unit']}",
        "Shape": f"{' × '.join(map(str, card['size']))} voxels of {' × '.join(f'{edge:g}' for edge in card['voxel_mm'])} mm",
        "Tissue maps": ", ".join(card["regions"]) or "none",
        "Left out": f"{len(card['skipped'])}",
        "Licence": card["licence"],
        "Source": card["source"],
        "Split seed": card["seed"],
    }


def _title(results: Results, phase: str) -> str:
    return f"{TITLES.get(phase, phase)} on {escape(results.cards[phase]['name'])}"


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
