"""Perturb test images by noise, attacks or augmentations, at several strengths."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moecore.attacks import attack_target, base
from moecore.core.routing_records import TokenLayout
from moecore.data.corruptions import standard_normal_noise
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.nn.correspondence import original_patches_of_views

Kind = Literal["clean", "noise", "attack", "augmentation"]


class PerturbedImages(NamedTuple):
    """N test images under one perturbation, such as noise of one strength."""

    kind: Kind
    label: str
    pixels: Tensor  # fp32 in [0, 1]
    # (N, P) int64: the clean image's patch that each patch shows, −1 for none; None: its own patch
    origins: Tensor | None = None


def iterate_noisy_images(
    clean: Tensor, places: Sequence[int], sigmas: Sequence[float], seed: int, channels: int
) -> Iterator[PerturbedImages]:
    """Yield images + σ · noise for each σ; noise: fixed by ``places``, first ``channels`` only."""
    # places: indices in the split, which the noise depends on, as in ``stability``. channels: how
    # many get noise.
    noise = standard_normal_noise(np.array(places), tuple(clean.shape[1:]), seed)
    noise[:, channels:] = 0  # the remaining channels hold the truth, which no model reads
    if clean.ndim == 5:
        noise = noise * (clean != 0)  # the background of a volume stays 0
    for sigma in sigmas:
        yield PerturbedImages("noise", f"σ = {sigma:g}", (clean + sigma * noise).clamp(0, 1))


def iterate_attacked_images(
    target: attack_target.Target, attack: base.Attack, epsilons: Sequence[float]
) -> Iterator[PerturbedImages]:
    """Yield the attacked images at each epsilon, every attack started from the clean images."""
    for epsilon in attack.radii(epsilons):
        label = f"ε = {255 * epsilon:.3g}/255"
        yield PerturbedImages("attack", label, target.attacked(attack, epsilon))


def iterate_augmented_images(
    images: np.ndarray, augmentations: Sequence[TwoViewAugmentation], layout: TokenLayout, seed: int
) -> Iterator[PerturbedImages]:
    """Yield one random view of the images (uint8, volumes float16) under each augmentation."""
    # Drawn from (seed, name): the same for every method.
    number = len(images)
    for augmentation in augmentations:
        views = draw_two_views(images, augmentation, seed, *augmentation.name.encode())
        index, has_origin = original_patches_of_views(views.affines[:number], layout)
        origins = torch.where(has_origin, index, -1)
        is_unmoved = bool((origins == torch.arange(origins.shape[1])).all())
        yield PerturbedImages(
            "augmentation",
            augmentation.name,
            views.images[:number],
            origins=None if is_unmoved else origins,
        )
