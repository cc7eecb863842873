"""Two random views of each image under one augmentation (PRC, tables 4 and 5). N images.

A view is a function of (seed, name, index of the image): it is the same for all methods and all
batch sizes.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config, Misfits, Surroundings
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, TokenLayout, chosen_first_scores
from moecore.core.streams import derived_seed, generator_for
from moecore.data.views.augmentations import RandAugment
from moecore.data.views.views import (
    AffineRanges,
    CropRanges,
    ViewSettings,
    ViewsWithAffines,
    make_random_views,
)
from moecore.measure.base import SEED
from moecore.measure.routing_metrics.epochs import match_counts_by_image, match_ratios
from moecore.measure.routing_metrics.layer_metrics import average_layers, kept_choices
from moecore.nn.backbones.base_model import Model
from moecore.nn.correspondence import TokenPairs, token_pair_values, token_pairs_by_layer
from moecore.nn.predict import predict_in_batches
from moecore.statistics.comparisons import linearize_ratio
from moecore.statistics.intervals import Interval, bootstrap_interval

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
    views: ViewSettings = Field(
        ViewSettings(), description="Geometry and colours, drawn for each view"
    )
    noise: float = Field(
        0.0, ge=0, le=1, description="σ of Gaussian noise, added last; pixels lie in [0, 1]"
    )


def _colour_range(name: Literal["brightness", "contrast"]) -> TwoViewAugmentation:
    """Return a change of brightness or contrast by 0.55 or 1.45, half of RandAugment's range."""
    return TwoViewAugmentation(
        name=name,
        views=ViewSettings(randaugment=RandAugment(operations=1, magnitude=5, names=(name,))),
    )


# PRC names no augmentation for table 4; its fine-tuning uses crop and flip, its pretraining
# RandAugment (table 1). The ranges are ours.
PRESETS = {
    "identity": TwoViewAugmentation(name="identity"),
    "noise": TwoViewAugmentation(name="noise", noise=0.05),
    "shift": TwoViewAugmentation(name="shift", views=ViewSettings(shift=2)),
    "flip": TwoViewAugmentation(name="flip", views=ViewSettings(flip=True)),
    "crop": TwoViewAugmentation(name="crop", views=ViewSettings(crop=CropRanges())),
    "rotation": TwoViewAugmentation(
        name="rotation", views=ViewSettings(affine=AffineRanges(degrees=15))
    ),
    "affine": TwoViewAugmentation(
        name="affine",
        views=ViewSettings(
            affine=AffineRanges(degrees=10, translate=0.1, scale=(0.9, 1.1), shear=10)
        ),
    ),
    "brightness": _colour_range("brightness"),
    "contrast": _colour_range("contrast"),
    "randaugment": TwoViewAugmentation(
        name="randaugment", views=ViewSettings(randaugment=RandAugment())
    ),
    "erasing": TwoViewAugmentation(name="erasing", views=ViewSettings(erasing=1.0)),
}

# Presets of volumes; the others, and shear, are for flat images only.
OF_VOLUMES = {
    **{name: PRESETS[name] for name in ("identity", "noise", "shift", "flip", "rotation")},
    "affine": TwoViewAugmentation(
        name="affine",
        views=ViewSettings(affine=AffineRanges(degrees=10, translate=0.1, scale=(0.9, 1.1))),
    ),
}


def augmentation_misfits(
    augmentations: Sequence[Preset | TwoViewAugmentation], around: Surroundings
) -> Misfits:
    """Yield presets of flat images where volumes are changed."""
    if around.source is None or not around.source.volumes:
        return
    for index, preset in enumerate(augmentations):
        if isinstance(preset, str) and preset not in OF_VOLUMES:
            text = f"found {preset}, which is for flat images"
            yield ("augmentations", index), f"{text}; allowed for volumes: {', '.join(OF_VOLUMES)}"


def look_up_augmentation(
    augmentation: Preset | TwoViewAugmentation, volumes: bool = False, section: str = "routing"
) -> TwoViewAugmentation:
    """Return a preset by name, or the augmentation itself; UserError if volumes do not have it."""
    if isinstance(augmentation, TwoViewAugmentation):
        return augmentation
    presets = OF_VOLUMES if volumes else PRESETS
    if augmentation not in presets:
        raise UserError(
            f"{section}.augmentations: found {augmentation}, which is for flat images; "
            f"allowed for volumes: {', '.join(presets)}"
        )
    return presets[augmentation]


def draw_two_views(
    images: np.ndarray, augmentation: TwoViewAugmentation, seed: int, *stream: int
) -> ViewsWithAffines:
    """Return both views of images uint8 (N, C, H, W), all first views first.

    Pixels fp32 (2N, C, h, w) in [0, 1] with affines (2N, 3, 3); for volumes, float16
    (N, C, D, H, W), fp32 volumes with affines (2N, 4, 4). Drawn from (seed, index, view,
    ``stream``): whole chunks of 100 images keep their views if images are added.
    """
    view_seed = derived_seed("measured_views", seed)
    both: tuple[list[ViewsWithAffines], list[ViewsWithAffines]] = ([], [])
    for start in range(0, len(images), CHUNK_SIZE):
        chunk = torch.from_numpy(np.array(images[start : start + CHUNK_SIZE]))
        for number, views in enumerate(both):
            generator = generator_for(view_seed, start, number, *stream)
            pixels, affines = make_random_views(chunk, augmentation.views, generator)
            if augmentation.noise:
                noise = torch.randn(pixels.shape, generator=generator) * augmentation.noise
                if pixels.ndim == 5:  # the background of a volume stays 0, as everywhere
                    noise = noise * (pixels != 0)
                pixels = (pixels + noise).clamp(0, 1)
            views.append(ViewsWithAffines(pixels, affines))
    return ViewsWithAffines(
        *(
            torch.cat([getattr(chunk, field) for views in both for chunk in views])
            for field in ViewsWithAffines._fields
        )
    )


TEXT = 3  # dimensions of blocks of text, (N, C, M), which have neither views nor pictures
NAMES = ("match_top1", "match_top2_ordered", "match_top2_sets")
SHARES = (*NAMES, "switch_fraction")  # share of the second's experts that the first does not have


def view_match_shares(
    model: Model, images: np.ndarray, views: ViewSettings, batch: int
) -> Sequence[tuple[Mapping[str, float], Mapping[str, Tensor]]]:
    """Return SHARES per MoE layer (PRC, table 4), and the same per image, (N,); {} for text."""
    if images.ndim == TEXT:
        return [({}, {})] * len(model.experts_and_router.indices(model.config.depth))
    augmentation = TwoViewAugmentation(name="views", views=views)
    pictures = draw_two_views(images, augmentation, SEED)
    _, records = predict_in_batches(model, pictures.images, batch)
    paired = token_pairs_by_layer(pictures.affines, model.layouts, special=False)
    return [
        (layer_match_shares(record, *pairs), match_ratios_by_image(record, *pairs))
        for record, pairs in zip(records, paired, strict=True)
    ]


def augmented_row(
    model: Model, views: ViewsWithAffines, batch: int, people: np.ndarray | None = None
) -> dict[str, tuple[np.ndarray, Interval]]:
    """Return SHARES → one value per image, (N,), and the mean over layers with its interval."""
    _, records = predict_in_batches(model, views.images, batch)
    paired = token_pairs_by_layer(views.affines, model.layouts, special=False)
    pairs = list(zip(records, paired, strict=True))
    means = average_layers([layer_match_shares(record, *pair) for record, pair in pairs])
    images = mean_items_over_layers(
        [match_ratios_by_image(record, *pair) for record, pair in pairs]
    )
    limits = match_intervals(records, paired, people)
    return {
        name: (images[name], Interval(mean, *limits.get(name, ()))) for name, mean in means.items()
    }


def choice_ranking_scores(record: RoutingRecord) -> Tensor:
    """Return scores (B, T, E) that rank experts: chosen ones first, by logit."""
    # Logits, as an eigenbasis router clamps probs, which gives ties.
    return chosen_first_scores(record.logits, record.chosen)


def layer_match_shares(
    record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout
) -> dict[str, float]:
    """Return SHARES of one MoE layer; record: fields (2N, T, E), first views first."""
    ratios = match_ratios(
        *token_pair_values(choice_ranking_scores(record), pairs, layout), pairs.found
    )
    switched = (switched_by_token(record, pairs, layout) * pairs.found).sum() / pairs.found.sum()
    return dict(zip(SHARES, (*ratios, float(switched)), strict=True))


def switched_by_token(record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout) -> Tensor:
    """Return the switch fraction of each pair's chosen experts, (N, T) fp64."""
    return 1 - kept_choices(*token_pair_values(record.chosen, pairs, layout))


def match_ratios_by_image(
    record: RoutingRecord, pairs: TokenPairs, layout: TokenLayout
) -> dict[str, Tensor]:
    """Return SHARES as one value per image, (N,), with the means of ``layer_match_shares``."""
    counts = match_counts_by_image(
        *token_pair_values(choice_ranking_scores(record), pairs, layout), pairs.found
    ).double()
    switched = (switched_by_token(record, pairs, layout) * pairs.found).sum(dim=1)
    number = pairs.found.sum(dim=1).double().numpy()
    sums = torch.cat([counts, switched.unsqueeze(-1)], dim=1).numpy()
    return {
        name: torch.from_numpy(linearize_ratio(sums[:, column], number))
        for column, name in enumerate(SHARES)
    }


def mean_items_over_layers(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the mean over layers of each metric that all of them have, name → (N,)."""
    names = [name for name in layers[0] if all(name in layer for layer in layers)]
    return {
        name: torch.stack([layer[name] for layer in layers]).mean(dim=0).numpy() for name in names
    }


def match_intervals(
    records: tuple[RoutingRecord, ...],
    paired: Sequence[tuple[TokenPairs, TokenLayout]],
    people: np.ndarray | None = None,
) -> dict[str, tuple[float | None, float | None]]:
    """Return bootstrap limits by NAMES, over images or people: an image's pairs are dependent.

    Each layer's pairs are weighted as if there were as many as in the last layer.
    """
    number = paired[-1][0].found.sum(dim=1)
    by_layer = []
    for record, (pairs, layout) in zip(records, paired, strict=True):
        values = token_pair_values(choice_ranking_scores(record), pairs, layout)
        hits = match_counts_by_image(*values, pairs.found)
        share = number / pairs.found.sum(dim=1).clamp(min=1)
        by_layer.append(hits * share[:, None])
    counts = torch.stack(by_layer).double().mean(dim=0).numpy()
    number = number.numpy()
    has_pairs = number > 0
    counts, number = counts[has_pairs], number[has_pairs]
    people = None if people is None else people[has_pairs]

    def match_interval(hits: np.ndarray) -> Interval:
        return bootstrap_interval(
            lambda resample: float(hits[resample].sum() / number[resample].sum()),
            len(number),
            lowest=0.0,
            highest=1.0,
            people=people,
        )

    intervals = {name: match_interval(counts[:, column]) for column, name in enumerate(NAMES)}
    return {name: (interval.low, interval.high) for name, interval in intervals.items()}
