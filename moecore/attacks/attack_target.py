"""Attack a model on a set of images: batches, seeds, precision and devices."""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moecore.attacks.base import Attack, seed_generator_per_image
from moecore.core import routing_records, streams
from moecore.nn import predict
from moecore.tasks.base import Task

Precision = Literal["float32", "bfloat16"]


class Target(NamedTuple):
    """A model in evaluation mode, and the images and labels that it is attacked on."""

    model: nn.Module
    task: Task
    images: Any  # (N, C, H, W) or volumes (N, C, D, H, W), uint8, or floating point in [0, 1]
    labels: Tensor  # (N, …), in the task's form
    batch: int  # images per forward pass; results depend on it only by rounding
    seed: int = 0  # of the random starts, with each image's index
    precision: Precision = "float32"  # of an attack's forward passes; scores are always fp32
    # (N,) bool: the images to attack, others stay clean. Ignored if images affect each other.
    only: Tensor | None = None
    people: np.ndarray | None = None  # (N,), the person of each image; None if unknown

    def first(self, number: int) -> "Target":
        """Return the target with the first ``number`` images only, all of them to be attacked."""
        people = None if self.people is None else self.people[:number]
        images, labels = self.images[:number], self.labels[:number]
        return self._replace(images=images, labels=labels, only=None, people=people)

    def clean_images(self) -> Tensor:
        """Return the images, fp32 (N, C, H, W) in [0, 1], on the CPU."""
        return torch.cat(list(predict.image_batches(self.images, self.batch)))

    def attacked(self, attack: Attack, epsilon: float) -> Tensor:
        """Return adversarial images, fp32 (N, C, H, W) in [0, 1], on the CPU.

        Model and global random state do not change. Batches have ``attack.together`` or ``batch``
        images, rounded to a multiple of the number of images that share an expert's capacity.
        """
        size = predict.round_batch_to_groups(self.model, attack.together or self.batch)
        model = BFloat16Model(self.model) if self.precision == "bfloat16" else self.model
        device = predict.model_device(model)
        options = {}
        if attack.packs:
            options = {"batch": size}
            size = len(self.labels)
        is_attacked = self.only
        if is_attacked is None or attack.together or predict.coupled_image_count(self.model) > 1:
            is_attacked = torch.ones(len(self.labels), dtype=torch.bool)
        batches = []
        first = 0
        with predict.eval_mode(self.model):
            for pixels in predict.image_batches(self.images, size):
                places = is_attacked[first : first + len(pixels)].nonzero()[:, 0]
                indices = (first + places).tolist()
                first += len(pixels)
                if indices:
                    clean = pixels[places].to(device)
                    labels = self.labels[indices].to(device)
                    draws = seed_generator_per_image(self.seed, indices)
                    changed = attack(model, self.task, clean, labels, epsilon, draws, **options)
                    pixels = pixels.index_copy(0, places, changed.cpu())
                batches.append(pixels)
        return torch.cat(batches)

    def predict_images(
        self, images: predict.ImageSequence
    ) -> tuple[Tensor, tuple[routing_records.RoutingRecord, ...]]:
        """Return the model's predictions (N, K) and routing records of ``images``, in fp32."""
        return predict.predict_in_batches(self.model, images, self.batch)

    def scores(self, images: predict.ImageSequence) -> Tensor:
        """Return the task's score of ``images`` (N, C, H, W) with the target's labels, (N,)."""
        prediction, _ = predict.predict_in_batches(self.model, images, self.batch, routing=False)
        return self.task.scores(prediction, self.labels)

    def worse_scores(self, images: predict.ImageSequence) -> Tensor:
        """Return the worse of each image's scores, clean and as in adversarial ``images``, (N,)."""
        # The clean image lies in every ball, so an attack that improves a score has no effect.
        return self.task.worse_scores(self.scores(self.images), self.scores(images))


class BFloat16Model(nn.Module):
    """A model with bf16 passes where autocast allows it; routers and logits stay fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.image = getattr(model, "image", None)  # ``changeable_pixels`` reads it

    def forward(self, images: Tensor) -> routing_records.ModelOutput:
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            output = self.model(images)
        return output._replace(prediction=output.prediction.float())


def draw_image_indices(total: int, number: int, seed: int) -> np.ndarray:
    """Return ``number`` different random indices below ``total``, sorted; all if fewer exist."""
    generator = np.random.default_rng(streams.derived_seed("attacked_images", seed))
    return np.sort(generator.permutation(total)[:number])
