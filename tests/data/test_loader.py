"""Order is a function of (seed, step); what a step sees does not depend on where the images lie.
Splits: disjoint, stratified, exact in number, and a function of the seed.
"""

import hashlib
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core import streams
from moecore.core.files import UserError
from moecore.core.streams import derived_seed, generator_for
from moecore.data.loader import (
    batch_indices,
    few_shot_indices,
    image_memory_budget,
    load_split_where_it_fits,
    steps_per_epoch,
)
from moecore.data.prepared import Split
from moecore.data.stratified_splits import (
    SplitSettings,
    class_quotas,
    split_train,
    stratified_limit,
    stratified_split,
)
from moecore.tasks.classification import Classification

TWO = Classification(classes=("a", "b"))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32), st.integers(0, 5))
def test_an_epoch_sees_each_image_at_most_once(n, batch, seed, epoch):
    if n < batch:
        with pytest.raises(UserError, match=f"batch is {batch}, but there are only {n}"):
            batch_indices(n, batch, seed, 0)
        return
    steps = steps_per_epoch(n, batch)
    seen = torch.cat([batch_indices(n, batch, seed, epoch * steps + i) for i in range(steps)])
    assert torch.equal(seen, batch_indices(n, n, seed, epoch)[: steps * batch])
    assert len(seen.unique()) == steps * batch


def test_orders_are_permutations_that_differ_and_cannot_be_spoilt():
    first = batch_indices(100, 100, 0, 0)
    other = batch_indices(100, 100, 0, 1)
    assert torch.equal(first.sort().values, torch.arange(100)) and not torch.equal(first, other)
    assert not torch.equal(first, batch_indices(100, 100, 1, 0))
    batch_indices(100, 10, 0, 0).zero_()
    batch_indices(100, 100, 0, 0).zero_()
    assert torch.equal(batch_indices(100, 100, 0, 0), first)


def test_on_device_and_on_disk_agree(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 1, 3, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    split = Split(np.load(tmp_path / "images.npy", mmap_mode="r"), np.arange(20))
    held = load_split_where_it_fits(split, "cpu", 20 * 9)
    mapped = load_split_where_it_fits(split, "cpu", 20 * 9 - 1)
    assert isinstance(held.images, torch.Tensor) and isinstance(mapped.images, np.memmap)
    indices = torch.tensor([7, 0, 7])
    for seen, labels in (held.take(indices), mapped.take(indices)):
        assert np.array_equal(seen.numpy(), images[[7, 0, 7]])
        assert labels.tolist() == [7, 0, 7]
        assert seen.dtype == torch.uint8


def test_a_gpu_holds_a_share_of_what_is_free_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 141 << 30))
    assert image_memory_budget("cuda") == 40 << 30 and image_memory_budget("cpu") == 8 << 30


def test_few_shot():
    labels = np.array([0] * 10 + [1] * 4)
    chosen = few_shot_indices(TWO, labels, 3, 0)
    assert torch.equal(chosen, few_shot_indices(TWO, torch.from_numpy(labels), 3, 0))
    assert np.bincount(labels[chosen]).tolist() == [3, 3]
    assert not torch.equal(chosen, few_shot_indices(TWO, labels, 3, 1))
    assert len(chosen.unique()) == 6
    with pytest.raises(
        UserError, match="5 images per class asked for, but class 1 has 4; allowed: 1 to 4"
    ):
        few_shot_indices(TWO, labels, 5, 0)


LABELS = np.repeat([0, 1, 2], [50, 30, 20])


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.data())
def test_quotas_are_exact_and_proportional(counts, data):
    counts = np.array(counts)
    number = data.draw(st.integers(1, counts.sum()))
    taken = class_quotas(counts, number)
    assert taken.sum() == number and (taken <= counts).all() and (taken >= 0).all()
    if number >= len(counts):
        assert (taken >= 1).all()
    if (counts * number >= counts.sum()).all():  # no class is lifted to its minimum of one
        assert (np.abs(taken - counts * number / counts.sum()) <= 1).all()


@given(st.integers(0, 1000), st.sampled_from([0.1, 0.25, 0.5, 7, 40]))
def test_carve_is_a_stratified_partition(seed, amount):
    labels = np.random.default_rng(seed).permutation(LABELS)
    kept, carved = stratified_split(labels, amount, seed)
    number = round(amount * 100) if amount < 1 else amount
    assert np.array_equal(np.sort(np.concatenate([kept, carved])), np.arange(100))
    assert len(carved) == number
    counts = np.bincount(labels[carved], minlength=3)
    assert (np.abs(counts - np.array([50, 30, 20]) * number / 100) <= 1).all()
    again = stratified_split(labels, amount, seed)
    assert np.array_equal(again[0], kept) and np.array_equal(again[1], carved)


def test_seeds_and_purposes_differ():
    words = [(seed, purpose) for seed in (0, 1) for purpose in (0, 1)]
    draws = {tuple(stratified_split(LABELS, 0.5, *word)[1].tolist()) for word in words}
    assert len(draws) == 4


def test_limits_do_not_touch_validation():
    full = SplitSettings(seed=3)
    small = SplitSettings(seed=3, train_limit=10)
    train, validation = split_train(LABELS, full)
    few, same = split_train(LABELS, small)
    assert np.array_equal(validation, same) and set(few) < set(train) and len(few) == 10
    assert np.bincount(LABELS[few]).tolist() == [5, 3, 2]
    assert len(stratified_limit(LABELS, None, 0)) == len(stratified_limit(LABELS, 1000, 0)) == 100
    assert len(stratified_limit(LABELS, 1, 0)) == 1


SEEDS = range(3)
WHO = get_args(streams.Who)
PURPOSES = (streams.VIEWS, streams.NOISE, streams.ATTACK)


def drawn(*words: int) -> int:
    return int(torch.randint(2**62, (), generator=generator_for(*words)))


def of_training(seed: int) -> dict[tuple, int]:
    """The first draw of each stream of a training, by what it is for."""
    found = {("weights", seed): int(torch.Generator().manual_seed(seed).initial_seed())}
    found |= {("order", seed, epoch): drawn(seed, epoch) for epoch in range(200)}
    for step in range(200):
        for purpose in PURPOSES:
            found["step", seed, step, purpose] = drawn(seed, step, purpose)
    return found


def test_no_two_streams_coincide():
    """Students, their teachers and all that is measured, under the same numbers of seeds."""
    found: dict[tuple, int] = {}
    for seed in SEEDS:
        found |= of_training(seed)
        for who in WHO:
            own = of_training(derived_seed(who, seed))
            found |= {(who, seed, *words): value for words, value in own.items()}
            # two views of images in parts of 100, as routing and explorer draw them
            drawn_from = derived_seed(who, seed)
            # (the second view, (start, 1), is there already)
            found |= {(who, seed, start, 0): drawn(drawn_from, start, 0) for start in (0, 100)}
    assert len(set(found.values())) == len(found)


def test_no_two_streams_of_numpy_coincide():
    purposes = (0, 1, 2, streams.FEW_SHOT, streams.PERMUTED, 5, 6)
    words: list[int | list[int]] = [[seed, purpose] for seed in SEEDS for purpose in purposes]
    words += [derived_seed(who, seed) for who in WHO for seed in SEEDS]
    mixed = [derived_seed("mixed_regions", seed) for seed in SEEDS]
    words += [[seed, index] for seed in mixed for index in range(1, 9)]
    first = {int(np.random.default_rng(word).integers(2**62)) for word in words}
    assert len(first) == len(words)


def test_the_streams_of_a_student_are_what_they_always_were():
    """Another order, view or noise would make every trained model another one."""
    labels = np.arange(60) % 2
    said = [
        batch_indices(1000, 64, 3, 40).tolist(),
        [generator_for(3, 40, purpose).initial_seed() for purpose in PURPOSES],
        few_shot_indices(TWO, labels, 10, 3).tolist(),
        np.random.default_rng([3, streams.PERMUTED]).permutation(50).tolist(),
    ]
    assert hashlib.sha256(repr(said).encode()).hexdigest()[:16] == "8ddca5fd3dce9597"
