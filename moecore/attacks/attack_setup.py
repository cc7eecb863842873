"""Attack a model on a set of images: batches, seeds, precision and devices.

The attacks themselves know of none of these. N images, C channels, H × W pixels, K outputs.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moecore.attacks.base import Attack, image_generators
from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.core.streams import derived_seed
from moecore.nn import predict
from moecore.tasks.base import Task

Precision = Literal["float32", "bfloat16"]


class Target(NamedTuple):
    """A model in evaluation mode, the images and labels it is attacked on, and how."""

    model: nn.Module
    task: Task
    images: Any  # (N, C, H, W) or volumes (N, C, D, H, W), uint8, or floating point in [0, 1]
    labels: Tensor  # (N, …), as the task has them
    batch: int  # images a forward pass; no result depends on it but by rounding
    seed: int = 0  # draws the random starts, each image's by its index
    precision: Precision = "float32"  # of an attack's forward passes; scores are always fp32
    # (N,) bool: the images to attack, where an attack takes each by itself; others stay clean.
    only: Tensor | None = None
    people: np.ndarray | None = None  # (N,), whose image each is; None where nothing says so

    def first(self, number: int) -> "Target":
        """The first images alone, all of which are attacked."""
        return self._replace(
            images=self.images[:number],
            labels=self.labels[:number],
            only=None,
            people=None if self.people is None else self.people[:number],
        )

    def clean_images(self) -> Tensor:
        """The images, fp32 (N, C, H, W) in [0, 1], on the CPU."""
        return torch.cat(list(predict.image_batches(self.images, self.batch)))

    def attacked(self, attack: Attack, epsilon: float) -> Tensor:
        """Adversarial images, fp32 (N, C, H, W) in [0, 1], on the CPU.

        The model and the global random state stay as they were. Images that an attack couples come
        in groups of its own size, those that share an expert's capacity in whole groups.
        """
        size = predict.round_batch_to_groups(self.model, attack.together or self.batch)
        model = bfloat16_model(self.model) if self.precision == "bfloat16" else self.model
        wanted = self.only
        if wanted is None or attack.together or predict.coupled_image_count(self.model) > 1:
            wanted = torch.ones(len(self.labels), dtype=torch.bool)
        made = []
        first = 0
        with predict.eval_mode(self.model):
            for pixels in predict.image_batches(self.images, size):
                places = wanted[first : first + len(pixels)].nonzero()[:, 0]
                made.append(self._attack_batch(attack, model, pixels, places, first, epsilon))
                first += len(pixels)
        return torch.cat(made)

    def predict_images(
        self, images: predict.ImageSequence
    ) -> tuple[Tensor, tuple[RoutingRecord, ...]]:
        """Predictions (N, K) and routing of other images in place of these, in fp32."""
        return predict.predict_in_batches(self.model, images, self.batch)

    def scores(self, images: predict.ImageSequence) -> Tensor:
        """The task's score of each of these images (N, C, H, W); (N,)."""
        prediction, _ = predict.predict_in_batches(self.model, images, self.batch, routing=False)
        return self.task.scores(prediction, self.labels)

    def worse_scores(self, images: predict.ImageSequence) -> Tensor:
        """The worse score of each image, clean or as in ``images``; (N,).

        The clean image lies in every ball: an attack that happens to mend one changes nothing.
        """
        return self.task.worse_scores(self.scores(self.images), self.scores(images))

    def _attack_batch(
        self,
        attack: Attack,
        model: nn.Module,
        pixels: Tensor,
        places: Tensor,
        first: int,
        epsilon: float,
    ) -> Tensor:
        """A batch whose image 0 has the index ``first``, attacked at these places."""
        if not len(places):
            return pixels
        device = predict.model_device(self.model)
        indices = (first + places).tolist()
        made = attack(
            model,
            self.task,
            pixels[places].to(device),
            self.labels[indices].to(device),
            epsilon,
            image_generators(self.seed, indices),
        )
        return pixels.index_copy(0, places, made.cpu())


def bfloat16_model(model: nn.Module) -> nn.Module:
    """The model with passes in bf16 where autocast allows it; routers and logits stay fp32."""
    return _BFloat16Model(model)


class _BFloat16Model(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.image = getattr(model, "image", None)  # which says whether a channel is the truth

    def forward(self, images: Tensor) -> ModelOutput:
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            output = self.model(images)
        return output._replace(prediction=output.prediction.float())


def draw_image_indices(total: int, number: int, seed: int) -> np.ndarray:
    """A seeded draw of ``number`` of ``total`` places without replacement, in order; or all."""
    drawn = np.random.default_rng(derived_seed("attacked_images", seed))
    return np.sort(drawn.permutation(total)[:number])
