"""The routing explorer: one HTML file in which single images are looked at, patch by patch.

What measurements packed stays packed; the page unpacks it. A text that several models share, such
as the clean images, is in the page once.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from moecore.measure.explorer import Explorer, Result
from moecore.measure.routing_metrics.expert_roles import ExpertRoles, read_encoded_choices
from moecore.measure.routing_metrics.expert_similarity import (
    decode_choices,
    indicator_correlation,
    match_experts,
)
from moecore.report.page.expert_answers import expert_answers, skip_reason
from moecore.report.page.sections import phase_title
from moecore.report.page.templating import template_environment
from moecore.report.typed_results import Measured, Phase, Results
from moecore.training.outcome import Outcome

FILE = "explorer.html"  # beside the page
PACKED = ("pixels", "origins", "layers", "kinds")  # keys whose texts are packed arrays
NOT_MEASURED = (
    "There is nothing to explore yet: no method's single images were measured. Name explorer in "
    "run.measurements of params.yaml and run `moecore run`; the stage measure then writes "
    "artifacts/measured/explorer/<phase>/<method>/<seed>.json, and compare this page."
)
NO_EXPERTS = "There is nothing to see: no method of this study has experts."


class PageHead(NamedTuple):
    """What stands above: a question, how to read the page, and where more is."""

    question: str
    words: str
    address: str
    more: str  # the address in words


HEAD = PageHead(
    "Which expert sees which patch?",
    "Every patch is tinted and numbered by the expert that weighs most in it. Point at a patch, or "
    "move with the arrow keys, to see what the router thinks of it. The slider disturbs the image, "
    "or goes back in the training: patches whose expert differs are framed.",
    "index.html",
    "All results",
)


def explorer(results: Results) -> str:
    """The whole page, with all that was measured; the same results give the same text."""
    phases = [
        phase
        for phase in results.phases.values()
        if phase.first(Explorer) or any(skip_reason(model, Explorer) for model in phase.every)
    ]
    pool: dict[str, int] = {}
    data = [explorer_phase_data(phase, pool) for phase in phases]
    missing = ""
    if not phases:
        missing = NOT_MEASURED
    elif not any("model" in method for phase in data for method in phase["methods"]):
        missing = NO_EXPERTS
    return render_explorer(data, pool, HEAD, missing)


def render_explorer(
    phases: Sequence[dict[str, Any]] | str,
    pool: dict[str, int],
    head: PageHead,
    missing: str = "",
) -> str:
    """Return the page of phases as ``explorer_phase_data`` has them, or of what is ``missing``.

    phases: or their JSON as a packed text.
    """
    template = template_environment().get_template("explorer.html.jinja")
    data = {"phases": phases, "pool": list(pool)}
    return template.render(missing=missing, data=data, head=head)


def has_explorer_images(results: Results) -> bool:
    """Whether any model's images can be looked at."""
    return any(phase.first(Explorer) for phase in results.phases.values())


class ExploredModel(NamedTuple):
    """A model under the name by which a reader chooses it."""

    name: str  # the method; of further seeds with the seed
    is_first: bool  # of the method's seeds
    measured: Measured


def list_explored_models(phase: Phase) -> list[ExploredModel]:
    """Return each method's first seed, measured or not; then the further seeds that were."""
    models = []
    for method, seeds in phase.models.items():
        for place, (seed, measured) in enumerate(seeds.items()):
            if place == 0:
                models.append(ExploredModel(method, True, measured))
            elif measured.of(Explorer):
                models.append(ExploredModel(f"{method} seed {seed}", False, measured))
    return sorted(models, key=lambda model: not model.is_first)


def explorer_phase_data(phase: Phase, pool: dict[str, int]) -> dict[str, Any]:
    """What the page knows of a phase; packed texts are places in ``pool``, which grows."""
    models = list_explored_models(phase)
    return {
        "name": phase.name,
        "title": phase_title(phase),
        "answers": phase.task.answers,
        "unit": phase.task.score.unit,
        "classes": phase.task.needs_classes("classes") is None,
        "cells": phase.task.cells,
        "source": "test split",
        "kinds": {"name": "true kind", "first": 1},
        "methods": [explored_model_data(model, phase, pool) for model in models],
        "matches": match_models(models),
    }


def explored_model_data(
    explored: ExploredModel, phase: Phase, pool: dict[str, int]
) -> dict[str, Any]:
    """A model, or why there is none to look at. Of further seeds only the clean images."""
    name, is_first, measured = explored
    measurement = measured.of(Explorer)
    if measurement is None:
        return {"name": name, "reason": skip_reason(measured, Explorer) or "it was not measured"}
    result = Result.model_validate(measurement.facts)
    if not is_first:
        result = clean_images_alone(result)
    model = result.model_dump(mode="json")
    outcome = measured.outcome
    if outcome is not None and is_first:
        model["shown"] += image_traces_by_epoch(outcome, result)
    seen = len(result.layers), model["images"]
    answers = expert_answers(measured, phase.task.score, *seen)
    return {"name": name, "model": intern_texts(model, pool), "known": answers}


def clean_images_alone(result: Result) -> Result:
    """Return a result without changed images and favourite patches, which are most of its size."""
    layers = []
    for layer in result.layers:
        experts = [one.model_copy(update={"favourites": ()}) for one in layer.experts]
        layers.append(layer.model_copy(update={"experts": tuple(experts), "crops": None}))
    return result.model_copy(update={"layers": tuple(layers), "shown": result.shown[:1]})


def match_models(models: Sequence[ExploredModel]) -> list[tuple[str, str, list[list[int]]]]:
    """Return of each two models that can be matched their names and the second's partners of the
    first's experts, layer by layer: one to one, from the choices that ``routing.roles`` kept.
    """
    choices = {
        model.name: [decode_choices(layer) for layer in read_encoded_choices(roles)]
        for model in models
        if model.measured.of(Explorer) and (roles := model.measured.of(ExpertRoles))
    }
    matches = []
    for (one, ours), (other, theirs) in combinations(choices.items(), 2):
        if [layer.shape for layer in ours] == [layer.shape for layer in theirs]:
            pairs = zip(ours, theirs, strict=True)
            matches.append((one, other, [match_choices(*pair) for pair in pairs]))
    return matches


def match_choices(ours: np.ndarray, theirs: np.ndarray) -> list[int]:
    """Return the second's partner of each expert of the first; both (images, tokens, experts)."""
    sides = [side.reshape(-1, side.shape[-1]) for side in (ours, theirs)]
    return match_experts(indicator_correlation(*sides)).tolist()


def image_traces_by_epoch(outcome: Outcome, result: Result) -> list[dict[str, Any]]:
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
