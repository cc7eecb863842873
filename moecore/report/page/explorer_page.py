"""The page of the routing explorer, with facts about each expert from other measurements."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from moecore.measure import base, expert_worth, router_regret
from moecore.measure.explorer import Explorer, ExplorerData
from moecore.measure.routing_metrics import expert_roles, expert_similarity
from moecore.measure.routing_metrics.expert_roles import LABELS, ExpertRoles, LayerRoles
from moecore.measure.routing_metrics.expert_similarity import decode_choices
from moecore.measure.values import Found
from moecore.report.page import report_page, sections
from moecore.report.result_types import ModelResults, PhaseResults, StudyResults
from moecore.report.results_and_displays import MeasurementDisplay, list_displays
from moecore.report.tables.cells import NumberFormat
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score

PARTNERS = 4  # experts most often chosen with, before or after an expert
BetterExperts = dict[int, tuple[tuple[int, ...], str]]  # token → its experts, the loss saved
SHARE_FORMAT = NumberFormat("share", 0)
NUMBER_FORMAT = NumberFormat("number", 3)
QUESTION_BY_MEASUREMENT = {
    ExpertRoles: "which experts go together, follow each other and match another model's",
    expert_worth.ExpertWorth: "what is lost without an expert",
    router_regret.RouterRegret: "what the best experts would save",
}
PAGE_FILE = "explorer.html"  # in the page's folder
PACKED_KEYS = ("pixels", "origins", "layers", "kinds")  # keys whose texts are packed arrays


def find_display(kind: type[base.MeasuredPart]) -> MeasurementDisplay:
    return next(display for display in list_displays() if display.kind is kind)


def explain_skipped_measurement(measured: ModelResults, kind: type[base.MeasuredPart]) -> str:
    """Return why a measurement was skipped for a model; "" if it was not."""
    start = f"{find_display(kind).title}: "
    return next((text[len(start) :] for text in measured.skipped if text.startswith(start)), "")


def collect_expert_facts(
    measured: ModelResults, score: Score, layers: int, images: Sequence[int] = ()
) -> dict[str, Any]:
    """Return "layers": facts per MoE layer, some on tokens of ``images``; "open": missing facts."""
    facts: list[dict[str, Any]] = [{} for _ in range(layers)]
    if roles := measured.of(ExpertRoles):
        facts = collect_expert_role_facts(expert_roles.read_layer_roles(roles))
    if worth := measured.of(expert_worth.ExpertWorth):
        values = [value for value in worth.all("expert_worth") if "expert" in value.at]
        for layer, answers in enumerate(facts, 1):
            experts = [value.interval for value in values if value.at["layer"] == layer]
            answers["without"] = describe_worth_of_experts(experts, score)
    if regret := measured.of(router_regret.RouterRegret):
        losses, shares = (regret.curve(name, "layer") for name in ("router_regret", "better_sets"))
        for layer, best in enumerate(better_experts(regret, images), 1):
            facts[layer - 1] |= {
                "regret": "The best experts for a token would lower the loss by "
                f"{NUMBER_FORMAT.value(losses[layer])} {regret.facts['unit']}, on average; "
                f"{SHARE_FORMAT.value(shares[layer])} of the sets would lower it.",
                "best": best,
            }
    return {"layers": facts, "open": describe_unmeasured(measured)}


def collect_expert_role_facts(
    layers: Sequence[LayerRoles], partners: int = PARTNERS
) -> list[dict[str, Any]]:
    """Return per layer: experts sharing tokens here, a layer earlier, later; label information."""
    facts: list[dict[str, Any]] = []
    for layer in layers:
        shares = [
            f"{LABELS.get(name, name)} {SHARE_FORMAT.value(max(0, info.normalised))} "
            f"(p {NUMBER_FORMAT.value(info.p)})"
            for name, info in layer.labels.items()
        ]
        if facts:
            facts[-1]["later"] = list_partners(layer.after, partners)
        told = f"Experts tell about a token, above chance: {', '.join(shares)}."
        tables = (layer.together, layer.before)
        together, earlier = (list_partners(table, partners) for table in tables)
        answers = {"together": together, "earlier": earlier, "tells": told}
        facts.append(answers | {"margin": layer.values.get("margin")})
    return facts


def describe_unmeasured(measured: ModelResults) -> list[str]:
    """Return sentences that say which facts are missing, and why or how to get them."""
    sentences, unset, unnamed = [], [], []
    for kind, question in QUESTION_BY_MEASUREMENT.items():
        display = find_display(kind)
        reason = explain_skipped_measurement(measured, kind)
        name = f"{display.stage}.{display.within}" if display.within else display.stage
        if reason:
            sentences.append(f"{name} (for {question}) does not apply: {reason}.")
        elif measured.of(kind) is None:
            if display.within:
                unset.append(f"{name} for {question}")
            else:
                unnamed.append(f"{name} for {question}")
    ways = [f"set {setting}" for setting in unset]
    if unnamed:
        ways.append(f"name in run.measurements: {', '.join(unnamed)}")
    if ways:
        sentences.append(f"To see more, {'; '.join(ways)}.")
    return sentences


def list_partners(shares: Sequence[Sequence[float]], number: int) -> list[list[tuple[int, float]]]:
    """Return per row of ``shares`` (E, E) the ``number`` largest above 0, as (expert, share)."""
    rows = [sorted(enumerate(row), key=lambda pair: -pair[1])[:number] for row in shares]
    return [[(expert, round(share, 4)) for expert, share in row if share > 0] for row in rows]


def describe_worth_of_experts(intervals: Sequence[Interval], score: Score) -> list[str]:
    """Return one sentence per expert: the score that is lost without this expert."""
    form = NumberFormat.of(score.form, intervals)
    return [
        f"Without it the {score.label} is worse by "
        + f"{form.difference(interval.value)} {score.unit}".rstrip()
        + f" ({form.difference_limits(interval)})."
        for interval in intervals
    ]


def better_experts(regret: Found, images: Sequence[int]) -> list[list[BetterExperts]]:
    """Return per layer and image: token → (better experts, text of the loss that they save)."""
    layers = []
    for choices in regret.facts["best"]:
        rows: list[BetterExperts] = [{} for _ in images]
        for choice in choices:
            if choice["image"] in images:
                saved = f"{NUMBER_FORMAT.value(choice['saved'])} {regret.facts['unit']}"
                best = (tuple(choice["experts"]), saved)
                rows[images.index(choice["image"])] |= dict.fromkeys(choice["tokens"], best)
        layers.append(rows)
    return layers


class ExplorerHead(NamedTuple):
    question: str
    how_to_read: str
    address: str
    more: str  # text of the link


STUDY_EXPLORER_HEAD = ExplorerHead(
    "Which expert sees which patch?",
    "Each patch has the colour and number of its main expert. Point at a patch, or use the arrow "
    "keys, to see how the router weighs experts there. The slider changes the image, or goes back "
    "in training: patches whose expert then differs are framed.",
    "index.html",
    "All results",
)


def render_study_explorer(results: StudyResults) -> str:
    phases = [
        phase
        for phase in results.phases.values()
        if phase.first(Explorer)
        or any(explain_skipped_measurement(model, Explorer) for model in phase.all_models)
    ]
    pool: dict[str, int] = {}
    data = [explorer_phase_data(phase, pool) for phase in phases]
    has_models = any("model" in method for phase in data for method in phase["methods"])
    return render_explorer(data, pool, STUDY_EXPLORER_HEAD, has_models)


def render_explorer(
    phases: Sequence[dict[str, Any]] | str,  # of ``explorer_phase_data``, or their packed JSON
    pool: dict[str, int],
    head: ExplorerHead,
    has_models: bool = True,  # else the page says what is missing
) -> str:
    template = report_page.template_environment().get_template("explorer.html.jinja")
    data = {"phases": phases, "pool": list(pool)}
    return template.render(data=data, head=head, has_models=has_models)


def has_explorer_results(results: StudyResults) -> bool:
    return any(phase.first(Explorer) for phase in results.phases.values())


class ExploredModel(NamedTuple):
    name: str  # the method; from the second seed on also the seed
    is_first: bool  # whether it is the method's first seed
    measured: ModelResults


def list_explored_models(phase: PhaseResults) -> list[ExploredModel]:
    """Return the first seed of each method, then other seeds with explorer data."""
    models = []
    for method, seeds in phase.models.items():
        for place, (seed, measured) in enumerate(seeds.items()):
            if place == 0:
                models.append(ExploredModel(method, True, measured))
            elif measured.of(Explorer):
                models.append(ExploredModel(f"{method} seed {seed}", False, measured))
    return sorted(models, key=lambda model: not model.is_first)


def explorer_phase_data(phase: PhaseResults, pool: dict[str, int]) -> dict[str, Any]:
    models = list_explored_models(phase)
    return {
        "name": phase.name,
        "title": sections.phase_title(phase),
        "answers": phase.task.answers,
        "unit": phase.task.score.unit,
        "classes": phase.task.needs_classes("classes") is None,
        "cells": phase.task.cells,
        "source": "test split",
        "kinds": {"name": "true kind", "first": 1},
        "methods": [explored_model_data(model, phase, pool) for model in models],
        "matches": match_model_experts(models),
    }


def explored_model_data(
    item: ExploredModel, phase: PhaseResults, pool: dict[str, int]
) -> dict[str, Any]:
    """Return a model's data for the explorer, or why it has none; adds its texts to ``pool``."""
    name, is_first, measured = item
    if (measurement := measured.of(Explorer)) is None:
        reason = explain_skipped_measurement(measured, Explorer) or "it was not measured"
        return {"name": name, "reason": reason}
    result = ExplorerData.model_validate(measurement.facts)
    if not is_first:  # changed images and favourite patches are most of its size
        layers = []
        for layer in result.layers:
            experts = [expert.model_copy(update={"favourites": ()}) for expert in layer.experts]
            layers.append(layer.model_copy(update={"experts": tuple(experts), "crops": None}))
        result = result.model_copy(update={"layers": tuple(layers), "shown": result.shown[:1]})
    model = result.model_dump(mode="json")
    if is_first and (outcome := measured.outcome):
        model["shown"] += [
            {
                "kind": "epoch",
                "label": f"epoch {watched.epoch} of {outcome.epochs}",
                "picture": None,
                "origins": None,
                "trace": watched.trace.model_dump(mode="json"),
            }
            for watched in outcome.watched
            if watched.images[: len(result.images)] == result.images
        ]
    answers = collect_expert_facts(measured, phase.task.score, len(result.layers), model["images"])
    return {"name": name, "model": intern_texts(model, pool), "known": answers}


def match_model_experts(models: Sequence[ExploredModel]) -> list[tuple[str, str, list[list[int]]]]:
    """Return (first, second, matches) per pair of models: for each layer, each expert's match."""
    choices = {
        model.name: list(map(decode_choices, expert_roles.read_encoded_choices(roles)))
        for model in models
        if model.measured.of(Explorer) and (roles := model.measured.of(ExpertRoles))
    }
    matches = []
    for (first, ours), (second, theirs) in combinations(choices.items(), 2):
        if [layer.shape for layer in ours] == [layer.shape for layer in theirs]:
            pairs = zip(ours, theirs, strict=True)
            matches.append((first, second, [match_experts_by_choices(*pair) for pair in pairs]))
    return matches


def match_experts_by_choices(ours: np.ndarray, theirs: np.ndarray) -> list[int]:
    """Match experts by choices (images, tokens, experts); return, per expert, its match's index."""
    sides = [side.reshape(-1, side.shape[-1]) for side in (ours, theirs)]
    return expert_similarity.match_experts(expert_similarity.indicator_correlation(*sides)).tolist()


def intern_texts(value: Any, pool: dict[str, int], key: str = "") -> Any:
    """Replace each text below a ``PACKED_KEYS`` key by its index in ``pool`` (text → index)."""
    if isinstance(value, dict):
        return {name: intern_texts(inner, pool, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [intern_texts(inner, pool, key) for inner in value]
    if isinstance(value, str) and key in PACKED_KEYS:
        return pool.setdefault(value, len(pool))
    return value
