"""Who decides which expert sees a token, and how steadily.

Load, entropy, confidence, matches, sweeps over the router's settings, patches with their experts.
"""

from collections.abc import Sequence
from typing import ClassVar, Self, get_args

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from moecore.core.routing_records import RoutingRecord, first_choices
from moecore.core.surroundings import Misfits, Surroundings
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.views import CropRanges, ViewSettings, falsifies_truth
from moecore.measure.base import (
    SEED,
    MeasuredModel,
    Measurement,
    PartStore,
    Skipped,
    load_or_compute,
)
from moecore.measure.exploring.expert_overlay_data import (
    MatchedCrops,
    Overlays,
    evenly_spaced_overlays,
    overlapping_crops,
)
from moecore.measure.routing_metrics.expert_information import FEWEST
from moecore.measure.routing_metrics.expert_roles import (
    ExpertRoles,
    roles_refusal,
    tell_roles,
    watch_experts,
)
from moecore.measure.routing_metrics.expert_roles import Result as ExpertRolesResult
from moecore.measure.routing_metrics.expert_similarity import CountedImages
from moecore.measure.routing_metrics.layer_metrics import (
    agreement_by_image,
    average_layers,
)
from moecore.measure.routing_metrics.layer_use import (
    LayerUse,
    Use,
    layer_use_metrics,
    use_metrics_by_image,
)
from moecore.measure.routing_metrics.sweeps import (
    RoutingSweeps,
    SweepImages,
    SweepSettings,
    run_sweeps,
    score_threshold,
)
from moecore.measure.routing_metrics.two_view_agreement import (
    AugmentedRow,
    TwoViewMatchShares,
    augmented_row,
    encode_means_over_layers,
    layer_match_shares,
    match_ratios_by_image,
)
from moecore.measure.routing_metrics.two_view_augmentations import (
    Preset,
    TwoViewAugmentation,
    augmentation_misfits,
    draw_two_views,
    look_up_augmentation,
)
from moecore.nn.backbones.base_model import Model
from moecore.nn.correspondence import align_teacher_probs, token_pairs_by_layer
from moecore.nn.predict import predict_in_batches
from moecore.nn.routing_traces import finest_layout
from moecore.training.guide import teacher_probs

AUGMENTATIONS = tuple(one for one in get_args(Preset) if one not in ("identity", "erasing"))
CROPPED = 8  # images of which one is shown in two crops
TEXT = 3  # axes of blocks of text, (N, C, M): it has neither views nor pictures


class Routing(Measurement):
    """Which test images the routing is measured on, and what is done to them and to the router."""

    guided: ClassVar[bool] = True

    images: int = Field(
        2000, ge=1, description="Test images, evenly spread; the same for every method."
    )
    batch: int = Field(256, ge=1, description="Images a forward pass; no result depends on it.")
    overlays: int = Field(
        4, ge=0, le=16, description="Test images whose patches are shown with their experts."
    )
    views: ViewSettings = Field(
        ViewSettings(crop=CropRanges(), flip=True),
        description="Two random views, compared (PRC, table 4).",
    )
    augmentations: tuple[Preset | TwoViewAugmentation, ...] = Field(
        AUGMENTATIONS, description="As views, kind by kind: presets, or {name, views, noise}."
    )
    augmentation_images: int = Field(
        200, ge=1, description="Of those images, how many are shown each augmentation."
    )
    sweeps: SweepSettings = Field(
        SweepSettings(),
        description="The trained weights under other k and thresholds (ERMoE, S3, S5).",
    )

    roles: ExpertRoles | None = Field(
        None, description="What experts are for, by the same pass; null: it is not asked."
    )

    @model_validator(mode="after")
    def _images_can_be_exchanged(self) -> Self:
        if self.roles and self.images < FEWEST:
            few = f"images: found {self.images}, and roles exchange images"
            raise ValueError(f"{few}; allowed: {FEWEST} and more")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [look_up_augmentation(asked).name for asked in self.augmentations]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            again = ", ".join(twice)
            raise ValueError(
                f"augmentations: {again} stands there twice; each name is allowed once"
            )
        return self

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield views that text does not have, or that would falsify the truth of images."""
        views = ("views", "augmentations", "augmentation_images")
        for key in views if around.is_text else ():
            if key in self.model_fields_set:
                text = f"found some, but {around.data} is text, which has no views"
                yield (key,), f"{text}; allowed: leave it out"
        yield from self.views.pixel_misfits(around)
        if around.has_truth and "augmentations" in self.model_fields_set and self.augmentations:
            yield ("augmentations",), f"found changes of images, {falsifies_truth(around)}"
        yield from augmentation_misfits(self.augmentations, around)

    @classmethod
    def model_refusal(cls, model: Model) -> str | None:
        """Return why not, in words: a dense model has no router."""
        return "a dense model has no routing" if model.moe is None else None

    def measure(self, subject: MeasuredModel, parts: PartStore) -> "Result":
        """Everything about the routing of images of the test split."""
        model = subject.model
        test = subject.data.test
        where = evenly_spaced_indices(len(test.images), self.images)
        images = test.images[where]
        labels = test.labels[where]
        records, roles = self.look_once(subject, where)
        people = test.people_at(where)
        layers, by_image = routing_metrics_by_layer(subject, records, images, self)
        kept = [encode_means_over_layers([one], people) for one in by_image]

        def tried() -> RoutingSweeps:
            few = evenly_spaced_indices(len(images), self.sweeps.images)
            known = subject.model.targets(torch.from_numpy(labels[few]))
            sample = SweepImages(images[few], known, subject.data.task)
            return run_sweeps(model, sample, self.sweeps, self.batch)

        pictured = 0 if images.ndim == TEXT else self.overlays
        return Result(
            images=len(images),
            items=encode_means_over_layers(by_image, people),
            **average_layers(layers, MEANS),
            layers=[
                layer.model_copy(update={"items": items})
                for layer, items in zip(layers, kept, strict=True)
            ],
            overlays=evenly_spaced_overlays(images, records, pictured, model.layout),
            corresponding=overlapping_crops(images[:CROPPED], finest_layout(model.layouts), SEED),
            augmentations=augmented_rows(model, images, self, parts, people),
            sweeps=load_or_compute(parts, "sweeps", RoutingSweeps, tried),
            roles=roles,
        )

    def look_once(
        self, subject: MeasuredModel, where: np.ndarray
    ) -> tuple[tuple[RoutingRecord, ...], ExpertRolesResult | Skipped | None]:
        """Return the records of one pass over the test images at these places, and the roles."""
        model, images = subject.model, subject.data.test.images[where]
        reason = roles_refusal(model)
        if self.roles is None or reason:
            _, records = predict_in_batches(model, images, self.batch, prediction=False)
            return records, Skipped(skipped=reason) if self.roles and reason else None
        counted = CountedImages(images)
        with watch_experts(model, counted) as watched:
            _, records = predict_in_batches(model, counted, self.batch, prediction=False)
        if not all(record.chosen.any() for record in records):
            return records, Skipped(skipped="in a layer no token chose an expert")
        return records, tell_roles(subject, where, records, watched, self.roles)


class RoutingLayer(LayerUse, TwoViewMatchShares):
    """One MoE layer's use of its experts, and what corresponding patches of two views share.

    items: as those of Result, of this layer alone.
    """

    items: dict[str, str] = {}
    teacher_agreement: float | None = None  # methods with a teacher's routers only


class Result(Use, TwoViewMatchShares):
    """The means over the MoE layers, each layer, and the same weights under other conditions.

    items: of the metrics under their names one number per item, by ``encode_item_values``.
    """

    images: int
    items: dict[str, str] = {}
    teacher_agreement: float | None = None
    layers: tuple[RoutingLayer, ...]
    overlays: Overlays
    corresponding: MatchedCrops | None = None  # of volumes and single patches none
    augmentations: tuple[AugmentedRow, ...]
    sweeps: RoutingSweeps
    roles: ExpertRolesResult | Skipped | None = None  # None: they were not asked


MEANS = (*Use.model_fields, *TwoViewMatchShares.model_fields, "teacher_agreement")


def routing_metrics_by_layer(
    subject: MeasuredModel,
    records: tuple[RoutingRecord, ...],
    images: np.ndarray,
    settings: Routing,
) -> tuple[list[RoutingLayer], list[dict[str, Tensor]]]:
    """Each MoE layer's use of its experts, its matches, and its agreement with the teacher.

    And the same metrics as one value an image, (N,), of each layer.
    """
    router = subject.model.experts_and_router.scaled_router
    matches = view_match_shares(subject.model, images, settings)
    teacher = teacher_probs(subject.guide, images, settings.batch, subject.device)
    layers = []
    by_image = []
    for place, (record, (matching, matched)) in enumerate(zip(records, matches, strict=True)):
        asked = (score_threshold(router), getattr(router, "k", None))
        use = layer_use_metrics(record, *asked)
        items = use_metrics_by_image(record, *asked) | matched
        layer = RoutingLayer(**use.model_dump(), **matching.model_dump())
        if teacher:
            theirs = align_teacher_probs(teacher[place], record.probs.shape).argmax(dim=-1)
            same = agreement_by_image(first_choices(record), theirs)
            layer = layer.model_copy(update={"teacher_agreement": float(same.mean())})
            items["teacher_agreement"] = same
        layers.append(layer)
        by_image.append(items)
    return layers, by_image


def view_match_shares(
    model: Model, images: np.ndarray, settings: Routing
) -> Sequence[tuple[TwoViewMatchShares, dict[str, Tensor]]]:
    """Return how often corresponding patches in two ``views`` agree, per MoE layer (PRC, table 4).

    And the match ratios as one value an image, (N,). Text has none.
    """
    if images.ndim == TEXT:
        layers = len(model.experts_and_router.indices(model.config.depth))
        return [(TwoViewMatchShares(), {})] * layers
    asked = TwoViewAugmentation(name="views", views=settings.views)
    views = draw_two_views(images, asked, SEED)
    _, records = predict_in_batches(model, views.images, settings.batch)
    paired = token_pairs_by_layer(views.affines, model.layouts, special=False)
    return [
        (layer_match_shares(record, *pairs), match_ratios_by_image(record, *pairs))
        for record, pairs in zip(records, paired, strict=True)
    ]


def augmented_rows(
    model: Model,
    images: np.ndarray,
    settings: Routing,
    parts: PartStore,
    people: np.ndarray | None = None,
) -> tuple[AugmentedRow, ...]:
    """The matches under each augmentation; its draws do not depend on the others in the list.

    None of text, nor of images with a channel of truth, which a change would falsify.
    """
    few = evenly_spaced_indices(len(images), settings.augmentation_images)
    images = images[few]
    whose = None if people is None else people[few]

    def row(asked: TwoViewAugmentation) -> AugmentedRow:
        views = draw_two_views(images, asked, SEED, *asked.name.encode())
        return augmented_row(asked.name, model, views, settings.batch, whose)

    if images.ndim == TEXT or model.image.truth:
        return ()
    chosen = [look_up_augmentation(preset, images.ndim == 5) for preset in settings.augmentations]
    return tuple(
        load_or_compute(parts, f"views {asked.name}", AugmentedRow, lambda asked=asked: row(asked))
        for asked in chosen
    )
