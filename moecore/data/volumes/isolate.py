"""Volumes that keep one tissue only."""

from torch import Tensor


def isolate(volumes: Tensor, share: Tensor) -> Tensor:
    """Volumes (B, C, D, H, W) in [0, 1] times the share (B, D, H, W) of a tissue, uint8 0 … 255 for
    0 … 1, in the volumes' dtype.
    """
    return volumes * (share.unsqueeze(1).to(volumes.dtype) / 255)
