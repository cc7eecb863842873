"""Splits: disjoint, stratified, exact in number, and a function of the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moecore.core.files import UserError
from moecore.data.splits import SplitSettings, carve, limited, quotas, split_train

LABELS = np.repeat([0, 1, 2], [50, 30, 20])


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.data())
def test_quotas_are_exact_and_proportional(counts, data):
    counts = np.array(counts)
    number = data.draw(st.integers(1, counts.sum()))
    taken = quotas(counts, number)
    assert taken.sum() == number and (taken <= counts).all() and (taken >= 0).all()
    if number >= len(counts):
        assert (taken >= 1).all()
    if (counts * number >= counts.sum()).all():  # no class is lifted to its minimum of one
        assert (np.abs(taken - counts * number / counts.sum()) <= 1).all()


@given(st.integers(0, 1000), st.sampled_from([0.1, 0.25, 0.5, 7, 40]))
def test_carve_is_a_stratified_partition(seed, amount):
    labels = np.random.default_rng(seed).permutation(LABELS)
    kept, carved = carve(labels, amount, seed)
    if amount < 1:
        number = round(amount * 100)
    else:
        number = amount
    assert (
        np.array_equal(np.sort(np.concatenate([kept, carved])), np.arange(100))
        and len(carved) == number
    )
    assert (
        np.abs(np.bincount(labels[carved], minlength=3) - np.array([50, 30, 20]) * number / 100)
        <= 1
    ).all()
    again = carve(labels, amount, seed)
    assert np.array_equal(again[0], kept) and np.array_equal(again[1], carved)


def test_seeds_and_purposes_differ():
    draws = [carve(LABELS, 0.5, seed, purpose)[1].tolist() for seed in (0, 1) for purpose in (0, 1)]
    assert len({tuple(draw) for draw in draws}) == 4


def test_limits_do_not_touch_validation():
    full = SplitSettings(seed=3)
    small = SplitSettings(seed=3, train_limit=10)
    train, validation = split_train(LABELS, full)
    few, same = split_train(LABELS, small)
    assert np.array_equal(validation, same) and set(few) < set(train) and len(few) == 10
    assert np.bincount(LABELS[few]).tolist() == [5, 3, 2]
    assert (
        len(limited(LABELS, None, 0)) == len(limited(LABELS, 1000, 0)) == 100
        and len(limited(LABELS, 1, 0)) == 1
    )


def test_nothing_left_is_an_error():
    with pytest.raises(UserError, match="cannot split 100 images off 100; allowed: 1 to 99"):
        carve(LABELS, 100, 0)
    with pytest.raises(ValidationError, match="validation is 1.5"):
        SplitSettings(validation=1.5)
