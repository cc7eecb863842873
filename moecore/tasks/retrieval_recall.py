"""Recall at k between images and captions in one space, both ways, with ties.

N images, C captions of each at most, d numbers of an embedding. Image sides are (N, d + 1), text
sides (N, C, d + 3): see moecore/tasks/image_text.py.
"""

import torch
from torch import Tensor

TIE = 1e-6  # cosines that differ by less are one: two orders of a sum round otherwise
CHUNK = 2**24  # numbers of a similarity matrix at a time
MARKS = 2  # numbers behind an embedding that tell captions apart


def missing_caption_mask(texts: Tensor) -> Tensor:
    """Return which text sides (…, d + 3) stand for no caption: bool (…)."""
    return texts[..., -MARKS - 1] == 0


def cosine_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """fp64 (N, n) of image sides (N, d + 1) and text sides (n, d + 3)."""
    left = torch.nn.functional.normalize(images[:, :-1].double(), dim=1)
    right = torch.nn.functional.normalize(texts[:, : -MARKS - 1].double(), dim=1)
    return left @ right.T


def similarity_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """(N, n) of image sides (N, d + 1) and text sides (n, d + 3): scale · cosine + bias."""
    return images @ texts[:, :-MARKS].T


def text_to_image_recall(images: Tensor, texts: Tensor, at: tuple[int, ...]) -> Tensor:
    """R@k of the captions (N, C, d + 3) of each image among all images (N, d + 1): (N, k) fp64,
    means over an image's captions.

    A tie counts for the share of its orders in which the image is among the first k.
    """
    number, captions = texts.shape[:2]
    flat = texts.flatten(0, 1)
    there = ~missing_caption_mask(flat)
    owner = torch.arange(number, device=flat.device).repeat_interleave(captions)
    rows = []
    for part, who in zip(
        flat.split(max(1, CHUNK // number)), owner.split(max(1, CHUNK // number)), strict=True
    ):
        cosines = cosine_matrix(images, part)  # (N, n)
        right = cosines.gather(0, who[None])[0]
        above = (cosines > right + TIE).sum(dim=0)
        level = ((cosines - right).abs() <= TIE).sum(dim=0) - 1
        rows.append(hit_probability_under_ties(above, level, torch.ones_like(level), at))
    each = torch.cat(rows).masked_fill(~there[:, None], 0.0).view(number, captions, len(at))
    return each.sum(dim=1) / there.view(number, captions).sum(dim=1, keepdim=True)


def image_to_text_recall(images: Tensor, texts: Tensor, at: tuple[int, ...]) -> Tensor:
    """R@k of each image (N, d + 1) among all captions (N, C, d + 3): (N, k) fp64; any of its
    captions counts. Ties as in ``text_to_image_recall``, of the nearest own captions.
    """
    number, captions = texts.shape[:2]
    flat = texts.flatten(0, 1)
    there = ~missing_caption_mask(flat)
    size = max(1, CHUNK // len(flat))
    hits = []
    for first in range(0, number, size):
        cosines = cosine_matrix(images[first : first + size], flat).masked_fill(~there, -2.0)
        rows = torch.arange(len(cosines), device=cosines.device)
        own = torch.zeros_like(cosines, dtype=torch.bool)
        for caption in range(captions):
            own[rows, (first + rows) * captions + caption] = True
        best = cosines.masked_fill(~own, -2.0).amax(dim=1, keepdim=True)
        above = (cosines > best + TIE).sum(dim=1)
        equal = (cosines - best).abs() <= TIE
        hits.append(
            hit_probability_under_ties(
                above, (equal & ~own).sum(dim=1), (equal & own).sum(dim=1), at
            )
        )
    return torch.cat(hits)


def hit_probability_under_ties(
    above: Tensor, others: Tensor, own: Tensor, at: tuple[int, ...]
) -> Tensor:
    """Return the share of a tie's orders in which one of its right answers is among the first k:
    (n, k) fp64; 1 − C(others, r)/C(others + own, r) with r = k − above places for the tie.

    above: (n,), answers before the tie; others and own: (n,), wrong and right answers in it.
    """
    places = torch.tensor(at, dtype=torch.float64, device=above.device)
    room = places[None, :] - above.double()[:, None]
    share = torch.zeros_like(room)
    for right in range(1, int(own.max()) + 1):
        more = (room / (others.double()[:, None] + right)).clamp(0.0, 1.0)
        share += (1 - share) * more * (own >= right)[:, None]
    return share
