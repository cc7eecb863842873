"""What the attacks of the package pyautoattack (Croce & Hein's own code) share.

Two traps of the package are avoided by calling its single runs: ``perturb`` returns the *clean* image where it did not break
one, and with ``best_loss`` ignores its seed. Here the start is drawn image by image from our generators, so that no result depends on the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moecore.attacks.draws import Generators, one_each
from moecore.attacks.gradient import clean, frozen_parameters
from moecore.config import Config
from moecore.files import StageError
from moecore.records import real


class ReferenceAttack(Config):
    """An attack that the package runs; its parts define ``perturbed``."""

    @property
    def together(self) -> int | None:
        """None: no image matters to another."""
        return None

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, generator: Generators = None) -> Tensor:
        """Adversarial images (B, C, H, W), fp32, detached, in [0, 1], of images (B, C, H, W) in [0, 1] and classes (B,).

        epsilon: radius of the L∞ ball, in pixel units; generator: on the CPU, one for all images or one each.
        Raises StageError for multi-label images and for real labels, which the package does not know, and ValueError as the
        gradient attacks do.
        """
        centre = clean(images, epsilon)
        if real(labels):
            raise StageError(f"attack: {self.kind} needs classes, and these labels are real numbers; choose fgsm, pgd or apgd with objective task")
        if labels.ndim != 1:
            raise StageError(f"attack: {self.kind} needs one label per image, and these have several; choose apgd with objective task")
        if epsilon == 0 or not len(centre):
            return centre
        with frozen_parameters(model), _undisturbed(centre):
            found = self.perturbed(lambda pixels: model(pixels).prediction.float(), centre, labels.long(), epsilon, one_each(generator, len(centre)))
        return found.detach()

    def perturbed(
        self, logits: Callable[[Tensor], Tensor], centre: Tensor, labels: Tensor, epsilon: float, generator: Sequence[torch.Generator] | None
    ) -> Tensor:
        """The attack itself, ε > 0; ``logits`` maps images to (B, K)."""
        raise NotImplementedError(f"{type(self).__name__} defines no attack")


@contextmanager
def _undisturbed(images: Tensor) -> Iterator[None]:
    """The package draws from the global generators: they are as before afterwards. Autocast is off."""
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []), torch.autocast(images.device.type, enabled=False):
        yield
