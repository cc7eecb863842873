"""Exchanging and halving items where people have several: a person's stay together.

N images, M people.
"""

from collections.abc import Iterator

import numpy as np

from moecore.statistics.intervals import indices_by_person


def permuted_orders(
    images: int, number: int, seed: int, people: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield so many times an order (N,) of images in which any is as likely as another by chance.

    people: (N,), whose image each is: people are then exchanged, each with all images, with others
    that have as many; one who is alone with a number stays.
    """
    random = np.random.default_rng(seed)
    by_person = indices_by_person(people) or list(np.arange(images)[:, None])
    lengths = np.array([len(own) for own in by_person])
    groups = [
        np.stack([own for own in by_person if len(own) == length]) for length in np.unique(lengths)
    ]
    for _ in range(number):
        order = np.arange(images)
        for group in groups:
            order[group] = group[random.permutation(len(group))]
        yield order


def first_half(images: int, people: np.ndarray | None = None) -> np.ndarray:
    """Return which images are of one half, (N,) bool: every other one, or every other person's."""
    if people is None or indices_by_person(people) is None:
        return np.arange(images) % 2 == 0
    return np.unique(people, return_inverse=True)[1] % 2 == 0
