"""What a token's experts tell of its label: mutual information beyond what chance gives.

A pair of a token and one of its experts is one count. B images, T tokens per image, E experts,
K labels, M pairs.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from moecore.core.files import UserError
from moecore.statistics.crossed import linearize_ratio

FEWEST = 4  # images whose labels are exchanged: of three, no order is rarer than 1 in 3! = 6


class ExpertInformation(NamedTuple):
    """Nats; ``excess_by_image`` (B,): values whose mean is ``information`` − ``chance``."""

    information: float  # plug-in
    chance: float  # mean over the permuted labels
    p: float  # share of permutations, the labels' own among them, with as much information
    label_entropy: float
    excess_by_image: np.ndarray


def mutual_information(table: np.ndarray) -> float:
    """Return the plug-in mutual information of a table of counts, in nats; 0 of no counts."""
    joint = table / max(1, table.sum())
    independent = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / independent[there])).sum())


def expert_information(
    chosen: np.ndarray, labels: np.ndarray, permuted: Iterable[np.ndarray]
) -> ExpertInformation:
    """Return what experts tell of labels.

    chosen: (B, T, E) bool.  labels: (B, T), integers from 0, or −1 where unknown, which is not
    counted.  permuted: the same labels in orders that break only their link with the experts: maps
    of whole images, or places within each image; tokens are never exchanged freely.
    Raises UserError where fewer than two labels are known.
    """
    if len(np.unique(labels[labels >= 0])) < 2:
        problem = "found fewer than two labels among the images"
        raise UserError(f"expert_information: {problem}; allowed: two or more")
    pairs = chosen.nonzero()
    table = _count_table(chosen, pairs, labels)
    null = np.array([mutual_information(_count_table(chosen, pairs, one)) for one in permuted])
    information = mutual_information(table)
    shares = table.sum(axis=0)[table.sum(axis=0) > 0] / table.sum()
    chance = float(null.mean())
    return ExpertInformation(
        information=information,
        chance=chance,
        p=float((1 + (null >= information - 1e-12).sum()) / (len(null) + 1)),
        label_entropy=float(-(shares * np.log(shares)).sum()),
        excess_by_image=_information_by_image(table, pairs, labels, len(chosen)) - chance,
    )


def permute_images(labels: np.ndarray, number: int, seed: int) -> Iterator[np.ndarray]:
    """Yield labels (B, T) so many times with the images' maps exchanged.

    Raises UserError for fewer than FEWEST images: what they tell would be all chance, unnoticed.
    """
    check_exchangeable(len(labels))
    random = np.random.default_rng(seed)
    for _ in range(number):
        yield labels[random.permutation(len(labels))]


def check_exchangeable(images: int) -> None:
    """Raise UserError where there are too few images for a null that exchanges them."""
    if images < FEWEST:
        problem = f"found {images} images or texts, which are exchanged to know what chance gives"
        raise UserError(f"permutation null: {problem}; allowed: {FEWEST} and more")


def permute_positions(labels: np.ndarray, number: int, seed: int) -> Iterator[np.ndarray]:
    """Yield labels (B, T) so many times with the tokens of each image exchanged."""
    random = np.random.default_rng(seed)
    for _ in range(number):
        yield random.permuted(labels, axis=1)


def _count_table(
    chosen: np.ndarray, pairs: tuple[np.ndarray, ...], labels: np.ndarray
) -> np.ndarray:
    """Count the pairs of each expert and label: (E, K)."""
    image, token, expert = pairs
    width = int(labels.max()) + 2
    cells = expert * width + labels[image, token] + 1
    table = np.bincount(cells, minlength=chosen.shape[-1] * width)
    return table.reshape(-1, width)[:, 1:]


def _information_by_image(
    table: np.ndarray, pairs: tuple[np.ndarray, ...], labels: np.ndarray, images: int
) -> np.ndarray:
    """Return one value an image whose mean is the mutual information (infinitesimal jackknife)."""
    image, token, expert = pairs
    label = labels[image, token]
    known = label >= 0
    image, expert, label = image[known], expert[known], label[known]
    joint = table / table.sum()
    independent = joint.sum(axis=1)[expert] * joint.sum(axis=0)[label]
    pointwise = np.log(joint[expert, label] / independent)
    return linearize_ratio(
        np.bincount(image, pointwise, minlength=images), np.bincount(image, minlength=images)
    )
