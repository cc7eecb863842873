"""What a token's experts tell of its label: mutual information and specialisation beyond chance.

Of information a pair of a token and one of its experts is one count. B images, T tokens per image,
E experts, K labels, M pairs.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.routing_records import TokenLayout
from moecore.measure.base import SEED
from moecore.measure.routing_metrics.token_labels import RARE
from moecore.statistics.crossed import linearize_ratio
from moecore.statistics.intervals import permuted_orders

PERMUTATIONS = 200
FEWEST = 4  # images whose labels are exchanged: of three, no order is rarer than 1 in 3! = 6


class ExpertInformation(NamedTuple):
    """Nats; ``excess_by_image`` (B,): values whose mean is ``information`` − ``chance``.

    Specialisation is a share, and None where no label is of enough tokens.
    """

    information: float  # plug-in
    chance: float  # mean over the permuted labels
    p: float  # share of permutations, the labels' own among them, with as much information
    label_entropy: float
    excess_by_image: np.ndarray
    specialisation: "Specialisation | None"


class Specialisation(NamedTuple):
    """How far a label's tokens share an expert: mean over labels of enough tokens (OLMoE)."""

    share: float  # largest share of a label's tokens that one expert has
    chance: float  # mean over the permuted labels
    labels: int  # that are of enough tokens
    excess_by_image: np.ndarray  # (B,), whose mean is ``share`` − ``chance``


def mutual_information(table: np.ndarray) -> float:
    """Return the plug-in mutual information of a table of counts, in nats; 0 of no counts."""
    joint = table / max(1, table.sum())
    independent = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / independent[there])).sum())


def expert_information(
    chosen: np.ndarray, labels: np.ndarray, permuted: Iterable[np.ndarray], least: int = 1
) -> ExpertInformation:
    """Return what experts tell of labels.

    chosen: (B, T, E) bool.  labels: (B, T), integers from 0, or −1 where unknown, which is not
    counted.  permuted: the same labels in orders that break only their link with the experts: maps
    of whole images, or places within each image; tokens are never exchanged freely.  least: tokens
    of a label whose specialisation counts.
    Raises UserError where fewer than two labels are known.
    """
    if len(np.unique(labels[labels >= 0])) < 2:
        problem = "found fewer than two labels among the images"
        raise UserError(f"expert_information: {problem}; allowed: two or more")
    pairs = chosen.nonzero()
    table = _count_table(chosen, pairs, labels)
    tokens = np.bincount(labels[labels >= 0], minlength=table.shape[1])
    common = tokens >= least
    nulls = []
    for one in permuted:
        counts = _count_table(chosen, pairs, one)
        nulls.append(
            (mutual_information(counts), largest_expert_shares(counts, tokens, common).sum())
        )
    null, null_share = np.array(nulls).T
    information = mutual_information(table)
    shares = table.sum(axis=0)[table.sum(axis=0) > 0] / table.sum()
    chance = float(null.mean())
    return ExpertInformation(
        information=information,
        chance=chance,
        p=float((1 + (null >= information - 1e-12).sum()) / (len(null) + 1)),
        label_entropy=float(-(shares * np.log(shares)).sum()),
        excess_by_image=_information_by_image(table, pairs, labels, len(chosen)) - chance,
        specialisation=_specialisation(chosen, labels, table, common, null_share),
    )


def largest_expert_shares(table: np.ndarray, tokens: np.ndarray, common: np.ndarray) -> np.ndarray:
    """Return of each common label which share of its tokens the expert has that has the most.

    table: (E, K) counts.  tokens, common: (K,), how many a label has and whether these are enough.
    """
    return table[:, common].max(axis=0) / tokens[common]


def permute_images(
    labels: np.ndarray, number: int, seed: int, people: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield labels (B, T) so many times with the images' maps exchanged, or people's with all.

    Raises UserError for fewer than FEWEST images: what they tell would be all chance, unnoticed.
    """
    check_exchangeable(len(labels))
    for order in permuted_orders(len(labels), number, seed, people):
        yield labels[order]


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


def _specialisation(
    chosen: np.ndarray,
    labels: np.ndarray,
    table: np.ndarray,
    common: np.ndarray,
    null: np.ndarray,
) -> Specialisation | None:
    """Return it of labels (B, T) with their table (E, K); null: of permuted ones, the sums."""
    number = int(common.sum())
    if not number:
        return None
    tokens = np.bincount(labels[labels >= 0], minlength=len(common))
    shares = np.zeros(len(common))
    shares[common] = largest_expert_shares(table, tokens, common)
    image, token = ((labels >= 0) & common[labels]).nonzero()
    label = labels[image, token]
    is_with_most = chosen[image, token, table.argmax(axis=0)[label]]
    # the influence of an image on each label's share, which is a ratio of two sums
    above = np.bincount(image, (is_with_most - shares[label]) / tokens[label], len(chosen))
    share, chance = shares.sum() / number, null.mean() / number
    excess = share - chance + above * len(chosen) / number
    return Specialisation(float(share), float(chance), number, excess)


class LabelSpecialisation(Config):
    """The largest share of a label's tokens that one expert has."""

    share: float  # mean over the labels of RARE tokens at least
    chance: float  # of permuted labels, mean
    labels: int  # how many are of as many tokens


class LabelInformation(Config):
    """What the experts of a token tell of one kind of label, in nats."""

    information: float  # plug-in mutual information
    chance: float  # of permuted labels, mean
    p: float  # share of permutations, itself among them, with as much information
    normalised: float  # (information − chance) / entropy of the labels
    specialisation: LabelSpecialisation | None = None  # None where no label has RARE tokens


def label_information(
    chosen: Tensor,
    layout: TokenLayout,
    labels: dict[str, Tensor],
    people: np.ndarray | None = None,
) -> tuple[dict[str, LabelInformation], dict[str, np.ndarray]]:
    """Return what experts tell of each kind of label of which they see two, and values by image.

    A position is exchanged within its image, every other label with its image's whole map, and with
    all images of the person.
    """
    rows, values = {}, {}
    patches = chosen[:, layout.special :].numpy()
    for name, given in labels.items():
        of_tokens = given.expand(chosen.shape[:2])[:, layout.special :].numpy()
        is_told = (of_tokens >= 0) & patches.any(axis=-1)
        if len(np.unique(of_tokens[is_told])) < 2:
            continue
        if name == "position":
            permuted = permute_positions(of_tokens, PERMUTATIONS, SEED)
        else:
            permuted = permute_images(of_tokens, PERMUTATIONS, SEED, people)
        told = expert_information(patches, of_tokens, permuted, RARE)
        values[f"information_{name}"] = told.excess_by_image / told.label_entropy
        rows[name] = LabelInformation(
            information=told.information,
            chance=told.chance,
            p=told.p,
            normalised=(told.information - told.chance) / told.label_entropy,
        )
        if special := told.specialisation:
            values[f"specialisation_{name}"] = special.excess_by_image
            shares = LabelSpecialisation(
                share=special.share, chance=special.chance, labels=special.labels
            )
            rows[name] = rows[name].model_copy(update={"specialisation": shares})
    return rows, values
