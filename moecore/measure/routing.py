"""Routing of test images: load, entropy, confidence, agreement between views, sweeps, pictures."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Self, get_args

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.config import Misfits, Surroundings
from moecore.core.files import format_found_and_allowed
from moecore.core.routing_records import RoutingRecord, first_choices
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.random_views import CropRanges, ViewSettings, format_truth_refusal
from moecore.measure.base import SEED, MeasuredModel, Measurement, SkipReason
from moecore.measure.routing_metrics import expert_profiles, interventions, layer_metrics
from moecore.measure.routing_metrics.choice_patterns import record_choices_from_earlier_layer
from moecore.measure.routing_metrics.expert_roles import ExpertRoles, put_roles
from moecore.measure.routing_metrics.expert_similarity import BatchTracker, store_layer_tokens
from moecore.measure.routing_metrics.interventions import SweepSettings
from moecore.measure.routing_metrics.label_information import MIN_IMAGES
from moecore.measure.routing_metrics.two_view_agreement import (
    TEXT_NDIM,
    Preset,
    TwoViewAugmentation,
    augmentation_misfits,
    average_view_match_shares,
    draw_two_views,
    look_up_augmentation,
    mean_items_over_layers,
    view_match_shares,
)
from moecore.measure.values import SCORE, Metric, OnPage, Place, Values
from moecore.nn import correspondence, encoded_routing
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.statistics.intervals import Interval
from moecore.training.method import teacher_probs

AUGMENTATIONS = tuple(name for name in get_args(Preset) if name not in ("identity", "erasing"))
CROP_CANDIDATES = 8  # candidates for the picture of two crops
MATCHES = {
    "match_top1": ("Match, first expert", "same first expert"),
    "match_top2_ordered": ("Match, top 2 in order", "same first and second"),
    "match_top2_sets": ("Match, top 2 as sets", "same two experts"),
}
CONFIDENCE_NOTE = "of a token, mean over tokens and layers"
CONFIDENCES = {
    "confidence_highest": ("Highest probability", "higher", CONFIDENCE_NOTE),
    "confidence_second": ("Second probability", "", ""),
    "confidence_others": ("Sum of the others", "lower", "probability outside the best two"),
}
EXPERT_MAP_PARTS = {
    "border": "on the border of the map of experts, corners included",
    "corner": "in the corners of the map of experts",
    "inner": "inside the map of experts; none where a side has two experts at most: all border",
}
MAP_SHARES = {
    "load": ("Load", "share of the choices"),
    "mass": ("Mass", "share of the probability"),
    "cells": ("Cells", "share of the experts that lie"),
}
AGREED = "tokens with the same first expert"


def declare_layer_metric(label: str, better: str, form: str, note: str, paper: str) -> Metric:
    label, note = f"{label}, MoE {{}}", f"{note}; MoE layer {{}}"
    return Metric(label, better, form, note, paper=paper, over="layer", detail=True)


def declare_expert_map_metrics(place: str, description: str) -> dict[str, Metric]:
    """Return the metrics of a map part ("corner"): its shares of load, probability and experts."""
    metrics = {}
    for key, (name, quantity) in MAP_SHARES.items():
        label, note = f"{name}, {place}", f"{quantity} {description}"
        fixed = key == "cells"
        metrics[f"{place}_{key}"] = Metric(label, "", "share", note, "moge", is_fixed=fixed)
        if not fixed:
            metrics[f"{place}_{key}_layer"] = declare_layer_metric(label, "", "share", note, "moge")
    return metrics


METRICS = {
    **{
        name: Metric(label, "higher", "share", f"{same} in two augmented views", paper="prc")
        for name, (label, same) in MATCHES.items()
    },
    "switch_fraction": Metric(
        "Switch fraction",
        "lower",
        "share",
        "experts of a patch that it did not have in another augmented view; by chance 1 − k/E",
    ),
    **{
        name: Metric(label, better, note=note, paper="prc")
        for name, (label, better, note) in CONFIDENCES.items()
    },
    **{
        f"{name}_augmented": Metric(
            f"{label}: {{}}",
            "higher",
            "share",
            paper="prc",
            over="augmentation",
            name=f"{name}_{{}}",
            detail=True,
            needs="views",
        )
        for name, (label, _) in MATCHES.items()
    },
    **{
        f"{name}_layer": declare_layer_metric(label, "higher", "share", same, "prc")
        for name, (label, same) in MATCHES.items()
    },
    **{
        f"{name}_layer": declare_layer_metric(
            label, better, "number", "of a token, mean of tokens", "prc"
        )
        for name, (label, better, _) in CONFIDENCES.items()
    },
    "load_cv2": Metric(
        "Load CV²",
        "lower",
        note="variance / mean² of the tokens per expert, mean over layers",
        paper="ermoe",
    ),
    "max_violation": Metric("MaxVio", "lower", note="largest / mean load − 1, mean over layers"),
    "dead": Metric("Dead experts", "lower", "share", "experts with under 1 % of the mean load"),
    "experts_per_token": Metric("Experts a token", note="chosen before capacity, mean over layers"),
    "unrouted": Metric("Unrouted", "", "share", "tokens that chose no expert, mean over layers"),
    "fallback": Metric(
        "Fallback",
        "lower",
        "share",
        "tokens with no expert above the threshold",
        paper="ermoe",
        needs="thresholds",
    ),
    "below_k": Metric(
        "Fewer than k",
        form="share",
        note="tokens with fewer than k experts above the threshold",
        paper="ermoe",
        needs="thresholds",
    ),
    "tail_mass": Metric(
        "Tail mass",
        "lower",
        note="weight above the threshold but outside the best k",
        paper="ermoe",
        needs="thresholds",
    ),
    "tail_of_probs": Metric("Tail of the probabilities", note="outside the best k", paper="ermoe"),
    "teacher_agreement": Metric(
        "Agreement with teacher", "", "share", f"{AGREED}; mean over layers", "tgr", needs="guide"
    ),
    "teacher_agreement_layer": declare_layer_metric(
        "Agreement with teacher", "", "share", AGREED, "tgr"
    )._replace(detail=False, needs="guide"),
    "entropy": Metric("Expert entropy", "higher", note="normalised, mean over layers", paper="tgr"),
    "token_entropy": Metric("Token entropy", note="nats of a token; mean over layers", paper="tgr"),
    **{
        name: metric
        for place, description in EXPERT_MAP_PARTS.items()
        for name, metric in declare_expert_map_metrics(place, description).items()
    },
    "fallback_threshold": interventions.declare_swept_metric(
        "Fallback", "lower", "share", "threshold", "thresholds", is_monotone=True
    ),
    "fallback_slope_below": interventions.declare_fallback_slope_metric("below", "lowest"),
    "fallback_slope_above": interventions.declare_fallback_slope_metric("above", "highest"),
    "tail_mass_k": interventions.declare_swept_metric(
        "Tail mass", "lower", "number", "k", "routers", is_monotone=True
    ),
    "score_k": interventions.declare_swept_metric("{score}", SCORE, SCORE, "k"),
    **dict.fromkeys(("fallback_k", "load_cv2_k"), Metric("")),
    **dict.fromkeys(("score_threshold", "tail_mass_threshold", "load_cv2_threshold"), Metric("")),
    "switch_fraction_augmented": Metric(""),
}
# Values per layer that have no column.
METRICS |= {
    f"{name}_layer": Metric("", metric.better, metric.form)
    for name, metric in METRICS.items()
    if not metric.over and f"{name}_layer" not in METRICS
}


class Routing(Measurement):
    """Routing metrics on test images, also under augmentations and other router settings."""

    guided: ClassVar[bool] = True
    no_dense = "a dense model has no routing"
    metrics = METRICS
    parts: ClassVar = {"roles": ExpertRoles}
    page = OnPage(
        "routing",
        place=5,
        heading="Other thresholds and other k at test time",
        charts=(
            interventions.sweep_chart("fallback", "threshold", "Fallback", True),
            interventions.sweep_chart("tail_mass", "threshold", "Tail mass", False),
            interventions.sweep_chart("score", "threshold", "{score}", None),
            interventions.sweep_chart("load_cv2", "threshold", "Load CV²", False),
            interventions.sweep_chart("score", "k", "{score}", None),
            interventions.sweep_chart("tail_mass", "k", "Tail mass", False),
            interventions.sweep_chart("load_cv2", "k", "Load CV²", False),
        ),
        about="score_k_1",
    )

    images: int = Field(2000, ge=1, description="Test images, evenly spread; same for all methods.")
    batch: int = Field(256, ge=1, description="Images per pass; results do not depend on it.")
    overlays: int = Field(4, ge=0, le=16, description="Images shown with their patches' experts.")
    views: ViewSettings = Field(
        ViewSettings(crop=CropRanges(), flip=True), description="Two compared views (PRC, table 4)."
    )
    augmentations: tuple[Preset | TwoViewAugmentation, ...] = Field(
        AUGMENTATIONS, description="Each compared like views: presets, or {name, views, noise}."
    )
    augmentation_images: int = Field(200, ge=1, description="Images compared per augmentation.")
    sweeps: SweepSettings = Field(SweepSettings(), description="Other k and T (ERMoE, S3, S5).")

    roles: ExpertRoles | None = Field(None, description="Experts' roles, same pass; null: none.")

    @model_validator(mode="after")
    def _check_roles_and_augmentations(self) -> Self:
        if self.roles and self.images < MIN_IMAGES:
            value = f"{self.images}, and roles exchange images"
            refusal = format_found_and_allowed(found=value, allowed=f"{MIN_IMAGES} and more")
            raise ValueError(f"images: {refusal}")
        names = [look_up_augmentation(augmentation).name for augmentation in self.augmentations]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            value = f"{', '.join(duplicates)} more than once"
            refusal = format_found_and_allowed(found=value, allowed="each name once")
            raise ValueError(f"augmentations: {refusal}")
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        if around.is_text:
            views = f"some, but {around.data} is text, which has no views"
            for key in ("views", "augmentations", "augmentation_images"):
                if key in self.model_fields_set:
                    yield (key,), format_found_and_allowed(found=views, allowed="leave it out")
        yield from self.views.pixel_misfits(around)
        if around.has_truth and "augmentations" in self.model_fields_set and self.augmentations:
            yield ("augmentations",), f"found changes of images, {format_truth_refusal(around)}"
        yield from augmentation_misfits(self.augmentations, around)

    def places(self) -> dict[str, Iterable[Place]]:
        names = [look_up_augmentation(augmentation).name for augmentation in self.augmentations]
        return {"augmentation": names, "k": self.sweeps.k, "threshold": self.sweeps.threshold}

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        # facts: load, per layer each expert's share of the choices; overlays; corresponding, two
        # crops of an image (None for volumes and single patches); roles, None without that setting.
        model = subject.model
        test = subject.data.test
        indices = evenly_spaced_indices(len(test.images), self.images)
        images = test.images[indices]
        records = self.record_routing_and_put_roles(subject, indices, out)
        out.people = test.people_at(indices)
        layers, by_image = routing_metrics_by_layer(subject, records, images, self)
        put_means(layers, by_image, "{}", out)
        for number, (layer, items) in enumerate(zip(layers, by_image, strict=True), 1):
            put_means([layer], [items], "{}_layer", out, layer=number)
        put_augmented_matches(model, images, self, out)
        few = evenly_spaced_indices(len(images), self.sweeps.images)
        labels = model.targets(torch.from_numpy(test.labels[indices][few]))
        sample = interventions.SweepImages(images[few], labels, subject.data.task)
        put = partial(interventions.put_sweeps, model, sample, self.sweeps, self.batch)
        out.piece("sweeps", put)
        counts = [layer_metrics.expert_counts(record.chosen) for record in records]
        out.facts["load"] = [layer_metrics.load_shares(count) for count in counts]
        overlays = 0 if images.ndim == TEXT_NDIM else self.overlays
        shown = expert_profiles.evenly_spaced_overlays(images, records, overlays, model.layout)
        out.facts["overlays"] = shown
        finest = encoded_routing.finest_layout(model.layouts)
        crops = expert_profiles.draw_crop_pair(images[:CROP_CANDIDATES], finest, SEED)
        out.facts["corresponding"] = crops

    def record_routing_and_put_roles(
        self, subject: MeasuredModel, indices: np.ndarray, out: Values
    ) -> tuple[RoutingRecord, ...]:
        """Return each layer's record of one pass over test images, and put the experts' roles."""
        model = subject.model
        images = subject.data.test.images[indices]
        reason = ExpertRoles.model_refusal(model)
        if self.roles is None or reason:
            _, records = predict_in_batches(model, images, self.batch, prediction=False)
            out.facts["roles"] = SkipReason(skipped=reason) if self.roles and reason else None
            return records
        counted = BatchTracker(images)
        with (
            store_layer_tokens(model, counted) as tokens,
            record_choices_from_earlier_layer(model) as early,
        ):
            _, records = predict_in_batches(model, counted, self.batch, prediction=False)
        if all(record.chosen.any() for record in records):
            put_roles(subject, indices, records, tokens, early, self.roles, out)
        else:
            out.facts["roles"] = SkipReason(skipped="in a layer no token chose an expert")
        return records


Layers = Sequence[Mapping[str, float]]  # per MoE layer: metric name → value
LayerItems = Sequence[Mapping[str, Tensor]]  # per MoE layer: metric name → values per image, (N,)


def routing_metrics_by_layer(
    subject: MeasuredModel,
    records: tuple[RoutingRecord, ...],
    images: np.ndarray,
    settings: Routing,
) -> tuple[Layers, LayerItems]:
    """Return, per MoE layer, metric → mean over ``images``, and metric → (N,) by image."""
    router = subject.model.experts_and_router.scaled_router
    threshold = interventions.get_router_threshold_or_none(router)
    k = getattr(router, "k", None)
    matches = view_match_shares(subject.model, images, settings.views, settings.batch)
    teacher = teacher_probs(subject.guide, images, settings.batch, subject.device)
    layers, by_image = [], []
    for index, (record, (means, shares)) in enumerate(zip(records, matches, strict=True)):
        layer = {**layer_metrics.measure_layer_use(record, threshold, k), **means}
        items = {**layer_metrics.measure_layer_use_by_image(record, threshold, k), **shares}
        if teacher:
            shape = record.probs.shape
            theirs = correspondence.add_distillation_token_probs(teacher[index], shape)
            same = layer_metrics.agreement_by_image(first_choices(record), theirs.argmax(dim=-1))
            layer["teacher_agreement"] = float(same.mean())
            items["teacher_agreement"] = same
        layers.append(layer)
        by_image.append(items)
    return layers, by_image


def put_means(layers: Layers, by_image: LayerItems, key: str, out: Values, **at: Place) -> None:
    """Put the mean over ``layers`` of each metric that all have, as ``key.format(metric)``."""
    items = mean_items_over_layers(by_image)
    for name, mean in layer_metrics.average_layers(layers).items():
        metric = key.format(name)
        has_items = name in items and out.metrics[metric].label
        out.put(metric, items[name] if has_items else mean, Interval(mean), **at)


def put_augmented_matches(model: Model, images: np.ndarray, settings: Routing, out: Values) -> None:
    # A text has no views; a view would falsify a channel that holds the true kinds of patches.
    if images.ndim == TEXT_NDIM or model.image.truth:
        return
    few = evenly_spaced_indices(len(images), settings.augmentation_images)
    images = images[few]
    people = None if out.people is None else out.people[few]

    def put_matches(augmentation: TwoViewAugmentation, out: Values) -> None:
        out.people = people
        # draws depend on the augmentation's name alone
        views = draw_two_views(images, augmentation, SEED, *augmentation.name.encode())
        for name, shares in average_view_match_shares(model, views, settings.batch, people).items():
            out.put(f"{name}_augmented", *shares, augmentation=augmentation.name)

    for preset in settings.augmentations:
        augmentation = look_up_augmentation(preset, images.ndim == 5)
        out.piece(f"views {augmentation.name}", partial(put_matches, augmentation))
