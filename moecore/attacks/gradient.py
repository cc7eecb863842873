"""What every gradient attack shares: the gradient with respect to the images, and the set the images stay in.

B images, C channels, H × W pixels in [0, 1]; epsilon is in the same units (8/255, not 8).
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.files import StageError


def image_gradient(model, images: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the *summed* cross-entropy with respect to the images, in fp32.

    images: (B, C, H, W); labels: (B,).  Returns (B, C, H, W). Summed, so that an image's gradient does not depend on its
    batch. The parameters, their ``grad`` and ``requires_grad``, and the model's mode stay as they are.
    Raises StageError where the gradient is not finite: its sign would be meaningless.
    """
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        leaf = images.detach().float().requires_grad_(True)
        loss = cross_entropy(model(leaf).prediction.float(), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, leaf)
    if not torch.isfinite(gradient).all():
        value = float(loss.detach())
        raise StageError(f"attack: the loss ({value:.4g}) has a gradient that is not finite; look for NaN or infinity in the model's weights")
    return gradient


def clean(images: Tensor, epsilon: float) -> Tensor:
    """Check what an attack is given; return its own fp32 copy of the images.

    Raises ValueError for images that are not floating point in [0, 1], and for an epsilon below 0.
    """
    if not images.is_floating_point():
        raise ValueError(f"attack: images are {images.dtype}; floating point in [0, 1] is needed")
    if images.numel() and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(f"attack: images lie in [{images.min():.4g}, {images.max():.4g}]; [0, 1] is needed")
    if not epsilon >= 0:
        raise ValueError(f"attack: epsilon is {epsilon}; 0 or more is needed")
    return images.detach().to(torch.float32, copy=True)


def project(images: Tensor, centre: Tensor, epsilon: float) -> Tensor:
    """The nearest images inside the L∞ ball of radius epsilon around ``centre`` and inside [0, 1]; all (B, C, H, W)."""
    return images.clamp(centre - epsilon, centre + epsilon).clamp(0, 1)
