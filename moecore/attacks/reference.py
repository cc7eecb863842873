"""What the attacks of the package pyautoattack (Croce & Hein's own code) share.

Two traps of the package are avoided by calling its single runs: ``perturb`` returns the *clean*
image where it did not break one, and with ``best_loss`` ignores its seed. Here the start is drawn
image by image from our generators, so that no result depends on the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moecore.attacks.base import AttackBase, Generators, one_each
from moecore.attacks.gradient import clean, frozen_parameters
from moecore.core.files import UserError
from moecore.tasks.base import Task


class ReferenceAttack(AttackBase):
    """An attack that the package runs; its parts define ``perturbed``."""

    def refuses(self, task: Task) -> str | None:
        # The package knows one class an image and nothing else.
        if reason := task.needs_classes("classes"):
            return f"{self.kind} needs classes, and {reason}"
        if reason := task.needs_classes("one_class"):
            return f"{self.kind} needs one label per image, and {reason}"
        return None

    def __call__(
        self,
        model: nn.Module,
        task: Task,
        images: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: Generators = None,
    ) -> Tensor:
        """Adversarial images (B, C, H, W), fp32, detached, in [0, 1].

        images: (B, C, H, W) in [0, 1]; labels: classes (B,); epsilon: radius of the L∞ ball, in
        pixel units; generator: on the CPU, one for all images or one each. Raises UserError for a
        task that ``refuses`` names, and ValueError as the gradient attacks do.
        """
        centre = clean(images, epsilon)
        if reason := self.refuses(task):
            raise UserError(f"attack: {reason}; choose fgsm, pgd or apgd with objective task")
        if epsilon == 0 or not len(centre):
            return centre
        with frozen_parameters(model), _undisturbed(centre):
            made = self.perturbed(
                lambda pixels: model(pixels).prediction.float(),
                centre,
                labels.long(),
                epsilon,
                one_each(generator, len(centre)),
            )
        return made.detach()

    def perturbed(
        self,
        logits: Callable[[Tensor], Tensor],
        centre: Tensor,
        labels: Tensor,
        epsilon: float,
        generator: Sequence[torch.Generator] | None,
    ) -> Tensor:
        """The attack itself, ε > 0; ``logits`` maps images to (B, K)."""
        raise NotImplementedError(f"{type(self).__name__} defines no attack")


@contextmanager
def _undisturbed(images: Tensor) -> Iterator[None]:
    """The package draws from the global generators: they are as before afterwards. No autocast."""
    devices = [images.device] if images.is_cuda else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.autocast(images.device.type, enabled=False),
    ):
        yield
