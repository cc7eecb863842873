"""Two random views of an image, kind by kind, whose patches are compared (PRC, tables 4 and 5).

N images. Every view is a function of (seed, name, place among the images), so that all methods see
the same ones and no result depends on the batch.
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

PART = 100  # images whose views are drawn together: fixed, so that no result depends on the batch
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
    """What is done to an image, twice with independent draws; the default does nothing."""

    name: str = Field(min_length=1, description="Its name in tables; the draws depend on it")
    views: ViewSettings = Field(
        ViewSettings(), description="Geometry and colours, drawn for each view"
    )
    noise: float = Field(
        0.0, ge=0, le=1, description="Of Gaussian noise, added last; pixels lie in [0, 1]"
    )


def _colour_range(name: Literal["brightness", "contrast"]) -> TwoViewAugmentation:
    """Factors of 0.55 or 1.45: half of RandAugment's range."""
    return TwoViewAugmentation(
        name=name,
        views=ViewSettings(randaugment=RandAugment(operations=1, magnitude=5, names=(name,))),
    )


# PRC names none for table 4; its fine-tuning takes crop and flip, its pretraining RandAugment
# (table 1). The limits are ours.
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

# Of volumes: the others are for flat images only, and so is a shear.
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
    for index, asked in enumerate(augmentations):
        volumes = around.source is not None and around.source.volumes
        if volumes and isinstance(asked, str) and asked not in OF_VOLUMES:
            text = f"found {asked}, which is for flat images"
            yield ("augmentations", index), f"{text}; allowed for volumes: {', '.join(OF_VOLUMES)}"


def look_up_augmentation(
    asked: Preset | TwoViewAugmentation, volumes: bool = False, section: str = "routing"
) -> TwoViewAugmentation:
    """A preset by its name, or the augmentation itself.

    Raises UserError, naming the section of params.yaml, for a preset that volumes do not have.
    """
    if isinstance(asked, TwoViewAugmentation):
        return asked
    known = OF_VOLUMES if volumes else PRESETS
    if asked not in known:
        problem = f"found {asked}, which is for flat images"
        raise UserError(
            f"{section}.augmentations: {problem}; allowed for volumes: {', '.join(known)}"
        )
    return known[asked]


def draw_two_views(
    images: np.ndarray, asked: TwoViewAugmentation, seed: int, *words: int
) -> ViewsWithAffines:
    """Both views of images uint8 (N, C, H, W), first all first views.

    Pixels are fp32 (2N, C, h, w) in [0, 1] and affines (2N, 3, 3); of volumes float16
    (N, C, D, H, W) fp32 volumes and affines (2N, 4, 4). Drawn from (seed, place, view, ``words``);
    with more images the first ones' views stay, in whole parts of 100.
    """
    drawn = derived_seed("measured_views", seed)
    made: tuple[list[ViewsWithAffines], list[ViewsWithAffines]] = ([], [])
    for start in range(0, len(images), PART):
        part = torch.from_numpy(np.array(images[start : start + PART]))
        for number, views in enumerate(made):
            generator = generator_for(drawn, start, number, *words)
            pixels, affines = make_random_views(part, asked.views, generator)
            if asked.noise:
                noise = torch.randn(pixels.shape, generator=generator) * asked.noise
                if pixels.ndim == 5:  # the background of a volume stays 0, as everywhere
                    noise = noise * (pixels != 0)
                pixels = (pixels + noise).clamp(0, 1)
            views.append(ViewsWithAffines(pixels, affines))
    return ViewsWithAffines(
        *(
            torch.cat([getattr(part, field) for views in made for part in views])
            for field in ViewsWithAffines._fields
        )
    )
