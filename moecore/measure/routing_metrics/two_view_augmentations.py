"""Two random views of each image under one augmentation (PRC, tables 4 and 5). N images.

A view is a function of (seed, name, index of the image): it is the same for all methods and all
batch sizes.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.streams import derived_seed, generator_for
from moecore.core.surroundings import Misfits, Surroundings
from moecore.data.views.augmentations import RandAugment
from moecore.data.views.views import (
    AffineRanges,
    CropRanges,
    ViewSettings,
    ViewsWithAffines,
    make_random_views,
)

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
