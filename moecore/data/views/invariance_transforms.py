"""The twelve transforms of MoGE's table 1: small rotations, scalings, translations and shears.

They follow torchvision's RandomAffine, which the paper names: rotation, translation and shear are
uniform between −limit and +limit, about the centre; the shear moves columns; translations are
rounded to whole pixels; outside is black. Two choices are ours: a scaling by s is exactly s (the
paper gives one number where RandomAffine takes a range), and pixels are interpolated (torchvision's
default takes the nearest).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.streams import BatchDraws, generator_for
from moecore.data.views import warping


class Transform(NamedTuple):
    """Limits of the random affines of one transform; the default is the identity."""

    degrees: float = 0.0  # rotation from −degrees to +degrees
    translate: tuple[float, float] = (0.0, 0.0)  # horizontal, vertical, at most; of the side
    scale: float = 1.0  # exactly
    shear: float = 0.0  # from −shear to +shear degrees


TRANSFORMS = {  # names as in the table; translations are (horizontal, vertical)
    "rotation 5": Transform(degrees=5),
    "rotation 10": Transform(degrees=10),
    "rotation 15": Transform(degrees=15),
    "scaling 0.5": Transform(scale=0.5),
    "scaling 0.8": Transform(scale=0.8),
    "scaling 1.1": Transform(scale=1.1),
    "translation (0, 0.1)": Transform(translate=(0, 0.1)),
    "translation (0.1, 0)": Transform(translate=(0.1, 0)),
    "translation (0.1, 0.1)": Transform(translate=(0.1, 0.1)),
    "shear 5": Transform(shear=5),
    "shear 10": Transform(shear=10),
    "shear 15": Transform(shear=15),
}


def draw_affines(name: str, count: int, size: tuple[int, int], seed: int) -> Tensor:
    """Return affines (count, 3, 3) of TRANSFORMS[name] drawn by the seed; size: (height, width)."""
    settings = TRANSFORMS[name]
    generator = generator_for(seed, *name.encode())

    def within(limit: float) -> Tensor:
        return warping.uniform_draws(BatchDraws(generator, count), -limit, limit)

    turn = within(settings.degrees).deg2rad()
    shear = within(settings.shear).deg2rad().tan()
    right, down = (
        within(share * side).round()
        for share, side in zip(settings.translate, size[::-1], strict=True)
    )
    scaling = warping.scaling_affines(settings.scale, settings.scale, count)
    linear = warping.rotation_affines(turn) @ scaling @ warping.shearing_affines(0, shear, count)
    return warping.recentre_affines(warping.translation_affines(down, right, count) @ linear, *size)


def transform_images(images: Tensor, affines: Tensor) -> Tensor:
    """Return images uint8 (N, C, H, W) warped by affines (N, 3, 3), black outside the image."""
    height, width = images.shape[-2:]
    moved = warping.warp_images(images, affines, (height, width), "zeros")
    return moved.round().clamp(0, 255).to(torch.uint8)
