"""Base of attacks that seek a misclassified image, in trials on the images that survived so far."""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moecore.attacks import base, gradient
from moecore.core.config import Misfits, Surroundings
from moecore.core.files import UserError
from moecore.nn import predict
from moecore.tasks.base import Task


class Victims(NamedTuple):
    """The model, and a batch of images that it still classifies correctly."""

    model: nn.Module
    ball: base.Ball
    labels: Tensor  # (B,)
    others: Tensor  # (B, K − 1), other classes of the clean images, the most likely first
    generators: base.ImageGenerators

    def take(self, rows: Tensor) -> "Victims":
        generators = self.generators
        if generators is not None:
            generators = [generators[row] for row in rows.tolist()]
        labels, rivals = self.labels[rows], self.others[rows]
        return Victims(self.model, self.ball.take(rows), labels, rivals, generators)

    def are_wrong(self, images: Tensor) -> Tensor:
        """Return whether the model misclassifies images (B, C, H, W), (B,)."""
        return gradient.predict_logits(self.model, images).argmax(dim=1) != self.labels


Trial = Callable[[Victims], Tensor]  # → attacked images (B, C, H, W), misclassified or not


class SurvivorAttack(base.BallAttack):
    """An attack that runs ``trials`` until an image is misclassified, or returns the clean one."""

    @property
    def packs(self) -> bool:
        return True

    @abstractmethod
    def trials(self, classes: int) -> list[Trial]:
        """Return searches, to run in turn on images still correct, for a number of ``classes``."""

    def why_too_few_classes(self, classes: int) -> str | None:
        """Return why the attack needs more classes, in words; None if it does not."""
        return None

    def why_pointless_for_model(self, model: nn.Module, images: Tensor) -> str | None:
        """Return why the attack is pointless, from the model's output for ``images``, or None."""
        return None

    def misfits(self, around: Surroundings) -> Misfits:
        """Yield (settings key, reason) if labels, classes or shape do not allow the attack."""
        yield from super().misfits(around)
        card = around.preview
        classes = len(card.classes or ()) if card is not None else 0
        if classes and (reason := self.why_too_few_classes(classes)):
            yield (), f"{reason} ({around.data})"
        if card is not None and len(card.shape) == 3:
            yield ("kind",), f"found {self.kind} for volumes; allowed: fgsm, pgd or apgd"

    def refuses(self, task: Task | type[Task]) -> str | None:
        if reason := task.needs_classes("classes") or task.needs_classes("one_class"):
            return f"{self.kind} needs one class per image, and {reason}"
        return None

    def does_not_apply(self, model: nn.Module, task: Task) -> str | None:
        if reason := self.refuses(task):
            return reason
        if predict.coupled_image_count(model) > 1:
            return "images share experts' capacity, so that survivors cannot be attacked alone"
        return self.why_too_few_classes(len(task.classes))

    def __call__(
        self,
        model: nn.Module,
        task: Task,
        images: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: base.Generators = None,
        batch: int = 250,  # images per pass
    ) -> Tensor:
        clean = self.check_and_copy_images(images, epsilon)
        if epsilon == 0 or not len(clean):
            return clean
        if reason := self.does_not_apply(model, task):
            raise UserError(f"attack: {reason}")
        if clean.ndim != 4:
            raise UserError.at("attack: images", found=tuple(clean.shape), allowed="(B, C, H, W)")
        if reason := self.why_pointless_for_model(model, clean[:batch]):
            raise UserError(f"attack: {reason}")
        attacked = clean.clone()
        with gradient.frozen_parameters(model):
            logits = torch.cat([gradient.predict_logits(model, few) for few in clean.split(batch)])
            classes = logits.shape[1]
            if reason := self.why_too_few_classes(classes):
                raise UserError(f"attack: {reason}")
            labels = labels.long()
            ball = base.Ball(clean, epsilon, self.norm, gradient.changeable_pixels(model, clean))
            rivals = gradient.other_classes_by_likelihood(logits, labels)
            generators = base.expand_generator_to_images(generator, len(clean))
            everything = Victims(model, ball, labels, rivals, generators)
            right = (logits.argmax(dim=1) == labels).nonzero()[:, 0]
            for trial in self.trials(classes):
                if not len(right):
                    break
                survivors = []
                for rows in right.split(batch):
                    victims = everything.take(rows)
                    changed = victims.ball.restore_fixed_pixels(trial(victims))
                    wrong = victims.are_wrong(changed)
                    attacked[rows[wrong]] = changed[wrong]
                    survivors.append(rows[~wrong])
                right = torch.cat(survivors)
        return attacked
