"""What each expert does on many test images: its load, classes, places, kinds, favourite patches.

N images, T tokens per image, P patches, E experts, K classes, D true kinds of tokens.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.core.config import Config
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.prepared import Split
from moecore.measure.exploring.expert_overlay_data import (
    CROP,
    EncodedPicture,
    encode_thumbnails,
    patch_crop,
)
from moecore.measure.routing_metrics.layer_metrics import expert_counts
from moecore.measure.routing_metrics.purity import token_kinds
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import image_batches, predict_in_batches
from moecore.nn.routing_traces import coarse_patch_indices, finest_layout
from moecore.tasks.base import Task

CHUNK = 50  # images whose records are in memory at once
CLASSES = 5  # of an expert
CROPS = 800  # of a layer: with many experts each has fewer


class FavouritePatch(Config):
    """A patch of a test image."""

    image: int  # its place in the split
    patch: int  # of the finest grid of all layers
    probability: float  # that the router gave the expert


class ExpertProfile(Config):
    """One expert."""

    load: float  # share of all choices, of all tokens
    classes: tuple[tuple[int, float], ...]  # class, its share of these choices; the largest first
    kinds: tuple[tuple[int, float], ...]  # the same of the tokens' true kinds, where they are known
    # of a text: words, and the share of their tokens that chose it; the largest first
    words: tuple[tuple[str, float], ...] = ()
    peak: float  # of the patches at one place the share that chose it, where that is largest
    favourites: tuple[FavouritePatch, ...]  # of the highest probability; one an image at most


class LayerGallery(Config):
    """The experts of one MoE layer."""

    experts: tuple[ExpertProfile, ...]
    # (E, 1, *grid) of the finest layer: of the patches at each place the share that chose the
    # expert, divided by its peak; None of a text
    places: EncodedPicture | None
    crops: EncodedPicture | None  # (crops, C, h, w), expert by expert; None: there are none


class ExpertUseByImage(NamedTuple):
    """One layer on a few images."""

    chosen: Tensor  # (N, E) int64, tokens
    highest: Tensor  # (N, E), the largest probability of a patch that chose the expert; −1: none
    patch: Tensor  # (N, E) int64, that patch
    at_place: Tensor  # (1, P, E) int64, images whose patch there chose the expert
    of_kind: Tensor  # (1, D, E) int64, tokens of the kind that chose it


class GalleryImages(NamedTuple):
    """Test images, and where they lie in the split."""

    places: np.ndarray  # (N,)
    split: Split
    task: Task
    channels: int  # those that are shown, the first ones


def expert_galleries_by_layer(
    model: Model, gallery: GalleryImages, most: int
) -> list[LayerGallery]:
    """Return the experts of every MoE layer, with at most ``most`` favourites each."""
    chunks = list(zip(*iterate_expert_use(model, gallery), strict=True))
    labels = torch.from_numpy(np.array(gallery.split.labels[gallery.places]))
    uses = []
    fine = finest_layout(model.layouts)
    for layer, layout in zip(chunks, model.layouts, strict=True):
        seen = ExpertUseByImage(*(torch.cat(field) for field in zip(*layer, strict=True)))
        at_place = seen.at_place.sum(dim=0)[coarse_patch_indices(layout, fine)]
        places = (at_place / len(labels)).T.unflatten(1, (1, *fine.grid))
        use = _expert_uses(seen, labels, gallery, places, layout, most)
        uses.append(use if layout == fine else _on_grid(use, layout, fine))
    return uses


def iterate_expert_use(model: Model, gallery: GalleryImages) -> Iterator[list[ExpertUseByImage]]:
    """Every layer on the images, CHUNK at a time."""
    for start in range(0, len(gallery.places), CHUNK):
        images = np.array(gallery.split.images[gallery.places[start : start + CHUNK]])
        _, records = predict_in_batches(model, images, CHUNK, prediction=False)
        yield [
            expert_use_by_image(
                record, layout.special, one_hot_kinds(images, layout, model.image.truth)
            )
            for record, layout in zip(records, model.layouts, strict=True)
        ]


def one_hot_kinds(images: np.ndarray, layout: TokenLayout, kinds: int) -> Tensor:
    """Return whether each token is of each of D ``kinds``, (N, T, D) bool; D is 0: unknown."""
    if not kinds:
        tokens = layout.special + prod(layout.grid)
        return torch.zeros(len(images), tokens, 0, dtype=torch.bool)
    known = token_kinds(torch.from_numpy(images), layout)
    return known[..., None] == torch.arange(1, kinds + 1)


def expert_use_by_image(record: RoutingRecord, special: int, kinds: Tensor) -> ExpertUseByImage:
    """Return what a router did with each image's patches (the ``special`` tokens are none).

    kinds: (N, T, D) bool.
    """
    liked = torch.where(record.chosen, record.probs, -1.0)[:, special:]
    highest, patch = liked.max(dim=1)
    counts = torch.stack([expert_counts(image) for image in record.chosen])
    at_place = record.chosen[:, special:].sum(dim=0, keepdim=True)
    of_kind = (kinds.double().mT @ record.chosen.double()).sum(dim=0, keepdim=True).long()
    return ExpertUseByImage(counts, highest, patch, at_place, of_kind)


def class_shares(counts: Tensor, labels: Tensor, task: Task) -> Tensor | None:
    """(E, K): of the choices of an expert the share of each class; None where there are none.

    counts: (N, E), choices in each image.  An image of several classes counts for each of them.
    """
    members = task.by_class(labels)
    if members is None:
        return None
    rows, classes = members
    summed = torch.zeros(task.outputs, counts.shape[1], dtype=torch.float64)
    summed.index_add_(0, classes.long(), counts[rows].double())
    return (summed / summed.sum(dim=0).clamp(min=1)).T


def _expert_uses(
    seen: ExpertUseByImage,
    labels: Tensor,
    gallery: GalleryImages,
    places: Tensor,
    layout: TokenLayout,
    most: int,
) -> LayerGallery:
    counts = seen.chosen.sum(dim=0)
    shares = class_shares(seen.chosen, labels, gallery.task)
    kinds = seen.of_kind.sum(dim=0).double().T
    kinds /= kinds.sum(dim=1, keepdim=True).clamp(min=1)
    peaks = places.flatten(1).amax(dim=1)
    number = len(counts)
    kept = max(1, min(most, CROPS // number))
    experts = []
    crops = []
    for expert in range(number):
        order = seen.highest[:, expert].sort(descending=True, stable=True).indices[:kept]
        liked = [row for row in order.tolist() if seen.highest[row, expert] >= 0]
        patches = [int(seen.patch[row, expert]) for row in liked]
        favourites = [
            FavouritePatch(
                image=int(gallery.places[row]),
                patch=patch,
                probability=round(float(seen.highest[row, expert]), 4),
            )
            for row, patch in zip(liked, patches, strict=True)
        ]
        crops += [_crop_favourite(gallery, one, layout) for one in favourites]
        classes = () if shares is None else largest_shares(shares[expert])
        load = float(counts[expert] / counts.sum().clamp(min=1))
        experts.append(
            ExpertProfile(
                load=round(load, 5),
                classes=classes,
                kinds=[(place + 1, share) for place, share in largest_shares(kinds[expert])],
                peak=round(float(peaks[expert]), 4),
                favourites=favourites,
            )
        )
    of_peak = places / peaks.clamp(min=1e-9).view(-1, *[1] * (places.ndim - 1))
    return LayerGallery(
        experts=experts,
        places=encode_thumbnails(of_peak),
        crops=encode_thumbnails(torch.stack(crops), CROP) if crops else None,
    )


def _on_grid(use: LayerGallery, layout: TokenLayout, fine: TokenLayout) -> LayerGallery:
    """Favourites of a coarser layer, at the first patch of the finest grid that each covers."""
    covers = coarse_patch_indices(layout, fine)

    def moved(one: FavouritePatch) -> FavouritePatch:
        first = int((covers == one.patch).nonzero()[0])
        return one.model_copy(update={"patch": first})

    experts = [
        one.model_copy(update={"favourites": tuple(map(moved, one.favourites))})
        for one in use.experts
    ]
    return use.model_copy(update={"experts": tuple(experts)})


def largest_shares(shares: Tensor, most: int = CLASSES) -> tuple[tuple[int, float], ...]:
    """Return the places of the largest shares that are not 0, the first largest, and these."""
    order = shares.sort(descending=True, stable=True).indices[:most].tolist()
    return tuple((place, round(float(shares[place]), 4)) for place in order if shares[place] > 0)


def _crop_favourite(
    gallery: GalleryImages, favourite: FavouritePatch, layout: TokenLayout
) -> Tensor:
    (image,) = image_batches(gallery.split.images[favourite.image][None], 1)
    return patch_crop(image[0, : gallery.channels], favourite.patch, layout)
