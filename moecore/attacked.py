"""Attack a model on a set of images: what the attacks themselves do not know of batches, seeds, precision and devices.

N images, C channels, H × W pixels, K classes.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moecore.attacks import Attack
from moecore.attacks.draws import generators
from moecore.evaluation.classification import correct
from moecore.evaluation.predict import batches, device_of, evaluating, predictions
from moecore.evaluation.regression import absolute_error
from moecore.records import ModelOutput, RoutingRecord

Precision = Literal["float32", "bfloat16"]


class Target(NamedTuple):
    """A model in evaluation mode, the images and labels it is attacked on, and how."""

    model: nn.Module
    images: Any  # (N, C, H, W) or volumes (N, C, D, H, W), uint8, or floating point in [0, 1]
    labels: Tensor  # (N,) classes, (N, K) of 0 and 1, or (N,) floating real numbers
    batch: int  # images a forward pass; no result depends on it but by rounding
    seed: int = 0  # draws the random starts, each image's by its index
    precision: Precision = "float32"  # of the forward passes of an attack; scores are always fp32
    only: Tensor | None = None  # (N,) bool: the images to attack, where an attack takes each by itself; the others stay clean

    def clean(self) -> Tensor:
        """The images, fp32 (N, C, H, W) in [0, 1], on the CPU."""
        return torch.cat(list(batches(self.images, self.batch)))

    def attacked(self, attack: Attack, epsilon: float) -> Tensor:
        """Adversarial images, fp32 (N, C, H, W) in [0, 1], on the CPU; the model and the global random state stay as they were.

        Images that an attack couples come in groups of its own size, and all of them are attacked.
        """
        size = attack.together or self.batch
        wanted = torch.ones(len(self.labels), dtype=torch.bool) if self.only is None or attack.together else self.only
        model, found = rounded(self.model) if self.precision == "bfloat16" else self.model, []
        with evaluating(self.model):
            for start, pixels in enumerate(batches(self.images, size)):
                indices = (start * size + wanted[start * size :][: len(pixels)].nonzero()[:, 0]).tolist()
                found.append(self._some(attack, model, pixels, indices, start * size, epsilon))
        return torch.cat(found)

    def scored(self, images) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
        """Logits (N, K) and routing of other images in place of these, in fp32."""
        return predictions(self.model, images, self.batch)

    def hits(self, images) -> Tensor:
        """Whether each of these images (N, C, H, W) is classified right; (N,) bool."""
        return correct(predictions(self.model, images, self.batch, routing=False)[0], self.labels)

    def errors(self, images) -> Tensor:
        """The absolute error of each of these images where the labels are real; (N,) fp64, in the target's unit."""
        return absolute_error(predictions(self.model, images, self.batch, routing=False)[0], self.labels)

    def _some(self, attack: Attack, model: nn.Module, pixels: Tensor, indices: list[int], first: int, epsilon: float) -> Tensor:
        """A batch whose image 0 has index ``first``, where the images of these indices are attacked."""
        if not indices:
            return pixels
        device, places = device_of(self.model), torch.tensor(indices) - first
        made = attack(model, pixels[places].to(device), self.labels[indices].to(device), epsilon, generators(self.seed, indices))
        return pixels.index_copy(0, places, made.cpu())


def name_of(attack: Attack) -> str:
    """The kind and whatever differs from its defaults: pgd, pgd-10, pgd-balance-10-strong, pgd-inside-10."""
    return "-".join([attack.kind, *(k if v is True else str(v) for k, v in attack.model_dump(exclude_defaults=True).items() if k != "kind")])


def rounded(model: nn.Module) -> nn.Module:
    """The model with forward passes in bf16 where autocast allows it; routers stay in fp32, and so do its logits."""
    return _Rounded(model)


class _Rounded(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> ModelOutput:
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            output = self.model(images)
        return output._replace(prediction=output.prediction.float())


def subset(images: np.ndarray, labels: np.ndarray, number: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """A seeded draw without replacement of ``number`` images, in their order; all where there are fewer."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(labels))[:number])
    return images[chosen], torch.from_numpy(labels[chosen])
