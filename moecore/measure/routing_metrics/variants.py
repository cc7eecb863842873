"""The same images with noise, attacked, and augmented: whose routing is compared with the clean.

N images, C channels, H × W pixels; volumes (N, C, D, H, W) alike.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.attacks import Attack
from moecore.attacks.target import Target
from moecore.core.records import Layout
from moecore.data.corruptions.draws import directions
from moecore.measure.routing_metrics.augmentations import Augmentation, two_views
from moecore.nn.correspondence import origins

Kind = Literal["clean", "noise", "attack", "augmentation"]


class Variant(NamedTuple):
    """N images that were changed."""

    kind: Kind
    label: str
    pixels: Tensor  # fp32 in [0, 1]
    # (N, P) int64: the clean image's patch that each patch shows, −1 for none; None: the same
    origins: Tensor | None = None


def with_noise(
    clean: Tensor, places: Sequence[int], sigmas: Sequence[float], seed: int
) -> Iterator[Variant]:
    """Gaussian noise along one direction an image, as the measurement ``stability`` draws it.

    The background of a volume, which is 0, stays as it is.
    """
    drawn = directions(np.array(places), tuple(clean.shape[1:]), seed)
    if clean.ndim == 5:
        drawn = drawn * (clean != 0)
    for sigma in sigmas:
        yield Variant("noise", f"σ = {sigma:g}", (clean + sigma * drawn).clamp(0, 1))


def attacked(target: Target, attack: Attack, epsilons: Sequence[float]) -> Iterator[Variant]:
    """Every radius by itself, from the clean image."""
    for epsilon in epsilons:
        label = f"ε = {255 * epsilon:.3g}/255"
        yield Variant("attack", label, target.attacked(attack, epsilon))


def augmented(
    images: np.ndarray, augmentations: Sequence[Augmentation], layout: Layout, seed: int
) -> Iterator[Variant]:
    """One random view of each image, kind by kind; images: uint8, volumes float16.

    Drawn from (seed, name), so every method sees the same.
    """
    number = len(images)
    for asked in augmentations:
        views = two_views(images, asked, seed, *asked.name.encode())
        index, found = origins(views.affines[:number], layout)
        shown = torch.where(found, index, -1)
        patches = torch.arange(shown.shape[1])
        moved = None if bool((shown == patches).all()) else shown
        yield Variant("augmentation", asked.name, views.images[:number], moved)
