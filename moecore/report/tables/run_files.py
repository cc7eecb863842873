"""The headline numbers of every run, a file each, for ``dvc metrics show`` and experiments."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moecore.measure.sizes import Result as Sizes
from moecore.report.column import Metric
from moecore.report.headlines import HEADLINES
from moecore.report.measured import Measured, Phase, Results
from moecore.report.measures import sizes
from moecore.report.page.view import Item, Line
from moecore.report.quantities import attacked_names
from moecore.report.tables.comparison import metrics_of

MOST = 12  # numbers of a run
DIGITS = 5  # significant ones


def run_files(results: Results) -> dict[str, str]:
    """Path below reports/ → content: ``metrics/pretrain/vmoe-0.json``, a flat JSON of numbers."""
    entries = {}
    if counted := results.alone.get(Sizes):
        numbers = {
            f"{model}, {name}": round_significant(float(one["ours"]))
            for model, metrics in sizes.flat(counted).items()
            for name, one in metrics.items()
        }
        entries["metrics/sizes.json"] = json.dumps(numbers, indent=1) + "\n"
    for phase in results.phases.values():
        metrics = headline_metrics(phase)
        for method, seeds in phase.models.items():
            for seed, model in seeds.items():
                numbers = numbers_of(model, metrics)
                path = f"metrics/{phase.name}/{method}-{seed}.json"
                entries[path] = json.dumps(numbers, indent=1) + "\n"
    return entries


def headline_metrics(phase: Phase) -> list[Metric]:
    """At most ``MOST`` that any model has: the score first, then under attack, routing, cost."""
    metrics = {metric.name: metric for metric in metrics_of(phase)}
    every = [one.name for one in HEADLINES if one.run]
    names = dict.fromkeys([*every[:4], *attacked_names(phase), *every])
    return [metrics[name] for name in names if name in metrics][:MOST]


def numbers_of(model: Measured, metrics: Sequence[Metric]) -> dict[str, float]:
    """Those of the metrics that the model has."""
    read = {metric.name: metric.read(model) for metric in metrics}
    return {name: round_significant(one.value) for name, one in read.items() if one is not None}


def round_significant(value: float) -> float:
    """The value with ``DIGITS`` significant digits; counts stay whole."""
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")


NAMED = 20  # classes: of more only their number is told


def card_facts(phase: Phase) -> list[Line]:
    """One row a fact."""
    card = phase.card
    own = (
        cohort_facts(card)
        if phase.task.kind == "regression"
        else image_facts(card, phase.task.answers)
    )
    facts = own | {
        "Licence": card["licence"],
        "Source": card["source"],
        "Split seed": str(card["seed"]),
    }
    return [Line(Item(name), [Item(words, look="words")]) for name, words in facts.items()]


def image_facts(card: Mapping[str, Any], classes: tuple[str, ...]) -> dict[str, str]:
    """Of pictures with classes."""
    splits = card["images"].items()
    return {
        "Images": ", ".join(f"{split} {count:,}" for split, count in splits),
        "Classes": ", ".join(classes) if len(classes) <= NAMED else str(len(classes)),
        "Shape": f"{card['channels']} × {card['size']} × {card['size']}",
    }


def cohort_facts(card: Mapping[str, Any]) -> dict[str, str]:
    """Of volumes with ages."""
    low, high = card["target_range"]
    unit = card["task"]["unit"]
    edges = " × ".join(f"{edge:g}" for edge in card["voxel_mm"])
    return {
        "Data": "SIMULATED" if card["simulated"] else "scans of people",
        "Volumes": "; ".join(count_volumes(card, split) for split in card["counts"]),
        "Ages in training": f"{low:.1f} to {high:.1f} {unit}",
        "Shape": f"{' × '.join(map(str, card['size']))} voxels of {edges} mm",
        "Tissue maps": ", ".join(card["regions"]) or "none",
        "Left out": str(len(card["skipped"])),
    }


def count_volumes(card: Mapping[str, Any], split: str) -> str:
    """train 60 (F 30, M 30)."""
    sexes = ", ".join(f"{name} {number}" for name, number in card["counts"][split].items())
    return f"{split} {card['images'][split]:,} ({sexes})"
