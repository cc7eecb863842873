"""Draw two views of each image, and count tokens with equal experts in both (PRC, table 4)."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core import routing_records, streams
from moecore.core.config import Config, Misfits, Surroundings
from moecore.core.files import UserError
from moecore.data.views.random_views import ViewSettings, ViewsWithAffines, make_random_views
from moecore.measure.base import SEED
from moecore.measure.routing_metrics import epoch_routing, layer_metrics
from moecore.nn.backbones.base_model import Model
from moecore.nn.correspondence import token_pairs_by_layer, values_of_pairs
from moecore.nn.predict import predict_in_batches
from moecore.statistics.comparisons import linearize_ratio
from moecore.statistics.intervals import Interval, People, bootstrap_statistic

CHUNK_SIZE = 100  # images whose views are drawn together; fixed: results do not depend on batches
Preset = Literal[
    "identity",
    "noise",
    "shift",
    "flip",
    "crop",
    "rotation",
    "affine",
    "brightness",
    "contrast",
    "randaugment",
    "erasing",
]


class TwoViewAugmentation(Config):
    """An augmentation, applied twice with independent draws; the default changes nothing."""

    name: str = Field(min_length=1, description="Its name in tables; the draws depend on it")
    views: ViewSettings = Field(ViewSettings(), description="Geometry and colours of each view")
    noise: float = Field(0.0, ge=0, le=1, description="Gaussian σ, added last; pixels in [0, 1]")


HALF_RANDAUGMENT = {"operations": 1, "magnitude": 5}  # of its range: a factor of 0.55 or 1.45
AFFINE = {"degrees": 10, "translate": 0.1, "scale": (0.9, 1.1)}
# PRC names no augmentation for table 4; its fine-tuning uses crop and flip, its pretraining
# RandAugment (table 1). The ranges are ours.
PRESETS = {
    name: TwoViewAugmentation.model_validate({"name": name, **changes})
    for name, changes in {
        "identity": {},
        "noise": {"noise": 0.05},
        "shift": {"views": {"shift": 2}},
        "flip": {"views": {"flip": True}},
        "crop": {"views": {"crop": {}}},
        "rotation": {"views": {"affine": {"degrees": 15}}},
        "affine": {"views": {"affine": AFFINE | {"shear": 10}}},
        "brightness": {"views": {"randaugment": HALF_RANDAUGMENT | {"names": ["brightness"]}}},
        "contrast": {"views": {"randaugment": HALF_RANDAUGMENT | {"names": ["contrast"]}}},
        "randaugment": {"views": {"randaugment": {}}},
        "erasing": {"views": {"erasing": 1.0}},
    }.items()
}

# Presets of volumes; the others, and shear, are for flat images only.
VOLUME_PRESETS = {
    **{name: PRESETS[name] for name in ("identity", "noise", "shift", "flip", "rotation")},
    "affine": TwoViewAugmentation.model_validate({"name": "affine", "views": {"affine": AFFINE}}),
}


def augmentation_misfits(
    augmentations: Sequence[Preset | TwoViewAugmentation], around: Surroundings
) -> Misfits:
    if around.source is None or not around.source.volumes:
        return
    for index, preset in enumerate(augmentations):
        if isinstance(preset, str) and preset not in VOLUME_PRESETS:
            text = f"found {preset}, which is for flat images; allowed for volumes"
            yield ("augmentations", index), f"{text}: {', '.join(VOLUME_PRESETS)}"


def look_up_augmentation(
    augmentation: Preset | TwoViewAugmentation, volumes: bool = False, section: str = "routing"
) -> TwoViewAugmentation:
    """Return a preset by name, or the augmentation itself; UserError if volumes do not have it."""
    if isinstance(augmentation, TwoViewAugmentation):
        return augmentation
    presets = VOLUME_PRESETS if volumes else PRESETS
    if augmentation not in presets:
        raise UserError(
            f"{section}.augmentations: found {augmentation}, which is for flat images; "
            f"allowed for volumes: {', '.join(presets)}"
        )
    return presets[augmentation]


def draw_two_views(
    images: np.ndarray, augmentation: TwoViewAugmentation, seed: int, *stream: int
) -> ViewsWithAffines:
    """Draw two views per image, uint8 (N, C, H, W); return all first views, then all second."""
    # Pixels fp32 (2N, C, h, w) in [0, 1] with affines (2N, 3, 3); for volumes, float16
    # (N, C, D, H, W), fp32 volumes with affines (2N, 4, 4). Drawn from (seed, index, view,
    # ``stream``): whole chunks of 100 images keep their views if images are added.
    view_seed = streams.derived_seed("measured_views", seed)
    both: tuple[list[ViewsWithAffines], list[ViewsWithAffines]] = ([], [])
    for start in range(0, len(images), CHUNK_SIZE):
        chunk = torch.from_numpy(np.array(images[start : start + CHUNK_SIZE]))
        for number, views in enumerate(both):
            generator = streams.generator_for(view_seed, start, number, *stream)
            pixels, affines = make_random_views(chunk, augmentation.views, generator)
            if augmentation.noise:
                noise = torch.randn(pixels.shape, generator=generator) * augmentation.noise
                if pixels.ndim == 5:  # the background of a volume stays 0, as everywhere
                    noise = noise * (pixels != 0)
                pixels = (pixels + noise).clamp(0, 1)
            views.append(ViewsWithAffines(pixels, affines))
    return ViewsWithAffines(*map(torch.cat, zip(*both[0], *both[1], strict=True)))


TEXT_NDIM = 3  # dimensions of blocks of text, (N, C, M), which have neither views nor pictures
MATCH_NAMES = ("match_top1", "match_top2_ordered", "match_top2_sets")
SHARE_NAMES = (*MATCH_NAMES, "switch_fraction")  # of the second's experts, not in the first


class LayerMatches(NamedTuple):
    """Pairs of tokens that show one patch in two views, and how many choose the same experts."""

    counts: Tensor  # (N, 3) int64, for each of MATCH_NAMES
    switched: Tensor  # (N, T) fp64, switch fraction of each pair's chosen experts; 0: no pair
    number: Tensor  # (N,) int64, of all pairs

    def shares(self) -> dict[str, float]:
        """Return each of SHARE_NAMES → its share of all pairs."""
        pairs = int(self.number.sum())
        ratios = [count / pairs for count in self.counts.sum(dim=0).tolist()]
        switched = self.switched.sum() / self.number.sum()
        return dict(zip(SHARE_NAMES, (*ratios, float(switched)), strict=True))

    def by_image(self) -> dict[str, Tensor]:
        """Return each of SHARE_NAMES → values by image, (N,), with the means of ``shares``."""
        number = self.number.double().numpy()
        sums = [*self.counts.double().T, self.switched.sum(dim=1)]
        return {
            name: torch.from_numpy(linearize_ratio(column.numpy(), number))
            for name, column in zip(SHARE_NAMES, sums, strict=True)
        }


def view_match_shares(
    model: Model, images: np.ndarray, views: ViewSettings, batch: int
) -> Sequence[tuple[Mapping[str, float], Mapping[str, Tensor]]]:
    """Return, per MoE layer, share name → share, and → values by image, (N,); {} for text."""
    if images.ndim == TEXT_NDIM:
        return [({}, {})] * len(model.experts_and_router.indices(model.config.depth))
    pictures = draw_two_views(images, TwoViewAugmentation(name="views", views=views), SEED)
    layers = count_matches_by_layer(model, pictures, batch)
    return [(layer.shares(), layer.by_image()) for layer in layers]


def average_view_match_shares(
    model: Model, views: ViewsWithAffines, batch: int, people: People = None
) -> dict[str, tuple[np.ndarray, Interval]]:
    """Return share name → values by image, (N,), and mean with interval, over all layers."""
    layers = count_matches_by_layer(model, views, batch)
    means = layer_metrics.average_layers([layer.shares() for layer in layers])
    images = mean_items_over_layers([layer.by_image() for layer in layers])
    limits = bootstrap_match_shares(layers, people)
    return {key: (images[key], Interval(mean, *limits.get(key, ()))) for key, mean in means.items()}


def count_matches_by_layer(model: Model, views: ViewsWithAffines, batch: int) -> list[LayerMatches]:
    # views: all first views first. Chosen experts rank before others, then by logit.
    _, records = predict_in_batches(model, views.images, batch)
    paired = token_pairs_by_layer(views.affines, model.layouts, special=False)
    layers = []
    for record, (pairs, layout) in zip(records, paired, strict=True):
        # Logits, as an eigenbasis router clamps probs, which gives ties.
        scores = routing_records.raise_scores_of_chosen(record.logits, record.chosen)
        both_scores = values_of_pairs(scores, pairs, layout)
        switched = 1 - layer_metrics.inherited_share(*values_of_pairs(record.chosen, pairs, layout))
        layers.append(
            LayerMatches(
                epoch_routing.count_token_pair_matches_by_image(*both_scores, pairs.mask),
                switched * pairs.mask,
                pairs.mask.sum(dim=1),
            )
        )
    return layers


def mean_items_over_layers(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the mean over layers of each metric that all of them have, name → (N,)."""
    names = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {key: torch.stack([layer[key] for layer in layers]).mean(dim=0).numpy() for key in names}


def bootstrap_match_shares(
    layers: Sequence[LayerMatches], people: People
) -> dict[str, tuple[float | None, float | None]]:
    """Return match metric → bootstrap limits over images or people, not over pairs of tokens."""
    # Each layer's pairs are weighted as if there were as many as in the last layer.
    number = layers[-1].number
    by_layer = [layer.counts * (number / layer.number.clamp(min=1))[:, None] for layer in layers]
    counts = torch.stack(by_layer).double().mean(dim=0).numpy()
    number = number.numpy()
    has_pairs = number > 0
    counts, number = counts[has_pairs], number[has_pairs]
    people = None if people is None else people[has_pairs]

    def limits(hits: np.ndarray) -> tuple[float | None, float | None]:
        def share(resample: np.ndarray) -> float:
            return float(hits[resample].sum() / number[resample].sum())

        interval = bootstrap_statistic(share, len(number), lowest=0.0, highest=1.0, people=people)
        return interval.low, interval.high

    return {name: limits(counts[:, column]) for column, name in enumerate(MATCH_NAMES)}
