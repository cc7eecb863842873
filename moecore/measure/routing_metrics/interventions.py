"""Run a model with other choices: barred experts, dropped choices, another k or threshold."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import comb
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord, raise_scores_of_chosen
from moecore.measure.routing_metrics import layer_metrics
from moecore.measure.values import Chart, Metric, Values
from moecore.nn import dispatch, predict
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.routers.base import Router
from moecore.tasks.base import Task
from moecore.training.method import TeacherRoutedModel


@contextmanager
def bar_experts(model: Model, barred: Sequence[Tensor | None]) -> Iterator[None]:
    """Bar experts inside the ``with``: tokens choose among the others, by the router's rule."""
    # barred: per layer a bool mask on the model's device that broadcasts to (B, T, E), or None.
    routers = list_routers(model)
    try:
        for router, mask in zip(routers, barred, strict=True):
            router.barred = mask
        yield
    finally:
        for router in routers:
            router.barred = None


def list_routers(model: Model) -> list[Any]:
    """Return the routers of the MoE layers in order, without a teacher's routers."""
    layers = unguided_model(model).modules()
    return [layer.router for layer in layers if isinstance(layer, MoEFeedForward)]


def unguided_model(model: Model) -> Model:
    return model.model if isinstance(model, TeacherRoutedModel) else model


def why_no_expert_can_be_barred(model: Model) -> str | None:
    if model.moe is None:
        return "a dense model has no experts"
    kind = model.moe.router.kind
    routers = list_routers(model)
    if not all(hasattr(router, "barred") for router in routers):
        return f"the router {kind} does not choose by scores, so that no expert can be barred"
    if len(routers) != len(model.layouts):
        return "its text tower has experts of its own"
    if removable_expert_count(model) < 1:
        return f"the router {kind} may choose all experts of a token"
    return None


def removable_expert_count(model: Model) -> int:
    """Return how many experts can be barred without reducing a token's number of experts."""
    moe = model.experts_and_router
    choices = moe.experts.choices
    return choices - round(moe.scaled_router.active(choices))


# The other weights: unchanged; scaled to the old sum; the next expert replaces the dropped one.
Way = Literal["as_is", "renormalised", "reroute"]


@contextmanager
def drop_ranked_choice(model: Model, rank: int, way: Way) -> Iterator[None]:
    """Drop all layers' ``rank``-th choice (from 1) in ``with``; way: keep, scale, reroute rest."""
    # Tokens with fewer choices lose nothing. way: see ``Way``. ``why_no_expert_can_be_barred`` must
    # be None.

    def drop(router: Any, inputs: tuple[Any, ...], decided: tuple[Any, RoutingRecord]) -> Any:
        plan, record = decided
        is_dropped = find_ranked_choice(record, rank)
        if way != "reroute":
            combine = drop_weights(record.combine, is_dropped, way == "renormalised")
            if isinstance(plan, dispatch.BasisProjectionPlan):
                plan = plan._replace(plan=reweigh_plan(plan.plan, combine))
            else:
                plan = reweigh_plan(plan, combine)
            return plan, record._replace(chosen=record.chosen & ~is_dropped, combine=combine)
        router.barred = is_dropped
        try:
            return router.forward(*inputs)  # calling the router would run this hook again
        finally:
            router.barred = None

    hooks = [router.register_forward_hook(drop) for router in list_routers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_ranked_choice(record: RoutingRecord, rank: int) -> Tensor:
    """Return the ``rank``-th most probable of each token's chosen experts, (B, T, E) bool."""
    scores = raise_scores_of_chosen(record.probs, record.chosen)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    is_ranked = torch.zeros_like(record.chosen).scatter(-1, order[..., rank - 1 : rank], True)
    return is_ranked & record.chosen


def drop_weights(combine: Tensor, is_dropped: Tensor, is_renormalised: bool) -> Tensor:
    """Return weights (B, T, E) without the dropped ones; renormalised: scaled to the old sum."""
    weights = combine.masked_fill(is_dropped, 0)
    if not is_renormalised:
        return weights
    total, rest = combine.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True)
    return torch.where(rest > 0, weights * total / rest, weights)


def reweigh_plan(plan: dispatch.SparsePlan, combine: Tensor) -> dispatch.SparsePlan:
    """Return the plan with its pairs of token and expert weighted by ``combine`` (B, T, E)."""
    experts = torch.searchsorted(plan.offsets.long(), plan.rows, right=True)
    return plan._replace(weights=combine.gather(-1, experts.view_as(plan.weights)))


MAX_SUBSETS = 512  # all sets are tried up to this number
SAMPLED_SUBSETS = 256  # drawn from larger numbers of sets
TOLERANCE = 1e-6  # differences of losses below it are rounding


def expert_subsets(experts: int, k: int, seed: int = 0) -> np.ndarray:
    """Return sets of k experts, (S, E) bool: all, or a sample if they are more than MAX_SUBSETS."""
    if comb(experts, k) <= MAX_SUBSETS:
        chosen = np.array(list(combinations(range(experts), k)))
    else:
        keys = np.random.default_rng(seed).random((SAMPLED_SUBSETS, experts))
        chosen = keys.argsort(axis=1)[:, :k]
    subsets = np.zeros((len(chosen), experts), dtype=bool)
    np.put_along_axis(subsets, chosen, True, axis=1)
    return subsets


def fixed_subset_gain(losses: np.ndarray, chosen: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Return tokens' losses as routed − under the set of experts best for the other half, (n,)."""
    # losses: (n, S), by set; chosen: (n,), with the router's choice; is_first: (n,) bool, tokens of
    # one half. Each half uses the set that is best on the other. Below 0: routing is better.
    gain = np.empty(len(chosen))
    for half in (is_first, ~is_first):
        gain[half] = chosen[half] - losses[half, losses[~half].mean(axis=0).argmin()]
    return gain


TRAINED_THRESHOLD = 0.5  # T of figure S3, where the paper reports a bend of the curve
TRAINED_T = f"T\u00a0=\u00a0{TRAINED_THRESHOLD:g}"
SYMBOL_AND_FIGURE = {"threshold": ("T", "S3"), "k": ("k", "S5")}  # of each sweep, in ERMoE
AXIS_LABELS = {"threshold": ("the threshold", "Threshold T"), "k": ("k", "Experts per token k")}
Experts = tuple[Annotated[int, Field(ge=1)], ...]  # numbers of experts per token


class SweepSettings(Config):
    """Settings of the router that are tried on the trained weights; nothing is selected by them."""

    k: Experts = Field((1, 2, 3, 4, 6), description="Experts per token; skipped above the number")
    threshold: tuple[Annotated[float, Field(ge=-1, le=1)], ...] = Field(
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        description="Thresholds (of a cosine); routers without a threshold have no such sweep",
    )
    images: int = Field(300, ge=1, description="How many of the measured images are used")


Numbers = dict[str, float]  # metric name → value, under one setting


class SweepImages(NamedTuple):
    images: np.ndarray  # as ``predict_in_batches`` takes them
    labels: Tensor
    task: Task


def copy_with_router(model: Model, router: Router) -> Model:
    """Return a new model with the same weights, device and mode whose MoE layers use ``router``."""
    # A guided model's copy shares its guide. ``router`` is of the model's own kind.
    unguided = unguided_model(model)
    moe = unguided.experts_and_router.model_copy(update={"router": router})
    with torch.random.fork_rng(devices=[]):  # build() draws weights, which are overwritten below
        copy = unguided.config.build(unguided.image, moe)
    copy.load_state_dict(unguided.state_dict())
    copy.to(predict.model_device(unguided)).train(unguided.training)
    if not isinstance(model, TeacherRoutedModel):
        return copy
    guided = TeacherRoutedModel(copy, model.guide)
    guided.training = model.training  # train() would also set the guide's mode
    return guided


def copy_with_k(model: Model, k: int) -> Model | None:
    moe = model.experts_and_router
    if not hasattr(moe.router, "k") or not 1 <= moe.experts.scale_k(k) <= moe.experts.choices:
        return None
    return copy_with_router(model, moe.router.with_k(k))


def sweep_k(model: Model, sample: SweepImages, numbers: Experts, batch: int) -> dict[int, Numbers]:
    outcomes = {}
    for k in numbers:
        other = copy_with_k(model, k)
        if other is not None:
            # if the experts are split into pieces, the keys count pieces
            pieces = other.experts_and_router.experts.scale_k(k)
            outcomes[pieces] = measure_setting(other, pieces, sample, batch)
    return outcomes


def sweep_threshold(
    model: Model, sample: SweepImages, thresholds: tuple[float, ...], batch: int
) -> dict[float, Numbers]:
    router: Any = model.experts_and_router.router
    if not router.has_score_threshold:
        return {}
    k = model.experts_and_router.experts.scale_k(router.k)
    routers = {value: router.model_copy(update={"threshold": value}) for value in thresholds}
    return {
        threshold: measure_setting(copy_with_router(model, changed), k, sample, batch)
        for threshold, changed in routers.items()
    }


def get_router_threshold_or_none(router: Any) -> float | None:
    # The threshold of top_p is a sum of probabilities and does not count.
    return router.threshold if router.has_score_threshold else None


def measure_setting(model: Model, k: int, sample: SweepImages, batch: int) -> Numbers:
    """Return a changed model's mean "score" and routing metrics; k: its experts per token."""
    prediction, records = predict.predict_in_batches(model, sample.images, batch)
    threshold = get_router_threshold_or_none(model.experts_and_router.router)
    score = float(sample.task.scores(prediction, sample.labels).double().numpy().mean())
    return {"score": score, **mean_routing_metrics(records, k, threshold)}


def mean_routing_metrics(
    records: Sequence[RoutingRecord], k: int, threshold: float | None
) -> Numbers:
    # tail_mass: ``eligible_tail_mass`` with a threshold, else ``compute_tails_beyond_k``; fallback:
    # share of tokens without an eligible expert, with a threshold only.
    layers: list[Numbers] = []
    for record in records:
        layer: dict[str, float | None] = {}
        counts = layer_metrics.expert_counts(record.chosen)
        if counts.any():
            layer["load_cv2"] = layer_metrics.load_cv2(counts)
        if threshold is None:
            layer["tail_mass"] = float(layer_metrics.compute_tails_beyond_k(record.probs, k).mean())
        else:
            flags = layer_metrics.below_k_eligible_flags(record.logits, threshold, 1)
            layer["fallback"] = float(flags.mean())
            layer["tail_mass"] = layer_metrics.eligible_tail_mass(record.logits, threshold, k)
        layers.append({name: value for name, value in layer.items() if value is not None})
    return layer_metrics.average_layers(layers)


def fallback_slopes_over_threshold(fallback: Mapping[float, float]) -> Numbers:
    """Return slopes around TRAINED_THRESHOLD of the share of tokens without a score above it."""
    # fallback: threshold → share of tokens with no score above it. Slopes are from
    # TRAINED_THRESHOLD to the lowest and highest threshold.
    slopes: Numbers = {}
    if TRAINED_THRESHOLD not in fallback:
        return slopes
    for side, end in (("below", min), ("above", max)):
        other = end(fallback)
        if other != TRAINED_THRESHOLD:
            rise = fallback[other] - fallback[TRAINED_THRESHOLD]
            slopes[f"fallback_slope_{side}"] = rise / (other - TRAINED_THRESHOLD)
    return slopes


def declare_swept_metric(
    label: str, better: str, form: str, over: str, needs: str = "", is_monotone: bool = False
) -> Metric:
    """Return a ``Metric`` with one table column per setting; over: "k" or "threshold"."""
    symbol, figure = SYMBOL_AND_FIGURE[over]
    label = f"{label}, {symbol}\u00a0=\u00a0{{}}"
    note = f"trained weights with {symbol} = {{}} at test time (figure {figure})"
    metric = Metric(label, better, form, note, "ermoe", over=over, detail=True)
    return metric._replace(needs=needs, is_monotone=is_monotone)


def sweep_chart(name: str, over: str, label: str, share: bool | None) -> Chart:
    """Return the chart of a metric over a swept setting (ERMoE, figures S3 and S5)."""
    (setting, axis), (_, figure) = AXIS_LABELS[over], SYMBOL_AND_FIGURE[over]
    text = f"Trained weights, another setting at test time (ERMoE, figure {figure})."
    texts = {"title": f"{label} over {setting}", "x": axis, "y": label, "words": text}
    return Chart(f"{name}_{over}", over, **texts, share=share, height=3.2)


def declare_fallback_slope_metric(side: str, end: str) -> Metric:
    """Return a slope's ``Metric``; side: "below", "above"; end: "lowest", "highest" T tried."""
    note = f"increase of the fallback per 1 of T, from {TRAINED_T} to the {end} T tried (figure S3)"
    label = f"Fallback, slope {side} {TRAINED_T}"
    return Metric(label, note=note, paper="ermoe", detail=True, needs="thresholds")


def put_sweeps(
    model: Model, sample: SweepImages, settings: SweepSettings, batch: int, out: Values
) -> None:
    """Put ``{metric}_k`` and ``{metric}_threshold`` of the same weights at each k and threshold."""
    by_threshold = sweep_threshold(model, sample, settings.threshold, batch)
    by_k = sweep_k(model, sample, settings.k, batch)
    swept: dict[str, Mapping[Any, Numbers]] = {"k": by_k, "threshold": by_threshold}
    for over, by_setting in swept.items():
        for setting, numbers in sorted(by_setting.items()):
            for name, number in numbers.items():
                out.put(f"{name}_{over}", number, **{over: setting})
    fallback = {t: numbers["fallback"] for t, numbers in by_threshold.items()}
    for name, slope in fallback_slopes_over_threshold(fallback).items():
        out.put(name, slope)
