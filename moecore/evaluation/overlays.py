"""Which expert sees which patch: the routing of a few images as small grids of expert indices."""

import base64
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moecore.files import StageError
from moecore.records import Layout, RoutingRecord

PREFIX = 2  # at most a class token and a distillation token stand before the patches


def overlays(images: np.ndarray, records: tuple[RoutingRecord, ...]) -> dict[str, Any]:
    """The images and, per layer and image, the grid of the experts with the largest combine weight, ready for JSON.

    images: (N, C, H, W) uint8; records: fields (N, T, E), T a square number of patches after at most two prefix tokens.
    Returns {"shape": [N, C, H, W], "pixels": base64 of the bytes, "experts": E, "grids": [layer][image] → rows of text,
    one index a patch, "-" where no expert processed it}.  Raises StageError where the patches form no square grid.
    """
    return _stored(images, records, [_grids(record) for record in records] if len(images) else [])


def mid_slices(volumes: np.ndarray, records: tuple[RoutingRecord, ...], layout: Layout) -> dict[str, Any]:
    """``overlays`` of volumes: the middle axial slice of each, and the experts of the patches that it cuts.

    volumes: (N, C, D, H, W) in [0, 1], axes right, anterior, superior; records: fields (N, T, E) of tokens that lie as ``layout`` says.
    The slice lies in the patches' middle row along the last axis and is turned so that anterior is up and right is right.
    """
    row, depth = layout.grid[2] // 2, layout.size[2] // layout.grid[2]
    slices = volumes[..., row * depth + depth // 2]
    images = np.rint(np.clip(np.asarray(slices, np.float32), 0, 1) * 255).astype(np.uint8)
    grids = [_best(record.combine[:, layout.special :]).reshape(-1, *layout.grid)[..., row].numpy() for record in records]
    return _stored(_turned(images), records, [_turned(grid) for grid in grids])


def _turned(planes: np.ndarray) -> np.ndarray:
    """(…, right, anterior) to rows from anterior down and columns from left to right."""
    return np.ascontiguousarray(planes.swapaxes(-1, -2)[..., ::-1, :])


def _stored(images: np.ndarray, records: tuple[RoutingRecord, ...], found: list[np.ndarray]) -> dict[str, Any]:
    grids = [[_rows(grid) for grid in layer] for layer in found] if len(images) else []
    pixels = base64.b64encode(np.ascontiguousarray(images).tobytes()).decode()
    return {"shape": list(images.shape), "pixels": pixels, "experts": records[0].combine.shape[-1] if records else 0, "grids": grids}


def pixels_of(stored: dict[str, Any]) -> np.ndarray:
    """The images (N, C, H, W) uint8 that ``overlays`` stored."""
    return np.frombuffer(base64.b64decode(stored["pixels"]), np.uint8).reshape(stored["shape"])


def grid_of(rows: list[str]) -> np.ndarray:
    """Expert indices (rows, columns) of one stored grid; −1 where no expert processed the patch."""
    return np.array([[-1 if cell == "-" else int(cell) for cell in row.split()] for row in rows])


def _grids(record: RoutingRecord) -> np.ndarray:
    """(N, rows, columns) expert index of each patch, −1 for none."""
    weights = record.combine
    tokens = weights.shape[1]
    side = math.isqrt(tokens)
    if tokens - side * side > PREFIX:
        raise StageError(f"routing: {tokens} tokens are no square grid of patches after at most {PREFIX} other tokens; set routing.overlays to 0")
    return _best(weights)[:, tokens - side * side :].reshape(-1, side, side).numpy()


def _best(weights: Tensor) -> Tensor:
    """The expert of the largest of the weights (N, T, E), −1 where all are 0; (N, T)."""
    return torch.where(weights.amax(-1) > 0, weights.argmax(-1), -1)


def _rows(grid: np.ndarray) -> list[str]:
    return [" ".join("-" if cell < 0 else str(cell) for cell in row) for row in grid]
