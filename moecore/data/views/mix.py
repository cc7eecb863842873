"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): two images become one."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.streams import BatchDraws
from moecore.data.views.warping import to_device_async
from moecore.tasks.base import Task


class Mix(Config):
    """Which images are mixed and how strongly.

    Where both alphas are above 0, each image gets one of the two by a fair coin.
    """

    mixup: float = Field(0.0, ge=0, description="alpha of mixup's Beta(alpha, alpha); 0 = off")
    cutmix: float = Field(0.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0 = off")
    probability: float = Field(
        1.0, ge=0, le=1, description="Probability that an image is mixed at all"
    )

    @property
    def active(self) -> bool:
        """True where anything is ever mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)


def mix_images(
    images: Tensor,
    labels: Tensor,
    task: Task,
    settings: Mix,
    source: Generator | BatchDraws,
    others: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix each image with a random partner of the batch: images (B, C, H, W), soft labels (B, K).

    images: fp32 (B, C, H, W) in [0, 1], as the mixed ones; labels: int64 (B,), the mixed ones fp32.
    task: of the labels. source: a generator on the CPU, or the draws of these images. others: the
    images and labels at places (B,) of the whole batch, where these images are a part of it. λ is
    drawn per image; CutMix's λ is the exact share of pixels kept. Raises UserError for a task whose
    labels are not one class each.
    """
    if why := task.needs_classes("mix"):
        raise UserError(f"mix: found mixup or cutmix, but {why}; allowed: mix: null")
    hard = F.one_hot(labels, task.outputs).to(torch.float32)
    if not settings.active:
        return images, hard
    draws = BatchDraws.of(source, len(images))
    height, width = images.shape[-2:]
    partner = draws.select_rows(torch.randperm(draws.whole, generator=draws.generator))
    shares, cut = _draw_shares(settings, draws)
    rows, columns = _boxes(shares, cut, height, width, draws)
    area = (rows.sum(1) * columns.sum(1)).to(torch.float64) / (height * width)
    shares = torch.where(cut, 1 - area, shares).to(torch.float32)
    # Boxes go to the device as their rows and columns: whole masks would be half of a step's bytes.
    hidden = (
        to_device_async(rows, images.device)[:, :, None]
        & to_device_async(columns, images.device)[:, None, :]
    )
    cut, shares = (
        to_device_async(cut, images.device)[:, None],
        to_device_async(shares, images.device)[:, None],
    )
    kept = 1 - hidden.to(torch.float32)
    weights = torch.where(cut[:, None], kept, shares[:, None])[:, None]
    if others is None:
        where = to_device_async(partner, images.device)
        return torch.lerp(images[where], images, weights), torch.lerp(hard[where], hard, shares)
    other, labelled = others(partner)
    known = F.one_hot(labelled, task.outputs).to(torch.float32)
    return torch.lerp(other, images, weights), torch.lerp(known, hard, shares)


def _draw_shares(settings: Mix, draws: BatchDraws) -> tuple[Tensor, Tensor]:
    """λ (B,) fp64, 1 where an image is left alone, and whether it is cut (B,)."""
    # torch draws no Beta from a generator, numpy does.
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=draws.generator)))
    coin = np.full(draws.whole, settings.cutmix > 0)
    if settings.mixup and settings.cutmix:
        coin = random.random(draws.whole) < 0.5
    alphas = np.where(coin, settings.cutmix, settings.mixup)
    mixed = random.random(draws.whole) < settings.probability
    shares = np.where(mixed, random.beta(alphas, alphas), 1.0)
    return draws.select_rows(torch.from_numpy(shares)), draws.select_rows(torch.from_numpy(coin))


def _boxes(
    shares: Tensor, cut: Tensor, height: int, width: int, draws: BatchDraws
) -> tuple[Tensor, Tensor]:
    """Rows (B, H) and columns (B, W) of a box of area 1 − λ around a random centre.

    Cut at the border, whole pixels.
    """
    drawn = torch.rand(2, draws.whole, generator=draws.generator, dtype=torch.float64)
    centre = [draws.select_rows(values) for values in drawn]
    half = (1 - shares).sqrt() / 2 * cut
    return _is_within_box(height, centre[0], half), _is_within_box(width, centre[1], half)


def _is_within_box(side: int, centre: Tensor, half: Tensor) -> Tensor:
    low = ((centre - half) * side).round()
    high = ((centre + half) * side).round()
    places = torch.arange(side)
    return (places >= low[:, None]) & (places < high[:, None])
