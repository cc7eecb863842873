"""The pixels of a view from its affine: a gather on the pixel grid, else grid_sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from moecore.data.files.decode import resize_centre_square
from moecore.data.views.warping import invert_affines, translation_affines


def to_device_async(values: Tensor, device: torch.device) -> Tensor:
    """Copy small CPU values to the device without making the host wait."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def warp_images(images: Tensor, affines: Tensor, size: tuple[int, int], fill: str) -> Tensor:
    """Bilinear views fp32 (B, C, h, w) in 0..255 of uint8 images; affines fp64 (B, 3, 3), CPU.

    Outside the image: 0 (zeros), the nearest pixel (border) or the mirrored image (reflection).
    Strong shrinking is not smoothed.
    """
    height, width = images.shape[-2:]
    # view (column, row, 1) → original (column, row)
    back = invert_affines(affines)[:, :2].flip(1)[:, :, [1, 0, 2]]
    half_view = torch.tensor(
        [[size[1] / 2, 0, size[1] / 2], [0, size[0] / 2, size[0] / 2], [0, 0, 1]],
        dtype=torch.float64,
    )
    half = torch.tensor([width / 2, height / 2], dtype=torch.float64)
    theta = (back @ half_view) / half[:, None]
    theta[:, :, 2] -= 1
    grid = F.affine_grid(
        to_device_async(theta.to(torch.float32), images.device),
        [len(images), 1, *size],
        align_corners=False,
    )
    return F.grid_sample(
        images.to(torch.float32), grid, mode="bilinear", padding_mode=fill, align_corners=False
    )


@dataclass(frozen=True)
class MixedSizeImageList:
    """Images of different shapes, uint8 (H, W, C) each, that are still on the CPU."""

    images: list[np.ndarray]
    size: int  # height and width of a view whose settings name none
    device: torch.device  # of the views

    def __len__(self) -> int:
        return len(self.images)

    @property
    def extents(self) -> tuple[Tensor, Tensor]:
        """Heights and widths, fp64 (B,) each."""
        sizes = torch.tensor([image.shape[:2] for image in self.images], dtype=torch.float64)
        return sizes[:, 0], sizes[:, 1]

    def squares(self) -> Tensor:
        """Their largest centre squares, resized: uint8 (B, C, size, size) on the device."""
        squares = [
            resize_centre_square(Image.fromarray(one.squeeze()), self.size) for one in self.images
        ]
        return to_device_async(torch.from_numpy(np.stack(squares)), self.device).permute(0, 3, 1, 2)


def image_and_view_sizes(
    images: Tensor | MixedSizeImageList,
) -> tuple[Sequence[int] | tuple[Tensor, Tensor], tuple[int, int]]:
    """Heights and widths of the images, and of their views."""
    if isinstance(images, MixedSizeImageList):
        return images.extents, (images.size, images.size)
    height, width = images.shape[2:]
    return (height, width), (height, width)


def warp_uneven_images(
    images: MixedSizeImageList, affines: Tensor, size: tuple[int, int], fill: str
) -> Tensor:
    """Warp images of different shapes as ``warp_images`` does; on their device.

    What the views reach of each image is cut out first, and that alone is sent to the device.
    """
    parts, moved = crop_images_to_views(images, affines, size, fill)
    pixels = to_device_async(parts, images.device).permute(0, 3, 1, 2).contiguous()
    return warp_images(pixels, moved, size, "zeros")


def crop_images_to_views(
    images: MixedSizeImageList, affines: Tensor, size: tuple[int, int], fill: str
) -> tuple[Tensor, Tensor]:
    """Return what views of ``size`` reach of each image, with what ``fill`` puts around it, uint8
    (B, H, W, C) on the CPU, pinned beside a GPU; and the affines (B, 3, 3) from there to the views.
    """
    corners = torch.tensor([[0, 0, size[0], size[0]], [0, size[1], 0, size[1]], [1, 1, 1, 1]])
    reached = (invert_affines(affines) @ corners.to(torch.float64))[:, :2]
    low = reached.amin(-1).floor().to(torch.int64) - 1  # a pixel more, for the interpolation
    high = reached.amax(-1).ceil().to(torch.int64) + 1
    tall, wide = (high - low).amax(0).tolist()
    channels = images.images[0].shape[-1]
    pinned = images.device.type == "cuda"
    cut = torch.zeros(len(images), tall, wide, channels, dtype=torch.uint8, pin_memory=pinned)
    for image, place, first, last in zip(
        images.images, cut.numpy(), low.tolist(), high.tolist(), strict=True
    ):
        _cut_part(image, place, first, last, fill)
    return cut, affines @ translation_affines(low[:, 0], low[:, 1], len(images))


def _cut_part(
    image: np.ndarray, place: np.ndarray, first: list[int], last: list[int], fill: str
) -> None:
    """Rows and columns from ``first`` to ``last`` of an image (H, W, C), into ``place``."""
    if fill == "zeros":
        begin = np.clip(first, 0, image.shape[:2])
        end = np.clip(last, 0, image.shape[:2])
        to = [slice(a - f, b - f) for a, b, f in zip(begin, end, first, strict=True)]
        place[to[0], to[1]] = image[begin[0] : end[0], begin[1] : end[1]]
        return
    rows, columns = (
        clamp_or_reflect_indices(torch.arange(a, b), length, fill).numpy()
        for a, b, length in zip(first, last, image.shape[:2], strict=True)
    )
    place[: len(rows), : len(columns)] = image[rows][:, columns]


def shift_and_flip(images: Tensor, shifts: Tensor, mirrored: Tensor, fill: str) -> Tensor:
    """Views uint8 moved by whole pixels (B, 2) int64, then mirrored where (B,) says so."""
    count, _, height, width = images.shape
    rows = torch.arange(height) - shifts[:, :1]
    columns = (
        torch.where(mirrored[:, None], torch.arange(width).flip(0), torch.arange(width))
        - shifts[:, 1:]
    )
    # Rows and columns go to the device, not their products: a hundredth of the bytes.
    down = to_device_async(clamp_or_reflect_indices(rows, height, fill), images.device)
    right = to_device_async(clamp_or_reflect_indices(columns, width, fill), images.device)
    flat = down[:, :, None] * width + right[:, None, :]
    index = flat.view(count, 1, -1).expand(-1, images.shape[1], -1)
    views = images.flatten(2).gather(2, index).view_as(images)
    if fill != "zeros" or not shifts.any():
        return views
    tall = to_device_async(in_range_mask(rows, height), images.device)
    wide = to_device_async(in_range_mask(columns, width), images.device)
    return views * (tall[:, :, None] & wide[:, None, :])[:, None]


def in_range_mask(index: Tensor, length: int) -> Tensor:
    """Return which indices are of 0 … length − 1."""
    return (index >= 0) & (index < length)


def clamp_or_reflect_indices(index: Tensor, length: int, fill: str) -> Tensor:
    """Bring indices back into 0..length−1 as grid_sample's padding modes do."""
    if fill != "reflection":
        return index.clamp(0, length - 1)
    folded = index.remainder(2 * length)
    return torch.minimum(folded, 2 * length - 1 - folded)
