"""Small pictures of images and of their patches, for pages that show single images.

N images, C channels, H × W pixels.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from moecore.core.config import Config
from moecore.core.records import Layout
from moecore.core.tensors import packed, unpacked

SIDE = 96  # pixels: larger images are shown smaller
CROP = 24  # the same of a patch with what is around it
MODES = {2: "area", 3: "trilinear"}  # by number of axes


class Picture(Config):
    """Images or volumes with pixels of a byte; the last axis is the fastest."""

    shape: tuple[int, ...]  # (N, C, H, W) or (N, C, D, H, W)
    pixels: str  # as ``core.packed.packed`` writes them

    def array(self) -> np.ndarray:
        """The pixels, uint8 of this shape."""
        return np.frombuffer(unpacked(self.pixels), np.uint8).reshape(self.shape)


def picture(pixels: Tensor, side: int = SIDE) -> Picture:
    """pixels: fp32 in [0, 1], (N, C, H, W) or (N, C, D, H, W); no axis is longer than ``side``
    then.
    """
    small = shrunk(pixels, side)
    data = np.rint(small.clamp(0, 1).numpy() * 255).astype(np.uint8)
    return Picture(shape=data.shape, pixels=packed(data))


def shrunk(pixels: Tensor, side: int) -> Tensor:
    """The pixels with means over areas, so that the longest axis has ``side`` at most."""
    size = pixels.shape[2:]
    if max(size) <= side:
        return pixels
    wanted = [max(1, round(length * side / max(size))) for length in size]
    return interpolate(pixels, wanted, mode=MODES[len(size)])


def patch_crop(image: Tensor, patch: int, layout: Layout) -> Tensor:
    """A patch in the middle of half a patch on each side, black outside of the image; (C, h, w).

    image: fp32 (C, H, W), or a volume (C, D, H, W) with axes right, anterior, superior, of which
    the axial slice through the patch is taken, anterior up. h and w are twice the patch's.
    """
    place = [int(index) for index in np.unravel_index(patch, layout.grid)]
    sides = [size // patches for size, patches in zip(layout.size, layout.grid, strict=True)]
    if image.ndim == 4:
        level = place[2] * sides[2] + sides[2] // 2
        image = image[..., level].transpose(1, 2).flip(1)
        place = [layout.grid[1] - 1 - place[1], place[0]]
        sides = [sides[1], sides[0]]
    margins = [side // 2 for side in sides]
    around = torch.nn.functional.pad(image, (margins[1], margins[1], margins[0], margins[0]))
    top, left = (index * side for index, side in zip(place, sides, strict=True))
    height, width = (side + 2 * margin for side, margin in zip(sides, margins, strict=True))
    return around[:, top : top + height, left : left + width]
