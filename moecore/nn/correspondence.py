"""Match tokens of two views of an image (PRC, §III-C), and of teacher and student."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.routing_records import TokenLayout
from moecore.core.torch_internals import assert_async

# relative difference of resolutions that counts as rounding: rotated and mirrored views tie
TOLERANCE = 1e-5
MIN_DETERMINANT = 1e-6  # of an invertible affine: |det| relative to ‖linear part‖^D


class PatchPartners(NamedTuple):
    """For each patch of image 1 (the view with higher resolution), the nearest patch of image 2."""

    index: Tensor  # (B, P) int64, a patch of image 2; 0 if not found
    mask: Tensor  # (B, P) bool: whether it was found
    swapped: Tensor  # (B,) bool: image 1 is the second view


class TokenPairs(NamedTuple):
    """T' pairs of tokens per image, special tokens last: indices into the 2B·T tokens of views."""

    first: Tensor  # (B, T') int64
    second: Tensor  # (B, T') int64; arbitrary if not found
    mask: Tensor  # (B, T') bool: whether it was found


def match_patches(affines_1: Tensor, affines_2: Tensor, layout: TokenLayout) -> PatchPartners:
    """Map each patch centre of image 1 by R₂ · R₁⁻¹ to image 2; return the nearest patch there."""
    # affines_1, affines_2: R (B, D+1, D+1) of both views, original to view, D axes (PRC, §III-C).
    first = affines_1.double()
    second = affines_2.double()
    _check_affine_shapes(first, second, layout)
    # Image 1 is the view with the larger |det|: views have equal sizes, so it is the smaller crop.
    # Ties keep the order.
    areas = _view_magnification(first, 1), _view_magnification(second, 2)
    swapped = areas[1] > areas[0] * (1 + TOLERANCE)
    swap = swapped[:, None, None]
    fine = torch.where(swap, second, first)
    # inv_ex: plain inv would make the host wait for the device
    transform = torch.where(swap, first, second) @ torch.linalg.inv_ex(fine).inverse
    # A centre on the border of two patches gets the patch with the higher index.
    return PatchPartners(*_patches_at_mapped_centres(transform, layout), swapped)


def original_patches_of_views(affines: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """Return the original image's patch at each patch centre of a view, and whether it exists."""
    # Both (B, P), int64 and bool. affines: (B, D+1, D+1), original to view.
    views = affines.double()
    _check_affine_shapes(views, views, layout)
    _view_magnification(views, 1)
    return _patches_at_mapped_centres(torch.linalg.inv_ex(views).inverse, layout)


def pair_view_tokens(affines: Tensor, layout: TokenLayout, special: bool) -> TokenPairs:
    """Return the pairs of tokens that show the same patch in the two views of each image."""
    # affines: (2B, D+1, D+1), first B = view 1, last B = view 2.
    if len(affines) % 2:
        raise UserError.at("correspondence", found=f"{len(affines)} affines", allowed="2 per image")
    count = len(affines) // 2
    index, inside, swapped = match_patches(affines[:count], affines[count:], layout)
    patches = torch.arange(index.shape[1], device=index.device)
    # each special token is paired with itself
    number = layout.special if special else 0
    special_tokens = torch.arange(number, device=index.device).expand(count, -1)
    tokens = layout.special + index.shape[1]
    image = torch.arange(count, device=index.device)
    sides = (swapped.long(), (~swapped).long())
    start_1, start_2 = ((image + count * side)[:, None] * tokens for side in sides)
    view_patches = (layout.special + patches).expand(count, -1)
    first = torch.cat([view_patches, special_tokens], dim=1) + start_1
    second = torch.cat([layout.special + index, special_tokens], dim=1) + start_2
    always = torch.ones_like(special_tokens, dtype=torch.bool)
    return TokenPairs(first, second, torch.cat([inside, always], dim=1))


def token_pairs_by_layer(
    affines: Tensor, layouts: Sequence[TokenLayout], special: bool
) -> list[tuple[TokenPairs, TokenLayout]]:
    layout_pairs = {layout: pair_view_tokens(affines, layout, special) for layout in set(layouts)}
    return [(layout_pairs[layout], layout) for layout in layouts]


def values_of_pairs(
    values: Tensor, pairs: TokenPairs, layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """Select values (2B, T, E) at the first and second token of each pair: two (B, T', E)."""
    tokens = layout.special + prod(layout.grid)
    if values.shape[:2] != (2 * len(pairs.first), tokens):
        raise UserError.at(
            "correspondence",
            found=f"values of shape {tuple(values.shape)} (views, tokens, experts)",
            allowed=f"({2 * len(pairs.first)}, {tokens}, …)",
        )
    flat = values.flatten(0, 1)
    # plain indexing: its gradient is deterministic on every device
    return flat[pairs.first], flat[pairs.second]


def add_distillation_token_probs(teacher: Tensor, student: torch.Size) -> Tensor:
    """Return the teacher's probs in shape ``student``; a distillation token gets CLS's probs."""
    batch, tokens, experts = student
    if teacher.shape == student:
        return teacher
    if teacher.shape == (batch, tokens - 1, experts):
        # a student's distillation token, after CLS, gets the teacher's CLS
        return torch.cat([teacher[:, :1], teacher], dim=1)
    raise UserError(
        f"teacher guidance: the teacher's routing has shape {tuple(teacher.shape)} (images, "
        f"tokens, experts), the student's {tuple(student)}; images and experts must be equal, and "
        "the teacher's tokens equal or one fewer (the distillation token): check patch and image "
        "size"
    )


def _check_affine_shapes(first: Tensor, second: Tensor, layout: TokenLayout) -> None:
    side = len(layout.grid) + 1
    if first.shape != second.shape or first.shape[1:] != (side, side):
        raise UserError.at(
            "correspondence",
            found=f"affines of shape {tuple(first.shape)} and {tuple(second.shape)}",
            allowed=f"equal shapes (images, {side}, {side}) for a grid of {len(layout.grid)} axes",
        )


def _view_magnification(affines: Tensor, view: int) -> Tensor:
    """Return view pixels per original pixel, |det| of each affine (B,); UserError if 0."""
    linear = affines[:, :-1, :-1]
    expansion = torch.linalg.det(linear).abs()
    finite = affines.flatten(1).isfinite().all(dim=1)
    limit = MIN_DETERMINANT * linear.flatten(1).norm(dim=1) ** linear.shape[1]
    is_invertible = (expansion > limit) & finite
    if affines.device.type != "cpu":
        # reading it here would make the host wait
        assert_async(is_invertible.all(), "correspondence: an affine is singular")
    elif not is_invertible.all():
        image = int((~is_invertible).nonzero()[0])
        raise UserError(
            f"correspondence: the affine of view {view} of image {image} is singular: "
            f"{affines[image].tolist()}; allowed: invertible maps"
        )
    return expansion


def _patches_at_mapped_centres(affines: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """Map patch centres by affines; return the patch (B, P) there, and whether it exists."""
    sides = [size / patches for size, patches in zip(layout.size, layout.grid, strict=True)]
    axes = [
        (torch.arange(patches, device=affines.device, dtype=torch.float64) + 0.5) * side
        for patches, side in zip(layout.grid, sides, strict=True)
    ]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    places = centres @ affines[:, :-1, :-1].mT + affines[:, None, :-1, -1]
    index = torch.zeros((), dtype=torch.int64, device=affines.device)
    inside = torch.ones((), dtype=torch.bool, device=affines.device)
    for axis, (patches, side) in enumerate(zip(layout.grid, sides, strict=True)):
        place = places[..., axis]
        inside = (place >= 0) & (place < layout.size[axis]) & inside
        index = index * patches + (place / side).floor().clamp(0, patches - 1).long()
    return torch.where(inside, index, 0), inside
