"""A person's images stay together."""

import numpy as np
import pytest

from moecore.statistics.intervals import first_half, permuted_orders

PEOPLE = np.array(["d", "a", "b", "a", "c", "b", "b", "b", "c"])  # 1, 2, 4 and 2 images


@pytest.mark.parametrize("people", [None, np.array([4, 0, 3, 1, 2])])
def test_images_of_as_many_people_are_exchanged_freely(people):
    random = np.random.default_rng(7)
    for order in permuted_orders(5, 3, 7, people):
        assert order.tolist() == random.permutation(5).tolist()
    assert first_half(5).tolist() == [True, False, True, False, True]


def test_people_are_exchanged_with_those_who_have_as_many():
    """Only a and c, of two images each: exchanged or not."""
    exchanged, kept = [0, 4, 2, 8, 1, 5, 6, 7, 3], list(range(9))
    orders = [order.tolist() for order in permuted_orders(9, 20, 0, PEOPLE)]
    assert exchanged in orders and kept in orders
    assert all(order in (exchanged, kept) for order in orders)


def test_halves_are_of_people():
    """In their order: a and c, b and d."""
    is_first = first_half(9, PEOPLE)
    assert is_first.tolist() == [False, True, False, True, True, False, False, False, True]
