"""The routing explorer: one HTML file in which single images are looked at, patch by patch.

What measurements packed stays packed; the page unpacks it. A text that several models share, such
as the clean images, is in the page once.
"""

from typing import Any

from moecore.measure.explorer import Result as Explorer
from moecore.report.measures.result_display import list_displays
from moecore.report.page.sections import phase_title
from moecore.report.page.templating import template_environment
from moecore.report.typed_results import Phase, Results
from moecore.training.outcome import Outcome

FILE = "explorer.html"  # beside the page
PACKED = ("pixels", "origins", "layers", "kinds")  # keys whose texts are packed arrays
NOT_MEASURED = (
    "There is nothing to explore yet: no method's single images were measured. Name explorer in "
    "run.measurements of params.yaml and run `moecore run`; the stage measure then writes "
    "artifacts/measured/explorer/<phase>/<method>/<seed>.json, and compare this page."
)
NO_EXPERTS = "There is nothing to see: no method of this study has experts."


def explorer(results: Results) -> str:
    """The whole page; the same results give the same text."""
    phases = [
        phase
        for phase in results.phases.values()
        if phase.first(Explorer)
        or any(explorer_skip_reason(phase, method) for method in phase.models)
    ]
    pool: dict[str, int] = {}
    data = [explorer_phase_data(phase, pool) for phase in phases]
    missing = ""
    if not phases:
        missing = NOT_MEASURED
    elif not any("model" in method for phase in data for method in phase["methods"]):
        missing = NO_EXPERTS
    template = template_environment().get_template("explorer.html.jinja")
    return template.render(missing=missing, data={"phases": data, "pool": list(pool)})


def has_explorer_images(results: Results) -> bool:
    """Whether any model's images can be looked at."""
    return any(phase.first(Explorer) for phase in results.phases.values())


def explorer_skip_reason(phase: Phase, method: str) -> str:
    """Why the measurement skipped the first seed of a method; "" where it did not."""
    (title,) = [shown.title for shown in list_displays() if shown.result is Explorer]
    first = next(iter(phase.models[method].values()))
    start = f"{title}: "
    return next((text[len(start) :] for text in first.skipped if text.startswith(start)), "")


def explorer_phase_data(phase: Phase, pool: dict[str, int]) -> dict[str, Any]:
    """What the page knows of a phase; packed texts are places in ``pool``, which grows."""
    return {
        "name": phase.name,
        "title": phase_title(phase),
        "answers": phase.task.answers,
        "unit": phase.task.score.unit,
        "classes": phase.task.needs_classes("classes") is None,
        "cells": phase.task.cells,
        "methods": [explored_method_data(phase, method, pool) for method in phase.models],
    }


def explored_method_data(phase: Phase, method: str, pool: dict[str, int]) -> dict[str, Any]:
    """The model of a method's first seed, or why there is none to look at."""
    result = phase.first(Explorer).get(method)
    if result is None:
        return {
            "name": method,
            "reason": explorer_skip_reason(phase, method) or "it was not measured",
        }
    model = result.model_dump(mode="json")
    outcome = phase.first(Outcome).get(method)
    if outcome is not None:
        model["shown"] += image_traces_by_epoch(outcome, result)
    return {"name": method, "model": intern_texts(model, pool)}


def image_traces_by_epoch(outcome: Outcome, result: Explorer) -> list[dict[str, Any]]:
    """The same images after epochs of the training, where it looked at these."""
    number = len(result.images)
    return [
        {
            "kind": "epoch",
            "label": f"epoch {watched.epoch} of {outcome.epochs}",
            "picture": None,
            "origins": None,
            "trace": watched.trace.model_dump(mode="json"),
        }
        for watched in outcome.watched
        if watched.images[:number] == result.images
    ]


def intern_texts(value: Any, pool: dict[str, int], key: str = "") -> Any:
    """``value`` with every packed text replaced by its place in ``pool``."""
    if isinstance(value, dict):
        return {name: intern_texts(inner, pool, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [intern_texts(inner, pool, key) for inner in value]
    if isinstance(value, str) and key in PACKED:
        return pool.setdefault(value, len(pool))
    return value
