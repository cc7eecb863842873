"""Collect the data of explorer.html: the experts of each patch or word, and their galleries."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from moecore.attacks import base, pgd
from moecore.attacks.attack_target import Target
from moecore.core.arrays_as_text import encode_concatenated_arrays
from moecore.core.config import Config, Misfits, Surroundings
from moecore.core.routing_records import TokenLayout
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.text.words import read_vocabulary
from moecore.measure import perturbations
from moecore.measure.base import SEED, MeasuredModel, Measurement, PartStore, load_or_compute
from moecore.measure.routing_metrics import epoch_routing, expert_profiles, two_view_agreement
from moecore.measure.values import OnPage, Values
from moecore.nn import encoded_routing
from moecore.nn.backbones.base_model import Model, majority_token_kinds
from moecore.nn.predict import predict_in_batches
from moecore.tasks.base import Task

BATCH = 64  # images per forward pass
FAVOURITES = 12  # patches shown per expert; fewer if there are many experts
SIGMAS = (0.05, 0.1, 0.2, 0.4)  # standard deviations of Gaussian noise; pixels lie in [0, 1]
Positive = Annotated[float, Field(gt=0, le=1)]


class Explorer(Measurement):
    """Routing of single images, clean and perturbed, for the routing explorer."""

    no_dense = "a dense model has no experts, so there is nothing to see"
    page: ClassVar[OnPage] = OnPage("single images", place=15)

    images: int = Field(
        24,
        ge=1,
        le=epoch_routing.MAX_IMAGES,
        description="Test images, evenly spread over the split, the same for every method; at most "
        f"{epoch_routing.MAX_VOLUMES} volumes.",
    )
    gallery: int | None = Field(400, ge=1, description="Images of favourite patches; null: all.")
    epsilons: tuple[Positive, ...] = Field(
        (1 / 255, 2 / 255, 4 / 255, 8 / 255), description="Radii of the L∞ ball, pixels in [0, 1]."
    )
    attack: base.Attack = Field(pgd.Pgd(steps=5), description="The attack at these radii.")
    augmentations: tuple[
        two_view_agreement.Preset | two_view_agreement.TwoViewAugmentation, ...
    ] = Field(
        ("shift", "rotation"),
        description="Random views, by kind: presets, or {name, views, noise}; not used for images "
        "with a channel of truth, which a view would falsify.",
    )

    def misfits(self, around: Surroundings) -> Misfits:
        return two_view_agreement.augmentation_misfits(self.augmentations, around)

    def measure(self, subject: MeasuredModel, out: Values) -> None:
        out.facts |= self.explore(subject, out.parts).model_dump(mode="json")

    def explore(self, subject: MeasuredModel, parts: PartStore) -> "ExplorerData":
        model = subject.model
        if model.image.task.long:
            return explore_text(subject, self)
        data = subject.data
        layout = encoded_routing.finest_layout(model.layouts)
        places = epoch_routing.explorer_image_indices(data, self.images)
        images = np.array(data.test.images[places])
        labels = model.targets(torch.from_numpy(np.array(data.test.labels[places])))
        target = Target(model, data.task.with_gallery(labels), images, labels, BATCH, SEED)
        volumes = images.ndim == 5
        views = () if model.image.truth else self.augmentations
        find = two_view_agreement.look_up_augmentation
        resolved = [find(view, volumes, "explorer") for view in views]
        clean = target.clean_images()
        channels = model.image.channels

        changed: dict[str, Iterable[perturbations.PerturbedImages]] = {
            "clean": [perturbations.PerturbedImages("clean", "clean", clean)],
            "noise": perturbations.iterate_noisy_images(clean, places, SIGMAS, SEED, channels),
            "attack": perturbations.iterate_attacked_images(target, self.attack, self.epsilons),
            "augmentations": perturbations.iterate_augmented_images(images, resolved, layout, SEED),
        }

        def trace_variants(variants: Iterable[perturbations.PerturbedImages]) -> ExplorerPart:
            shown = [trace_variant(model, data.task, variant) for variant in variants]
            return ExplorerPart(shown=shown)

        def experts() -> ExplorerPart:
            chosen = evenly_spaced_indices(len(data.test.images), self.gallery)
            gallery = expert_profiles.GalleryImages(chosen, data.test, data.task, channels)
            layers = expert_profiles.expert_galleries_by_layer(model, gallery, FAVOURITES)
            return ExplorerPart(layers=layers)

        variants = [
            load_or_compute(parts, name, ExplorerPart, partial(trace_variants, changes))
            for name, changes in changed.items()
        ]
        return ExplorerData(
            special=layout.special,
            grid=layout.grid,
            images=places,
            labels=list_label_numbers_by_image(labels, data.task),
            kinds=encode_token_kinds(clean, layout) if model.image.truth else None,
            layers=load_or_compute(parts, "experts", ExplorerPart, experts).layers,
            shown=[variant for part in variants for variant in part.shown],
        )


class TracedImages(Config):
    """The images under one perturbation, and how the model routes them."""

    kind: perturbations.Kind
    label: str
    picture: expert_profiles.EncodedImages | None  # None for changed volumes
    origins: str | None  # packed uint16 (N, P): patch of the clean image, 65535 for none
    trace: encoded_routing.EncodedPredictionsAndRouting


# T tokens: ``special`` ones first, then a ``grid`` of patches with the last axis fastest: two axes
# for images, three for volumes, one for text.
class ExplorerData(Config):
    """Data of explorer.html: N images' routing by layer and by token of the finest patch grid."""

    special: int
    grid: tuple[int, ...]
    images: tuple[int, ...]  # indices in the test split
    labels: tuple[tuple[float, ...], ...]  # their classes, or the real target
    words: tuple[tuple[str, ...], ...] | None = None  # (N, T), for text
    kinds: str | None = None  # packed uint8 (N, T): true kind of each token, 0 if unknown
    layers: tuple[expert_profiles.LayerGallery, ...]
    shown: tuple[TracedImages, ...]  # clean first


class ExplorerPart(Config):
    """Stored part of ``ExplorerData``: images under one kind of perturbation, or galleries."""

    shown: tuple[TracedImages, ...] = ()
    layers: tuple[expert_profiles.LayerGallery, ...] = ()


def explore_text(subject: MeasuredModel, settings: Explorer) -> ExplorerData:
    model, data = subject.model, subject.data
    layout = encoded_routing.finest_layout(model.layouts)
    places = epoch_routing.explorer_image_indices(data, settings.images)
    chosen = evenly_spaced_indices(len(data.test.images), settings.gallery)
    blocks = np.array(data.test.images[places])
    gallery = np.array(data.test.images[chosen])
    vocabulary = read_vocabulary(data.folder, model.image.task.outputs)
    numbers = expert_profiles.select_last_context_word_ids(blocks, bool(model.image.truth))
    _, records = predict_in_batches(model, blocks, BATCH, prediction=False)
    shown = (torch.zeros(len(blocks), 0), records, data.task, model.layouts)
    trace = encoded_routing.encode_predictions_and_records(*shown)
    return ExplorerData(
        special=layout.special,
        grid=layout.grid,
        images=places,
        labels=[[] for _ in places],
        words=[[vocabulary[number] for number in row] for row in numbers],
        kinds=encode_token_kinds(torch.from_numpy(blocks), layout) if model.image.truth else None,
        layers=expert_profiles.word_galleries_by_layer(model, gallery, vocabulary),
        shown=[TracedImages(kind="clean", label="clean", picture=None, origins=None, trace=trace)],
    )


def trace_variant(model: Model, task: Task, variant: perturbations.PerturbedImages) -> TracedImages:
    """Route perturbed images; encode pictures without the channel that holds tokens' true kinds."""
    prediction, records = predict_in_batches(model, variant.pixels, BATCH)
    places = picture = None
    if variant.origins is not None:
        places = encode_concatenated_arrays(variant.origins.numpy().astype(np.uint16))
    if variant.pixels.ndim == 4 or variant.kind == "clean":
        picture = expert_profiles.encode_thumbnails(variant.pixels[:, : model.image.channels])
    return TracedImages(
        kind=variant.kind,
        label=variant.label,
        picture=picture,
        origins=places,
        trace=encoded_routing.encode_predictions_and_records(
            prediction, records, task, model.layouts
        ),
    )


def encode_token_kinds(images: torch.Tensor, layout: TokenLayout) -> str:
    """Return the tokens' true kinds (N, T), packed as uint8, from the images' channel of truth."""
    return encode_concatenated_arrays(majority_token_kinds(images, layout).numpy().astype(np.uint8))


def list_label_numbers_by_image(labels: torch.Tensor, task: Task) -> list[list[float]]:
    """Return the classes, or the real target, of each image as a list; [] for captions."""
    if labels.ndim == 3:
        return [[] for _ in labels]
    members = task.by_class(labels)
    if members is None:
        return [[float(label)] for label in labels]
    rows, classes = members
    return [classes[rows == place].tolist() for place in range(len(labels))]
