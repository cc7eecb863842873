"""RandAugment (Cubuk et al. 2020) of a batch: geometry in the affine, colours by subsets."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from pydantic import Field
from torch import Tensor

from moecore.core.config import Config
from moecore.core.streams import BatchDraws
from moecore.data.views import augmentations, warping
from moecore.data.views.warping import to_device_async

Geometric = Literal["shear_x", "shear_y", "translate_x", "translate_y", "rotate"]
Colour = Literal[
    "identity",
    "autocontrast",
    "equalize",
    "brightness",
    "contrast",
    "saturation",
    "sharpness",
    "posterize",
    "solarize",
    "invert",
]
STRENGTHLESS = frozenset({"autocontrast", "equalize", "invert"})  # alike at all magnitudes
STANDARD = (*get_args(Geometric), *(name for name in get_args(Colour) if name != "invert"))


class RandAugment(Config):
    """How many operations an image gets and how strong they are.

    At magnitude 10: shear 0.3, translation 45 % of the side, rotation 30°, enhancement factors 1 ±
    0.9, 4 bits, threshold 0; other magnitudes in proportion. Signs are random. Geometry is about
    the image's centre, and comes before all colours (our choice).
    """

    operations: int = Field(
        2, ge=0, le=16, description="Operations drawn for each image, with replacement"
    )
    magnitude: float = Field(
        9, ge=0, le=30, description="Strength; 10 is the full range of each, above in proportion"
    )
    names: tuple[Geometric | Colour, ...] = Field(
        STANDARD, min_length=1, description="Operations to draw from; all but invert by default"
    )

    @property
    def is_identity(self) -> bool:
        """Return whether no image is changed: without operations, or without their strength."""
        strong = set(self.names) - {"identity"}
        return not self.operations or not (strong if self.magnitude else strong & STRENGTHLESS)

    @property
    def moves(self) -> bool:
        """Return whether any operation changes the geometry."""
        return any(name in get_args(Geometric) for name in self.names)


class DrawnOperations(NamedTuple):
    """Positions in ``names`` and signed strength, both (B, operations); 1 = magnitude 10."""

    names: tuple[str, ...]
    choices: Tensor
    levels: Tensor


def draw_operations(settings: RandAugment, draws: BatchDraws) -> DrawnOperations:
    """Draw the operations of each image, on the CPU."""
    choices = draws.integers(0, len(settings.names), settings.operations)
    signs = draws.integers(0, 2, settings.operations) * 2 - 1
    return DrawnOperations(
        settings.names, choices, signs.to(torch.float64) * (settings.magnitude / 10)
    )


def operation_affines(drawn: DrawnOperations, height: float, width: float) -> Tensor:
    """All geometric operations of each image as one affine (B, 3, 3), fp64, in their order."""
    count = len(drawn.choices)
    total = torch.eye(3, dtype=torch.float64).expand(count, 3, 3)
    for place in range(drawn.choices.shape[1]):
        level = {
            name: torch.where(_is_operation(drawn, place, name), drawn.levels[:, place], 0.0)
            for name in get_args(Geometric)
        }
        shear = warping.shearing_affines(0.3 * level["shear_y"], 0.3 * level["shear_x"], count)
        move = warping.translation_affines(
            0.45 * height * level["translate_y"], 0.45 * width * level["translate_x"], count
        )
        turn = warping.rotation_affines(math.radians(30) * level["rotate"])
        # at most one of the three is not the identity
        total = warping.recentre_affines(move @ turn @ shear, height, width) @ total
    return total


def apply_colour_operations(pixels: Tensor, drawn: DrawnOperations) -> Tensor:
    """Apply colour operations in their order to fp32 (B, C, H, W) in 0..255, in place."""
    for place in range(drawn.choices.shape[1]):
        for name in (name for name in dict.fromkeys(drawn.names) if name in OPERATIONS):
            # on the CPU: the device is never waited for
            rows = _is_operation(drawn, place, name).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            operation, strength = OPERATIONS[name]
            values = to_device_async(
                strength(drawn.levels[rows, place]).to(torch.float32), pixels.device
            ).view(-1, 1, 1, 1)
            where = to_device_async(rows, pixels.device)
            pixels.index_copy_(0, where, operation(pixels.index_select(0, where), values))
    return pixels


def _is_operation(drawn: DrawnOperations, place: int, name: str) -> Tensor:
    if name not in drawn.names:
        return torch.zeros(len(drawn.choices), dtype=torch.bool)
    return drawn.choices[:, place] == drawn.names.index(name)


def _enhance_factor(levels: Tensor) -> Tensor:
    return (1 + 0.9 * levels).clamp(min=0)


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "autocontrast": (augmentations.autocontrast, torch.abs),
    "equalize": (augmentations.equalize, torch.abs),
    "invert": (augmentations.invert, torch.abs),
    "brightness": (augmentations.adjust_brightness, _enhance_factor),
    "contrast": (augmentations.adjust_contrast, _enhance_factor),
    "saturation": (augmentations.adjust_saturation, _enhance_factor),
    "sharpness": (augmentations.adjust_sharpness, _enhance_factor),
    "posterize": (
        augmentations.posterize,
        lambda levels: (8 - 4 * levels.abs()).round().clamp(1, 8),
    ),
    "solarize": (augmentations.solarize, lambda levels: (256 * (1 - levels.abs())).clamp(min=0)),
}
