"""The facts of a phase's data for the page, from the card that `prepare` wrote."""

from collections.abc import Mapping
from typing import Any

from moecore.report.measured import Phase
from moecore.report.page.view import Item, Line

NAMED = 20  # classes: of more only their number is told


def card_facts(phase: Phase) -> list[Line]:
    """One row per fact."""
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
