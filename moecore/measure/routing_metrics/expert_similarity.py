"""How alike experts are: those of a layer on the same tokens, and those of two trainings.

Two trainings' experts are matched on some images and compared on others. N or B images, T tokens of
each, c of them kept, n tokens, E experts that are networks, d width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from math import ceil, comb
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from moecore.core.config import Config
from moecore.core.encoded_arrays import decode_compressed_text
from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.measure.routing_metrics.barred_experts import find_own_model
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import BATCH, ImageSequence
from moecore.statistics.crossed import linearize_ratio
from moecore.statistics.intervals import first_half, permuted_orders
from moecore.training.surgery.expert_reduction import compute_all_outputs, watch_layers

LEAST = 10  # tokens for each number of their width: CKA is near 1 for any two experts with few

NAMES = ("expert_cka", "expert_cosine")


class CountedImages:
    """Images (N, C, *pixels) that know where the batch that was read last begins."""

    def __init__(self, images: ImageSequence) -> None:
        self.images = images
        self.start = 0

    @property
    def shape(self) -> Sequence[int]:
        """Return N, C and the pixels."""
        return self.images.shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, places: slice) -> Any:
        self.start = places.start
        return self.images[places]


class KeptTokens(NamedTuple):
    """Tokens of all images as they came to one MoE layer."""

    layer: MoEFeedForward
    parts: list[Tensor]  # (B, c, d), the calls of its router

    @torch.no_grad()
    def outputs(self, images: int) -> list[Tensor]:
        """Return what each expert makes of the tokens of so many images, E times (N, c, d) fp64."""
        # a text is read with the blocks before its own, which are calls too: the last is its own
        calls = sum(map(len, self.parts)) // images
        tokens = torch.cat(self.parts[calls - 1 :: calls])
        rows = compute_all_outputs(self.layer, tokens.flatten(0, 1))
        return [one.double().view(tokens.shape) for one in rows]


@contextmanager
def keep_layer_tokens(model: Model, images: CountedImages) -> Iterator[dict[str, KeptTokens]]:
    """Inside the ``with``, where these images pass, keep some tokens of each MoE layer.

    c are as many as make LEAST · d of all images, or all; they are evenly spread in an image, and
    start one later in the next, whatever the batches; every BATCH images they start anew.
    """
    kept: dict[str, KeptTokens] = {}

    def keep(name: str, layer: MoEFeedForward, tokens: Tensor, record: RoutingRecord) -> None:
        batch, length, width = tokens.shape
        number = min(length, ceil(LEAST * width / len(images)))
        rows = torch.arange(batch, device=tokens.device).unsqueeze(-1)
        spread = torch.arange(number, device=tokens.device) * (length // number)
        first = (images.start + rows) % BATCH
        own = kept.setdefault(name, KeptTokens(layer, []))
        own.parts.append(tokens[rows, (first + spread) % length])

    with watch_layers(find_own_model(model), keep):
        yield kept


class Similarity(NamedTuple):
    """Of all pairs of experts; NaN beside an expert that says the same of all tokens."""

    cka: Tensor  # (E, E) fp64
    cosine: Tensor  # (E, E) fp64
    by_image: dict[str, np.ndarray]  # NAMES → mean over the pairs that have one, (N,)
    chances: dict[str, float]  # where one of a pair reads another image's, or person's, tokens


def expert_similarity(
    outputs: Sequence[Tensor], people: np.ndarray | None = None
) -> Similarity | None:
    """Return how alike experts are; None of fewer than LEAST · d tokens, or without such a pair.

    outputs: E times (N, c, d), of the same tokens.  Linear CKA (Kornblith et al. 2019), and the
    mean cosine of what two say of a token, 0 for a vector of zeros.
    people: (N,), whose image each is; by chance people are then exchanged, with all their images.
    """
    images, number, width = outputs[0].shape
    experts = [ExpertOutputs.of(one) for one in outputs]
    varied = [place for place, one in enumerate(experts) if one.strength > 0]
    if images * number < LEAST * width or len(varied) < 2:
        return None
    (order,) = permuted_orders(images, 1, 0, people)
    pairs = torch.full((2, len(experts), len(experts)), torch.nan, dtype=torch.float64)
    pairs[:, varied, varied] = 1
    total, exchanged = torch.zeros(2, 2, images, dtype=torch.float64)
    for a, b in combinations(varied, 2):
        by_image = experts[a].similarities(experts[b]).cpu()
        pairs[:, a, b] = pairs[:, b, a] = by_image.mean(dim=1)
        total += by_image
        exchanged += experts[a].similarities(experts[b].exchange_images(order)).cpu()
    count = comb(len(varied), 2)
    return Similarity(
        pairs[0],
        pairs[1],
        dict(zip(NAMES, (total / count).numpy(), strict=True)),
        dict(zip(NAMES, (exchanged.mean(dim=1) / count).tolist(), strict=True)),
    )


class ExpertOutputs(NamedTuple):
    """What one expert says of tokens."""

    values: Tensor  # (N, c, d)
    centred: Tensor  # (N, c, d), X: less their mean
    strength: Tensor  # ‖XᵀX‖²
    by_image: Tensor  # (N,) what each image adds to it: of its tokens xᵀ(XᵀX)x

    @classmethod
    def of(cls, values: Tensor) -> "ExpertOutputs":
        """Return them of values (N, c, d); equal ones have no strength, none by rounding either."""
        moved = values - values[0, 0]
        centred = moved - moved.mean(dim=(0, 1))
        return cls(values, centred, *cross_strength(centred, centred))

    def exchange_images(self, order: np.ndarray) -> "ExpertOutputs":
        """Return them with the images in another order (N,)."""
        values, centred, by_image = (
            one[order] for one in (self.values, self.centred, self.by_image)
        )
        return ExpertOutputs(values, centred, self.strength, by_image)

    def similarities(self, other: "ExpertOutputs") -> Tensor:
        """Return linear CKA, ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖), and cosine, one value an image, (2, N).

        Their means are the two; CKA's by each image's influence (infinitesimal jackknife).
        """
        strength, by_image = cross_strength(self.centred, other.centred)
        scale = (self.strength * other.strength).sqrt()
        cka = strength / scale
        own = self.by_image / self.strength + other.by_image / other.strength
        influence = len(own) * (2 * by_image / scale - own * cka)
        cosines = cosine_similarity(self.values, other.values, dim=-1).mean(dim=1)
        return torch.stack([cka + influence, cosines])


def cross_strength(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖XᵀY‖² of centred outputs (N, c, d), and what each image adds to it, (N,)."""
    product = torch.einsum("nci,ncj->ij", first, second)
    return product.square().sum(), torch.einsum("nci,ij,ncj->n", first, product, second)


class KeptChoices(Config):
    """Which experts some tokens chose: bits of (images, tokens, experts), by ``encode_arrays``."""

    shape: tuple[int, int, int]
    bits: str
    people: tuple[int, ...] | None = None  # whose image each is, where people have several


def decode_choices(kept: KeptChoices) -> np.ndarray:
    """Return which experts tokens chose, (images, tokens, experts) bool."""
    bits = np.frombuffer(decode_compressed_text(kept.bits), np.uint8)
    return np.unpackbits(bits, count=int(np.prod(kept.shape))).astype(bool).reshape(kept.shape)


class SeedAgreement(NamedTuple):
    """Of two trainings on images that their experts were not matched on."""

    correlation: float  # of matched experts' indicators over tokens, mean over experts
    overlap: float  # share of the first one's choices that the second shares, once matched
    partners: np.ndarray  # (E,) int, of each expert of the first that of the second


def indicator_correlation(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation of who chose each expert, (E, E); 0 of one all or none chose.

    ours, theirs: (n, E) bool, of the same tokens.
    """
    sides = []
    for chosen in (ours, theirs):
        apart = chosen - chosen.mean(axis=0)
        length = np.sqrt(np.square(apart).sum(axis=0))
        sides.append(apart / np.where(length > 0, length, np.inf))
    return sides[0].T @ sides[1]


def match_experts(correlation: np.ndarray) -> np.ndarray:
    """Return each expert's partner, (E,), one to one, with the largest sum of correlations."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    return linear_sum_assignment(correlation, maximize=True)[1]


def seed_agreement(ours: np.ndarray, theirs: np.ndarray, is_fit: np.ndarray) -> SeedAgreement:
    """Return how well two trainings' experts agree on the images that they are not matched on.

    ours, theirs: (B, T, E) bool, of the same images.  is_fit: (B,) bool, those that they are
    matched on: agreement on these is biased upwards, as the best of E! matchings.
    Raises UserError where the two differ in images, tokens or experts.
    """
    if ours.shape != theirs.shape:
        shapes = f"{ours.shape} and {theirs.shape} (images, tokens, experts)"
        raise UserError(f"seed_agreement: found choices of {shapes}; allowed: two of one shape")
    experts = ours.shape[-1]
    fit, rest = (
        [side[images].reshape(-1, experts) for side in (ours, theirs)]
        for images in (is_fit, ~is_fit)
    )
    partners = match_experts(indicator_correlation(*fit))
    correlation = indicator_correlation(*rest)[np.arange(experts), partners].mean()
    shared = rest[0] & rest[1][:, partners]
    return SeedAgreement(float(correlation), float(shared.sum() / max(1, rest[0].sum())), partners)


def matched_agreement_by_image(
    ours: np.ndarray, theirs: np.ndarray, partners: np.ndarray
) -> dict[str, np.ndarray]:
    """Return correlation and overlap of ``seed_agreement`` as one value an image, (B,) each.

    ours, theirs: (B, T, E) bool, of images that the partners (E,) do not come from.  Their means
    are the two; a token moves Pearson's r by z·z' − r·(z² + z'²)/2 of its standard scores.
    """
    theirs = theirs[..., partners]
    scores = []
    for chosen in (ours, theirs):
        mean = chosen.mean(axis=(0, 1))
        spread = np.sqrt(mean * (1 - mean))
        scores.append((chosen - mean) / np.where(spread > 0, spread, np.inf))
    one, other = scores
    correlation = (one * other).mean(axis=(0, 1))
    moved = one * other - correlation * (np.square(one) + np.square(other)) / 2
    shared = (ours & theirs).sum(axis=(1, 2))
    return {
        "correlation": (correlation + moved).mean(axis=(1, 2)),
        "overlap": linearize_ratio(shared, ours.sum(axis=(1, 2))),
    }


class ChanceAgreement(NamedTuple):
    """Means of ``seed_agreement`` over exchanges of the second one's images."""

    correlation: float
    overlap: float


def chance_agreement(
    ours: np.ndarray,
    theirs: np.ndarray,
    is_fit: np.ndarray,
    draws: int = 20,
    seed: int = 0,
    people: np.ndarray | None = None,
) -> ChanceAgreement:
    """Return the mean agreement of ``seed_agreement`` with the second one's images exchanged.

    Matched and compared as the real one. What is left is what experts share by place alone.
    people: (B,), whose image each is; people are then exchanged.
    """
    orders = permuted_orders(len(theirs), draws, seed, people)
    null = [seed_agreement(ours, theirs[order], is_fit) for order in orders]
    return ChanceAgreement(
        float(np.mean([one.correlation for one in null])),
        float(np.mean([one.overlap for one in null])),
    )


class PairAgreement(NamedTuple):
    """Of two seeds of a method: means over layers."""

    correlation: float
    overlap: float
    chance: float  # of the correlation


@cache
def compare_kept_choices(
    ours: tuple[KeptChoices, ...], theirs: tuple[KeptChoices, ...]
) -> PairAgreement:
    """Return how far the layers of two models agree, on the same images."""
    people = None if ours[0].people is None else np.array(ours[0].people)
    is_fit = first_half(ours[0].shape[0], people)
    pairs = zip(ours, theirs, strict=True)
    layers = [(decode_choices(one), decode_choices(other)) for one, other in pairs]
    agreements = [seed_agreement(*layer, is_fit) for layer in layers]
    nulls = [chance_agreement(*layer, is_fit, people=people) for layer in layers]
    return PairAgreement(
        float(np.mean([one.correlation for one in agreements])),
        float(np.mean([one.overlap for one in agreements])),
        float(np.mean([one.correlation for one in nulls])),
    )
