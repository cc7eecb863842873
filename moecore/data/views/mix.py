"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): two images and their labels become
one.
"""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.data.sampling import send
from moecore.tasks import AnyTask


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
        """Whether anything is ever mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)


def mix(
    images: Tensor, labels: Tensor, task: AnyTask, settings: Mix, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Mix each image with a random partner of the batch: images (B, C, H, W), soft labels (B, K).

    images: fp32 (B, C, H, W) in [0, 1], as the mixed ones; labels: int64 (B,), the mixed ones fp32.
    task: of the labels. generator: on the CPU. λ is drawn per image; CutMix's λ is the exact share
    of pixels kept. Raises UserError for a task whose labels are not one class each: a share of
    several labels has no meaning here, and real numbers have no classes to share.
    """
    if why := task.needs_classes("mix"):
        raise UserError(f"mix: found mixup or cutmix, but {why}; allowed: mix: null")
    hard = F.one_hot(labels, task.outputs).to(torch.float32)
    if not settings.active:
        return images, hard
    count, _, height, width = images.shape
    partner = send(torch.randperm(count, generator=generator), images.device)
    shares, cut = _draw(settings, count, generator)
    hidden = _boxes(shares, cut, height, width, generator)
    shares = torch.where(cut, 1 - hidden.to(torch.float64).mean((1, 2)), shares).to(torch.float32)
    kept = 1 - hidden.to(torch.float32)
    weights = torch.where(cut[:, None, None], kept, shares[:, None, None])
    weights = send(weights[:, None], images.device)
    shares = send(shares, images.device)[:, None]
    mixed = torch.lerp(images[partner], images, weights)
    return mixed, torch.lerp(hard[partner], hard, shares)


def _draw(settings: Mix, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """λ (B,) fp64, 1 where an image is left alone, and whether it is cut (B,) rather than
    blended.
    """
    # torch draws no Beta from a generator, numpy does.
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    coin = np.full(count, settings.cutmix > 0)
    if settings.mixup and settings.cutmix:
        coin = random.random(count) < 0.5
    alphas = np.where(coin, settings.cutmix, settings.mixup)
    shares = np.where(random.random(count) < settings.probability, random.beta(alphas, alphas), 1.0)
    return torch.from_numpy(shares), torch.from_numpy(coin)


def _boxes(shares: Tensor, cut: Tensor, height: int, width: int, generator: Generator) -> Tensor:
    """Pixels (B, H, W) that come from the partner: a box of area 1 − λ around a random centre.

    Cut at the border, whole pixels.
    """
    centre = torch.rand(2, len(shares), generator=generator, dtype=torch.float64)
    half = (1 - shares).sqrt() / 2 * cut
    rows = _within(height, centre[0], half)
    return rows[:, :, None] & _within(width, centre[1], half)[:, None, :]


def _within(side: int, centre: Tensor, half: Tensor) -> Tensor:
    low = ((centre - half) * side).round()
    high = ((centre + half) * side).round()
    places = torch.arange(side)
    return (places >= low[:, None]) & (places < high[:, None])
