"""Similarity of a layer's experts on the same tokens, and of the experts of two trainings.

Two trainings' experts are matched on some images and compared on others; c tokens are stored.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from math import ceil, comb
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from moecore.core import arrays_as_text, config, files, routing_records
from moecore.measure.routing_metrics.interventions import unguided_model
from moecore.nn.backbones.base_model import Model
from moecore.nn.layers.moe import MoEFeedForward
from moecore.nn.predict import BATCH, ImageSequence
from moecore.statistics.comparisons import linearize_ratio
from moecore.statistics.intervals import People, draw_image_permutations, every_second_mask
from moecore.training.surgery import expert_reduction

DRAWS = 20  # permutations of chance_agreement
MIN_TOKENS_PER_DIMENSION = 10  # with few tokens, CKA is near 1 for any two experts

NAMES = ("expert_cka", "expert_cosine")


class BatchTracker:
    """Wraps images (N, C, *pixels) and remembers where the latest batch that was read starts."""

    def __init__(self, images: ImageSequence) -> None:
        self.images = images
        self.start = 0

    @property
    def shape(self) -> Sequence[int]:
        return self.images.shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, places: slice) -> Any:
        self.start = places.start
        return self.images[places]


class LayerTokens(NamedTuple):
    layer: MoEFeedForward
    parts: list[Tensor]  # (B, c, d), per call of its router

    @torch.no_grad()
    def outputs(self, images: int) -> list[Tensor]:
        """Return experts' outputs, E times (N, c, d) fp64, for c stored tokens of N ``images``."""
        tokens = cat_last_calls(self.parts, images)
        by_expert = expert_reduction.outputs_of_all_experts(self.layer, tokens.flatten(0, 1))
        return [outputs.double().view(tokens.shape) for outputs in by_expert]


def cat_last_calls(parts: list[Tensor], images: int) -> Tensor:
    """Join each batch's last of ``parts`` (B, …), (N, …): of a text, that of the last block."""
    # Blocks of a text before the measured one are calls, too: the last call is the measured one.
    calls = sum(map(len, parts)) // images
    return torch.cat(parts[calls - 1 :: calls])


@contextmanager
def store_layer_tokens(model: Model, images: BatchTracker) -> Iterator[dict[str, LayerTokens]]:
    """Store some tokens of each MoE layer while these images pass inside the ``with``."""
    # c is the smallest number with MIN_TOKENS_PER_DIMENSION · d tokens over all images, or T.
    # Tokens are evenly spread in an image; they start one token later in each next image, and again
    # at 0 every BATCH images, whatever the batch size.
    stored: dict[str, LayerTokens] = {}

    def keep(
        name: str, layer: MoEFeedForward, tokens: Tensor, record: routing_records.RoutingRecord
    ) -> None:
        batch, length, width = tokens.shape
        number = min(length, ceil(MIN_TOKENS_PER_DIMENSION * width / len(images)))
        rows = torch.arange(batch, device=tokens.device).unsqueeze(-1)
        spread = torch.arange(number, device=tokens.device) * (length // number)
        first = (images.start + rows) % BATCH
        layer_tokens = stored.setdefault(name, LayerTokens(layer, []))
        layer_tokens.parts.append(tokens[rows, (first + spread) % length])

    with expert_reduction.calling_after_each_routing(unguided_model(model), keep):
        yield stored


class ExpertSimilarity(NamedTuple):
    """Similarity of all pairs of experts; NaN for experts with the same output for all tokens."""

    cka: Tensor  # (E, E) fp64
    cosine: Tensor  # (E, E) fp64
    by_image: dict[str, np.ndarray]  # NAMES → mean over pairs without NaN, (N,)
    chances: dict[str, float]  # the same if one of a pair reads other images' tokens


def compare_experts(outputs: Sequence[Tensor], people: People = None) -> ExpertSimilarity | None:
    """Return the similarity of experts; None for too few tokens, or without a pair that varies."""
    # outputs: E times (N, c, d), for the same tokens. Linear CKA (Kornblith et al., 2019), and mean
    # cosine of two outputs, 0 for a zero vector. Chance permutes images, or people if given.
    images, number, width = outputs[0].shape
    experts = [ExpertCkaTerms.of(values) for values in outputs]
    varied = [index for index, expert in enumerate(experts) if expert.strength > 0]
    if images * number < MIN_TOKENS_PER_DIMENSION * width or len(varied) < 2:
        return None
    (order,) = draw_image_permutations(images, 1, 0, people)
    pairs = torch.full((2, len(experts), len(experts)), torch.nan, dtype=torch.float64)
    pairs[:, varied, varied] = 1
    total, exchanged = torch.zeros(2, 2, images, dtype=torch.float64)
    for a, b in combinations(varied, 2):
        by_image = experts[a].similarities(experts[b]).cpu()
        pairs[:, a, b] = pairs[:, b, a] = by_image.mean(dim=1)
        total += by_image
        exchanged += experts[a].similarities(experts[b].exchange_images(order)).cpu()
    count = comb(len(varied), 2)
    return ExpertSimilarity(
        pairs[0],
        pairs[1],
        dict(zip(NAMES, (total / count).numpy(), strict=True)),
        dict(zip(NAMES, (exchanged.mean(dim=1) / count).tolist(), strict=True)),
    )


class ExpertCkaTerms(NamedTuple):
    values: Tensor  # (N, c, d)
    centred: Tensor  # X, (N, c, d): values − mean
    strength: Tensor  # ‖XᵀX‖²
    by_image: Tensor  # (N,), each image's part of the strength: xᵀ(XᵀX)x summed over its tokens

    @classmethod
    def of(cls, values: Tensor) -> "ExpertCkaTerms":
        """Return values (N, c, d) with the terms of CKA that depend on this expert alone."""
        moved = values - values[0, 0]  # equal outputs then have strength 0 without rounding error
        centred = moved - moved.mean(dim=(0, 1))
        return cls(values, centred, *cross_covariance_norm(centred, centred))

    def exchange_images(self, order: np.ndarray) -> "ExpertCkaTerms":
        return self._replace(
            values=self.values[order], centred=self.centred[order], by_image=self.by_image[order]
        )

    def similarities(self, other: "ExpertCkaTerms") -> Tensor:
        """Return linear CKA, ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖), and cosine per image, (2, N)."""
        # CKA's values are mean plus influence of each image (infinitesimal jackknife).
        strength, by_image = cross_covariance_norm(self.centred, other.centred)
        scale = (self.strength * other.strength).sqrt()
        cka = strength / scale
        relative = self.by_image / self.strength + other.by_image / other.strength
        influence = len(relative) * (2 * by_image / scale - relative * cka)
        cosines = cosine_similarity(self.values, other.values, dim=-1).mean(dim=1)
        return torch.stack([cka + influence, cosines])


def cross_covariance_norm(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return ‖XᵀY‖² of centred outputs (N, c, d), and each image's part of it, (N,)."""
    product = torch.einsum("nci,ncj->ij", first, second)
    return product.square().sum(), torch.einsum("nci,ij,ncj->n", first, product, second)


class EncodedChoices(config.Config):
    """Experts that some tokens chose, as packed bits, encoded by ``encode_concatenated_arrays``."""

    shape: tuple[int, int, int]  # images, tokens, experts
    bits: str
    people: tuple[int, ...] | None = None  # person of each image, if people have several images


def decode_choices(encoded: EncodedChoices) -> np.ndarray:
    """Return which experts tokens chose, (images, tokens, experts) bool."""
    bits = np.frombuffer(arrays_as_text.decode_base64_zlib(encoded.bits), np.uint8)
    count = int(np.prod(encoded.shape))
    return np.unpackbits(bits, count=count).astype(bool).reshape(encoded.shape)


class SeedAgreement(NamedTuple):
    """Agreement of two trainings on images that their experts were not matched on."""

    correlation: float  # of matched experts' indicators over tokens, mean over experts
    overlap: float  # share of the first training's choices that the second also makes
    partners: np.ndarray  # (E,) int, the second's expert that matches each expert of the first


def indicator_correlation(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the correlation of choosing expert a in ours and b in theirs, (E, E); rows a."""
    # ours, theirs: (n, E) bool, of the same tokens. 0 for an expert of all tokens or of none.
    sides = []
    for chosen in (ours, theirs):
        centred = chosen - chosen.mean(axis=0)
        length = np.sqrt(np.square(centred).sum(axis=0))
        sides.append(centred / np.where(length > 0, length, np.inf))
    return sides[0].T @ sides[1]


def match_experts(correlation: np.ndarray) -> np.ndarray:
    """Return the one-to-one matching (E,) with the largest sum of correlations (E, E)."""
    return scipy.optimize.linear_sum_assignment(correlation, maximize=True)[1]


def seed_agreement(ours: np.ndarray, theirs: np.ndarray, is_fit: np.ndarray) -> SeedAgreement:
    """Return the agreement of two trainings on images that their experts are not matched on."""
    # ours, theirs: (B, T, E) bool, of the same images. is_fit: (B,) bool, images for the matching,
    # on which agreement is biased upwards, as the best of E! matchings.
    if ours.shape != theirs.shape:
        raise files.UserError.at(
            "seed_agreement",
            found=f"choices of {ours.shape} and {theirs.shape} (images, tokens, experts)",
            allowed="two of one shape",
        )
    experts = ours.shape[-1]
    fit = [side[is_fit].reshape(-1, experts) for side in (ours, theirs)]
    rest = [side[~is_fit].reshape(-1, experts) for side in (ours, theirs)]
    partners = match_experts(indicator_correlation(*fit))
    correlation = indicator_correlation(*rest)[np.arange(experts), partners].mean()
    shared = rest[0] & rest[1][:, partners]
    return SeedAgreement(float(correlation), float(shared.sum() / max(1, rest[0].sum())), partners)


def matched_agreement_by_image(
    ours: np.ndarray, theirs: np.ndarray, partners: np.ndarray
) -> dict[str, np.ndarray]:
    """Return correlation and overlap of ``seed_agreement`` as one value per image, (B,) each."""
    # ours, theirs: (B, T, E) bool, of images that were not used for the matching ``partners`` (E,).
    theirs = theirs[..., partners]
    scores = []
    for chosen in (ours, theirs):
        mean = chosen.mean(axis=(0, 1))
        spread = np.sqrt(mean * (1 - mean))
        scores.append((chosen - mean) / np.where(spread > 0, spread, np.inf))
    first, second = scores
    correlation = (first * second).mean(axis=(0, 1))
    # A token's influence on Pearson's r, of standard scores z and z': z·z' − r·(z² + z'²)/2.
    influence = first * second - correlation * (np.square(first) + np.square(second)) / 2
    shared = (ours & theirs).sum(axis=(1, 2))
    return {
        "correlation": (correlation + influence).mean(axis=(1, 2)),
        "overlap": linearize_ratio(shared, ours.sum(axis=(1, 2))),
    }


def chance_agreement(
    ours: np.ndarray, theirs: np.ndarray, is_fit: np.ndarray, people: People = None
) -> tuple[float, float]:
    """Return correlation and overlap if the second training's images (people) are permuted."""
    # Matched and compared like the real one; it measures what experts share by position alone.
    orders = draw_image_permutations(len(theirs), DRAWS, 0, people)
    nulls = [seed_agreement(ours, theirs[order], is_fit) for order in orders]
    correlations, overlaps = zip(*((null.correlation, null.overlap) for null in nulls), strict=True)
    return float(np.mean(correlations)), float(np.mean(overlaps))


class PairAgreement(NamedTuple):
    """Agreement of two seeds of a method: means over layers."""

    correlation: float
    overlap: float
    chance: float  # of the correlation


@cache
def compare_encoded_choices(
    ours: tuple[EncodedChoices, ...], theirs: tuple[EncodedChoices, ...]
) -> PairAgreement:
    """Return correlation, overlap and chance of two models, experts matched, means over layers."""
    people = None if ours[0].people is None else np.array(ours[0].people)
    is_fit = every_second_mask(ours[0].shape[0], people)
    layers = []
    for our_layer, their_layer in zip(ours, theirs, strict=True):
        choices = decode_choices(our_layer), decode_choices(their_layer)
        agreement = seed_agreement(*choices, is_fit)
        chance, _ = chance_agreement(*choices, is_fit, people)
        layers.append((agreement.correlation, agreement.overlap, chance))
    return PairAgreement(*(float(np.mean(values)) for values in zip(*layers, strict=True)))
