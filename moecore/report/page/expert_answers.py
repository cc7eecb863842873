"""What other measurements know of a model's experts, as the routing explorer says it.

Nothing is computed anew: an answer is read from a result, or a line names the measurement that
gives it.
"""

from collections.abc import Sequence
from typing import Any

from moecore.measure.base import MeasuredPart
from moecore.measure.expert_worth import ExpertWorth
from moecore.measure.router_regret import RouterRegret
from moecore.measure.routing_metrics.expert_roles import (
    LABELS,
    ExpertRoles,
    RolesLayer,
    read_layers,
)
from moecore.measure.values import Found
from moecore.report.measures.result_display import Display, list_displays
from moecore.report.tables.number_format import NumberFormat
from moecore.report.typed_results import Measured
from moecore.statistics.intervals import Interval
from moecore.tasks.base import Score

PARTNERS = 4  # experts that are most often chosen beside, before or after an expert
SHARE = NumberFormat("share", 0)
P = NumberFormat("number", 3)
QUESTIONS = {
    ExpertRoles: "which experts go together, follow each other and match another model's",
    ExpertWorth: "what is lost without an expert",
    RouterRegret: "what the best experts would save",
}


def display_of(kind: type[MeasuredPart]) -> Display:
    """Return how the page shows results of this type."""
    (shown,) = [one for one in list_displays() if one.kind is kind]
    return shown


def skip_reason(measured: Measured, kind: type[MeasuredPart]) -> str:
    """Return why a measurement was skipped; "" where it was not."""
    start = f"{display_of(kind).title}: "
    return next((text[len(start) :] for text in measured.skipped if text.startswith(start)), "")


def expert_answers(
    measured: Measured, score: Score, layers: int, images: Sequence[int] = ()
) -> dict[str, Any]:
    """Return what is known of each of the MoE layers, and a line for each question that is open.

    images: the places in the test split of those that are shown.
    """
    known: list[dict[str, Any]] = [{} for _ in range(layers)]
    if roles := measured.of(ExpertRoles):
        known = roles_answers(read_layers(roles))
    if worth := measured.of(ExpertWorth):
        values = [value for value in worth.all("expert_worth") if "expert" in value.at]
        for layer, answers in enumerate(known, 1):
            experts = [value.interval for value in values if value.at["layer"] == layer]
            answers["without"] = worth_words(experts, score)
    if regret := measured.of(RouterRegret):
        for layer, answers in enumerate(known, 1):
            answers["regret"] = regret_words(regret, layer)
        for best, answers in zip(best_by_token(regret, images), known, strict=True):
            answers["best"] = best
    return {"layers": known, "open": open_questions(measured)}


def roles_answers(layers: Sequence[RolesLayer], most: int = PARTNERS) -> list[dict[str, Any]]:
    """Return of each layer which experts go together, ``most`` of each at most, what they tell, and
    how sure the router was.
    """
    known: list[dict[str, Any]] = [
        {
            "together": list_partners(layer.together, most),
            "earlier": list_partners(layer.before, most),
            "tells": information_words(layer),
            "margin": layer.values.get("margin"),
        }
        for layer in layers
    ]
    for layer, before in zip(layers[1:], known[:-1], strict=True):
        before["later"] = list_partners(layer.after, most)
    return known


def open_questions(measured: Measured) -> list[str]:
    """Return sentences: what did not apply, and what to ask for in params.yaml for an answer."""
    sentences, unset, unnamed = [], [], []
    for kind, question in QUESTIONS.items():
        display, reason = display_of(kind), skip_reason(measured, kind)
        name = f"{display.stage}.{display.within}" if display.within else display.stage
        if reason:
            sentences.append(f"{name} (for {question}) does not apply: {reason}.")
        elif measured.of(kind) is None:
            (unset if display.within else unnamed).append(f"{name} for {question}")
    ways = [f"set {one}" for one in unset]
    if unnamed:
        ways.append(f"name in run.measurements: {', '.join(unnamed)}")
    if ways:
        sentences.append(f"To see more, {'; '.join(ways)}.")
    return sentences


def list_partners(
    shares: Sequence[Sequence[float]], most: int = PARTNERS
) -> list[list[tuple[int, float]]]:
    """Return for each expert, a row of P(they | it), those most often chosen with it, with P."""
    rows = [sorted(enumerate(row), key=lambda pair: -pair[1]) for row in shares]
    return [
        [(expert, round(share, 4)) for expert, share in row[:most] if share > 0] for row in rows
    ]


def information_words(layer: RolesLayer) -> str:
    """Return what the layer's experts tell of a token."""
    told = [
        f"{LABELS.get(name, name)} {SHARE.value(max(0.0, label.normalised))} (p {P.value(label.p)})"
        for name, label in layer.labels.items()
    ]
    return f"This layer's experts tell of a token, above chance: {', '.join(told)}."


def worth_words(intervals: Sequence[Interval], score: Score) -> list[str]:
    """Return for each expert of a layer what the score loses without it."""
    form = NumberFormat.of(score.form, intervals)
    return [
        f"Without it the {score.label} is worse by "
        + f"{form.difference(interval.value)} {score.unit}".rstrip()
        + f" ({form.difference_limits(interval)})."
        for interval in intervals
    ]


def regret_words(result: Found, layer: int) -> str:
    """Return what the best sets of experts of a layer's tokens would save."""
    regret, better = (
        result.curve(name, "layer")[layer] for name in ("router_regret", "better_sets")
    )
    return (
        f"The best experts for a token would lower the loss by "
        f"{NumberFormat('number', 3).value(regret)} {result.facts['unit']}, on average; "
        f"{SHARE.value(better)} of the sets would lower it."
    )


def best_by_token(
    regret: Found, images: Sequence[int]
) -> list[list[dict[int, tuple[tuple[int, ...], str]]]]:
    """Return of each layer and image, at places in the test split, tokens' best experts and what
    these would save; no experts where the router chose the best. Empty where none were tried.
    """
    form = NumberFormat("number", 3)
    layers = []
    for choices in regret.facts["best"]:
        rows: list[dict[int, tuple[tuple[int, ...], str]]] = [{} for _ in images]
        for one in choices:
            if one["image"] in images:
                saved = f"{form.value(one['saved'])} {regret.facts['unit']}"
                best = (tuple(one["experts"]), saved)
                rows[images.index(one["image"])] |= dict.fromkeys(one["tokens"], best)
        layers.append(rows)
    return layers
