"""Pictures with the experts of their patches, and corresponding patches of two crops."""

import base64
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from moecore.core.arrays_as_text import decode_compressed_text, encode_concatenated_arrays
from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord, TokenLayout
from moecore.data.prepared import evenly_spaced_indices
from moecore.data.views.views import CropRanges, ViewSettings
from moecore.measure.routing_metrics.two_view_agreement import TwoViewAugmentation, draw_two_views
from moecore.nn.correspondence import match_patches

SIDE = 96  # pixels; larger images are shrunk
CROP = 24  # the same for a patch with its surroundings
MODES = {2: "area", 3: "trilinear"}  # by number of axes


class EncodedImages(Config):
    """Images or volumes with one byte per pixel; the last axis is the fastest."""

    shape: tuple[int, ...]  # (N, C, H, W) or (N, C, D, H, W)
    pixels: str  # encoded by ``core.arrays_as_text.encode_concatenated_arrays``

    def array(self) -> np.ndarray:
        """Return the pixels, uint8 of this shape."""
        return np.frombuffer(decode_compressed_text(self.pixels), np.uint8).reshape(self.shape)


def encode_thumbnails(pixels: Tensor, side: int = SIDE) -> EncodedImages:
    """Encode pixels in [0, 1], (N, C, *axes), as pictures with no axis above ``side``."""
    size = pixels.shape[2:]
    if max(size) > side:
        small = [max(1, round(length * side / max(size))) for length in size]
        pixels = interpolate(pixels, small, mode=MODES[len(size)])
    data = np.rint(pixels.clamp(0, 1).numpy() * 255).astype(np.uint8)
    return EncodedImages(shape=data.shape, pixels=encode_concatenated_arrays(data))


def patch_crop(image: Tensor, patch: int, layout: TokenLayout) -> Tensor:
    """Return a patch with half a patch on each side, black outside of the image; (C, h, w)."""
    # image: fp32 (C, H, W), or a volume (C, D, H, W) with axes right, anterior, superior: the axial
    # slice through the patch, anterior up. h and w are twice the patch's.
    position = [int(index) for index in np.unravel_index(patch, layout.grid)]
    sides = [size // patches for size, patches in zip(layout.size, layout.grid, strict=True)]
    if image.ndim == 4:
        level = position[2] * sides[2] + sides[2] // 2
        image = image[..., level].transpose(1, 2).flip(1)
        position = [layout.grid[1] - 1 - position[1], position[0]]
        sides = [sides[1], sides[0]]
    margins = [side // 2 for side in sides]
    padded = torch.nn.functional.pad(image, (margins[1], margins[1], margins[0], margins[0]))
    top, start = (index * side for index, side in zip(position, sides, strict=True))
    height, width = (side + 2 * margin for side, margin in zip(sides, margins, strict=True))
    return padded[:, top : top + height, start : start + width]


# Stronger crops than in our trainings, so that the picture has patches without a partner.
CROPS = TwoViewAugmentation(name="crops", views=ViewSettings(crop=CropRanges(scale=(0.3, 0.8))))
PREFIX = 2  # largest number of tokens before the patches: class token and distillation token


class Overlays(Config):
    """A few images, with the expert of the largest combine weight for each patch."""

    shape: tuple[int, int, int, int]  # (N, C, H, W)
    pixels: str  # base64 of the bytes
    experts: int  # 0 for a dense model
    grids: tuple[tuple[tuple[str, ...], ...], ...]
    """[layer][image]: rows of text, one index a patch, "-" where no expert processed it."""

    def images(self) -> np.ndarray:
        """Return the images, uint8 (N, C, H, W)."""
        return np.frombuffer(base64.b64decode(self.pixels), np.uint8).reshape(self.shape)


class MatchedCrops(Config):
    """Two random crops of one image; corresponding patches have the same number (PRC, figure 4)."""

    views: EncodedImages  # (2, C, h, w), the crop of higher resolution first
    numbers: tuple[tuple[str, ...], tuple[str, ...]]
    """Rows of text as in Overlays: the index of the patch in the second view, "-": no partner."""


def overlapping_crops(images: np.ndarray, layout: TokenLayout, seed: int) -> MatchedCrops | None:
    """Return two random crops of the first image whose crops share half of its patches."""
    # Without such an image: of the one whose crops share most. images: uint8 (N, C, H, W), N ≥ 1.
    # None for volumes and for images of a single patch.
    if images.ndim != 4 or math.prod(layout.grid) == 1:
        return None
    number = len(images)
    views = draw_two_views(images, CROPS, seed)
    pairs = match_patches(views.affines[:number], views.affines[number:], layout)
    enough = math.prod(layout.grid) // 2
    chosen = int(pairs.mask.sum(dim=1).clamp(max=enough).numpy().argmax())
    index = torch.where(pairs.mask[chosen], pairs.index[chosen], -1)
    second = torch.full_like(index, -1)
    second[index[index >= 0]] = index[index >= 0]
    both = views.images[[chosen, number + chosen]]
    if pairs.swapped[chosen]:
        both = both.flip(0)
    grids = (numbers.reshape(layout.grid).numpy() for numbers in (index, second))
    return MatchedCrops(
        views=encode_thumbnails(both), numbers=tuple(tuple(_grid_rows(grid)) for grid in grids)
    )


def encode_expert_overlays(images: np.ndarray, records: tuple[RoutingRecord, ...]) -> Overlays:
    """Return the images (N, C, H, W) uint8 with each patch's expert of the largest weight."""
    # records: fields (N, T, E), T a square number of patches after at most two other tokens.
    grids = []
    for record in records if len(images) else ():
        tokens = record.combine.shape[1]
        side = math.isqrt(tokens)
        if tokens - side * side > PREFIX:
            raise UserError(
                f"routing: {tokens} tokens are no square grid of patches after at most {PREFIX} "
                "other tokens; set routing.overlays to 0"
            )
        best = _best_experts(record.combine)[:, tokens - side * side :]
        grids.append(best.reshape(-1, side, side).numpy())
    return _encode_overlays(images, records, grids)


def overlay_middle_slices(
    volumes: np.ndarray, records: tuple[RoutingRecord, ...], layout: TokenLayout
) -> Overlays:
    """Return ``encode_expert_overlays`` of middle axial slices, anterior up, right on the right."""
    # volumes: (N, C, D, H, W) in [0, 1], axes right, anterior, superior; records: fields (N, T, E).
    row = layout.grid[2] // 2
    depth = layout.size[2] // layout.grid[2]
    slices = volumes[..., row * depth + depth // 2]
    images = np.rint(np.clip(np.asarray(slices, np.float32), 0, 1) * 255).astype(np.uint8)
    grids = []
    for record in records:
        best = _best_experts(record.combine[:, layout.special :]).reshape(-1, *layout.grid)
        grids.append(_upright_planes(best[..., row].numpy()))
    return _encode_overlays(_upright_planes(images), records, grids)


def evenly_spaced_overlays(
    images: np.ndarray, records: tuple[RoutingRecord, ...], number: int, layout: TokenLayout
) -> Overlays:
    """Return ``number`` images, evenly spread, with their patches' experts; of volumes, a slice."""
    indices = evenly_spaced_indices(len(images), number) if number else np.array([], int)
    few = tuple(layer.map_tensors(lambda field: field[indices]) for layer in records)
    if images.ndim == 5:
        return overlay_middle_slices(images[indices], few, layout)
    if images.ndim == 3:  # text, with ``number`` 0
        images = images[:, :, None]  # (N, C, 1, M)
    return encode_expert_overlays(images[indices], few)


def _upright_planes(planes: np.ndarray) -> np.ndarray:
    """Turn planes (…, right, anterior) to rows from anterior down, columns from left to right."""
    return np.ascontiguousarray(planes.swapaxes(-1, -2)[..., ::-1, :])


def _encode_overlays(
    images: np.ndarray, records: tuple[RoutingRecord, ...], grids: list[np.ndarray]
) -> Overlays:
    return Overlays(
        shape=images.shape,
        pixels=base64.b64encode(np.ascontiguousarray(images).tobytes()).decode(),
        experts=records[0].combine.shape[-1] if records else 0,
        grids=[[_grid_rows(grid) for grid in layer] for layer in grids] if len(images) else [],
    )


def parse_expert_grid(rows: Sequence[str]) -> np.ndarray:
    """Return expert indices (rows, columns) of a grid of ``Overlays``; −1: none processed it."""
    return np.array([[-1 if cell == "-" else int(cell) for cell in row.split()] for row in rows])


def _best_experts(weights: Tensor) -> Tensor:
    """Return each token's expert of largest weight, (N, T), −1 if all are 0; weights: (N, T, E)."""
    return torch.where(weights.amax(-1) > 0, weights.argmax(-1), -1)


def _grid_rows(grid: np.ndarray) -> list[str]:
    return [" ".join("-" if cell < 0 else str(cell) for cell in row) for row in grid]
