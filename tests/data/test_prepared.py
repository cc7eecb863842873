import hashlib
import os
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from moecore.core import streams
from moecore.core.files import FileAccessError, UserError, atomic_folder, read_json, write_json
from moecore.core.streams import derived_seed, generator_for
from moecore.data import loader, prepared, stratified_splits
from moecore.data.card import new_memmap
from moecore.data.loader import batch_indices, few_shot_indices, image_memory_budget
from moecore.data.prepared import Prepared, Split
from moecore.data.sources.fashion_mnist import FashionMnist
from moecore.data.thread_map import map_in_threads, one_blas_thread
from moecore.parts import Card, Classification, SplitToWrite, write_images
from moecore.sources import Cifar, Dialects, Digits, ImageFolder, Imagenet, Mosaic, Phantom
from moecore.testing import check_source
from tests.data.making import cohort, image_classes

CARD = Card("Made", 3, 4, Classification(classes=("a", "b")), "none", "here")
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 4), np.uint8)
LABELS = np.arange(10) % 2
TWO = Classification(classes=("a", "b"))
THREE_CLASSES = np.repeat([0, 1, 2], [50, 30, 20])
SEEDS = range(3)
WHO = get_args(streams.StreamOwner)
PURPOSES = (streams.VIEWS, streams.NOISE, streams.ATTACK)


class Made(stratified_splits.SplitSettings):
    kind: str = "made"


def parts(**changed):
    whole = SplitToWrite(LABELS, [IMAGES[:7], IMAGES[7:]])
    return {"train": whole, "validation": whole, "test": whole} | changed


def test_card_and_arrays(tmp_path):
    card = write_images(tmp_path, Made(), CARD, parts())
    opened = Prepared.open(tmp_path, verify=True)
    assert opened.card == card and card["counts"]["test"] == {"a": 5, "b": 5}
    assert card["settings"]["kind"] == "made" and np.array_equal(opened.train.images, IMAGES)
    assert np.array_equal(opened.test.labels, LABELS) and opened.train.labels.dtype == np.int64
    assert isinstance(opened.train.images, np.memmap) and len(card["files"]) == 6
    assert np.allclose(card["mean"], (IMAGES / 255).mean((0, 2, 3)))
    assert np.allclose(card["std"], (IMAGES / 255).std((0, 2, 3)))


def test_a_finished_array_is_taken_over(tmp_path):
    np.save(tmp_path / "decoded.npy", IMAGES)
    train = SplitToWrite(LABELS, tmp_path / "decoded.npy")
    write_images(tmp_path / "out", Made(), CARD, parts(train=train))
    assert not (tmp_path / "decoded.npy").exists()
    assert np.array_equal(Prepared.open(tmp_path / "out").train.images, IMAGES)


def save(array):
    return lambda path: np.save(path, array, allow_pickle=True)


def forget_counts(path):
    card = read_json(path)
    del card["counts"]
    write_json(path, card)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("train_images.npy", lambda path: os.truncate(path, 100), "not a whole .npy file"),
        ("test_labels.npy", save(np.array([{}] * 10, object)), "not a whole .npy file"),
        ("validation_labels.npy", Path.unlink, "no such file"),
        ("test_images.npy", save(IMAGES[:, :, :2]), "holds uint8 (10, 3, 2, 4)"),
        ("test_labels.npy", save(np.zeros(10, np.int64)), "has sha256"),
        ("card.json", forget_counts, "lacks counts"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, name, damage, said):
    write_images(tmp_path, Made(), CARD, parts())
    damage(tmp_path / name)
    with pytest.raises(UserError) as error:
        Prepared.open(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name}: {said}")
    assert "\n" not in str(error.value)


def test_one_changed_byte_is_seen_of_large_data_only_by_verify(tmp_path, monkeypatch):
    write_images(tmp_path, Made(), CARD, parts())
    path = tmp_path / "train_images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="train_images.npy: has sha256"):
        Prepared.open(tmp_path)
    monkeypatch.setattr(prepared, "VERIFIED_BYTES", 0)
    Prepared.open(tmp_path)
    with pytest.raises(UserError, match="train_images.npy: has sha256"):
        Prepared.open(tmp_path, verify=True)


def test_one_changed_digit_of_a_card_is_seen(tmp_path):
    write_images(tmp_path, Made(), CARD, parts())
    path = tmp_path / "card.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"seed": ', '"seed": 1'), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    with pytest.raises(UserError, match=r"card\.json: damaged, its content is not what was writ"):
        Prepared.open(tmp_path)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("threads", ["1", "3"])
def test_results_come_in_order(threads, monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", threads)

    def late(number: int) -> int:
        time.sleep(0.002 * (5 - number % 5))
        return number * number

    assert list(map_in_threads(late, range(23))) == [number * number for number in range(23)]


def test_an_error_comes_where_its_result_is_due_and_blas_has_one_thread_meanwhile(monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", "2")
    found = map_in_threads(lambda number: 6 // (3 - number), range(6))
    assert [next(found) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(found)
    before = blas_threads()
    assert before and list(map_in_threads(lambda _: blas_threads(), range(3))) == [{1}] * 3
    assert blas_threads() == before


def test_the_limit_holds_until_the_last_user_has_left():
    with threadpool_limits(2, user_api="blas"):
        first = one_blas_thread()
        second = one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert blas_threads() == {1}
        second.__exit__(None, None, None)
        assert blas_threads() == {2}


def folders(folder, monkeypatch) -> ImageFolder:
    image_classes(folder / "raw/train", {"cat": 20, "dog": 30})
    image_classes(folder / "raw/val", {"cat": 3, "dog": 4})
    return ImageFolder(root=str(folder / "raw"), size=8, channels=1)


def wnids(folder, monkeypatch) -> Imagenet:
    for part, number in (("train", 12), ("val", 3)):
        names = {"n01440764": number, "n01443537": number}
        image_classes(folder / "raw" / part, names, suffix=".jpg")
    return Imagenet(root=str(folder / "raw"), cache=str(folder / "cache"), size=8, validation=4)


FEW = {"train": 900, "validation": 300, "test": 400}
SOURCES = {
    "digits": lambda *_: Digits(size=12, seed=3, test_limit=50),
    "dialects": lambda *_: Dialects(source=Digits(), change="colour", dialects=4, **FEW),
    "dialects in mosaics": lambda *_: Dialects(source=Digits(), form="mosaic", dialects=4, **FEW),
    "image_folder": folders,
    "imagenet": wnids,
    "mosaic": lambda *_: Mosaic(source=Digits(), grid=2, train=200, validation=60, test=60),
    "phantom": lambda *_: Phantom(subjects=12, age_groups=2),
    "bids": lambda folder, _: cohort(folder / "raw"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source(tmp_path, monkeypatch, kind):
    check_source(SOURCES[kind](tmp_path, monkeypatch), tmp_path / "out")


@pytest.mark.parametrize(("kind", "number"), [(FashionMnist, 60_000), (Cifar, 50_000)])
def test_published_sets_that_are_absent_or_downloaded(tmp_path, kind, number):
    source = kind(root=str(tmp_path))
    assert str(tmp_path) in source.describe().problem
    download = source.model_copy(update={"download": True}).describe()
    assert download.problem is None and "will download it into" in download.note
    validation = number // 10
    assert tuple(download.image_counts.values()) == (number - validation, validation, 10_000)


def test_a_class_that_a_split_has_not(tmp_path):
    image_classes(tmp_path, {"cat": 60, "dog": 2})
    problem = ImageFolder(root=str(tmp_path), size=8).describe().problem
    assert "no image in train of class dog" in problem


def test_a_cohort_names_every_problem_of_its_tables_and_files(tmp_path):
    source = cohort(tmp_path / "raw")
    min(Path(tmp_path, "raw").rglob("*_T1w.nii.gz")).unlink()
    problem = source.describe().problem
    assert "1 problems in the cohort" in problem and "sub-00*_T1w.nii*: no such file" in problem
    left = source.model_copy(update={"on_error": "skip"}).describe()
    assert sum(left.image_counts.values()) == 11
    assert left.note == "1 problems; those subjects will be left out"


def test_on_a_full_disk_prepared_data_stay_and_are_written_later(tmp_path, limited):
    folder = tmp_path / "data"

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def write() -> dict[str, bytes]:
        with atomic_folder(folder) as target:
            write_images(target, Made(), CARD, parts())
        return content()

    before = write()
    with limited(400), pytest.raises(FileAccessError) as error:
        write()
    assert str(error.value).startswith(f"{folder}: file too large")
    assert content() == before, "all is as it was, and nothing else is there"
    assert write() == before


def test_the_space_of_an_array_is_taken_before_it_is_filled(tmp_path):
    # of a sparse file, a full disk is met where it is filled: by SIGBUS, past all words
    path = tmp_path / "images.npy"
    new_memmap(path, np.uint8, (1000, 1000))
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(1_000_128)
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(1000, 1000))[0] = 7
    assert new_memmap(path, np.uint8, (1000, 1000), begun=True)[0, 0] == 7, "what was begun stays"
    assert path.stat().st_blocks * 512 >= path.stat().st_size


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32), st.integers(0, 5))
def test_an_epoch_sees_each_image_at_most_once(n, batch, seed, epoch):
    if n < batch:
        with pytest.raises(UserError, match=f"batch is {batch}, with {n}"):
            batch_indices(n, batch, seed, 0)
        return
    steps = loader.steps_per_epoch(n, batch)
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
    held = loader.load_split_where_it_fits(split, "cpu", 20 * 9)
    mapped = loader.load_split_where_it_fits(split, "cpu", 20 * 9 - 1)
    assert isinstance(held.images, torch.Tensor) and isinstance(mapped.images, np.memmap)
    indices = torch.tensor([7, 0, 7])
    for seen, labels in (held.take(indices), mapped.take(indices)):
        assert np.array_equal(seen.numpy(), images[[7, 0, 7]]) and labels.tolist() == [7, 0, 7]
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
    said = "5 images per class asked for, but class 1 has 4; allowed: 1 to 4"
    with pytest.raises(UserError, match=said):
        few_shot_indices(TWO, labels, 5, 0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.data())
def test_quotas_are_exact_and_proportional(counts, data):
    counts = np.array(counts)
    number = data.draw(st.integers(1, counts.sum()))
    taken = stratified_splits.class_quotas(counts, number)
    assert taken.sum() == number and (taken <= counts).all() and (taken >= 0).all()
    if number >= len(counts):
        assert (taken >= 1).all()
    if (counts * number >= counts.sum()).all():  # no class is lifted to its minimum of one
        assert (np.abs(taken - counts * number / counts.sum()) <= 1).all()


@given(st.integers(0, 1000), st.sampled_from([0.1, 0.25, 0.5, 7, 40]))
def test_carve_is_a_stratified_partition(seed, amount):
    labels = np.random.default_rng(seed).permutation(THREE_CLASSES)
    kept, carved = stratified_splits.stratified_split(labels, amount, seed)
    number = round(amount * 100) if amount < 1 else amount
    assert np.array_equal(np.sort(np.concatenate([kept, carved])), np.arange(100))
    assert len(carved) == number
    counts = np.bincount(labels[carved], minlength=3)
    assert (np.abs(counts - np.array([50, 30, 20]) * number / 100) <= 1).all()
    again = stratified_splits.stratified_split(labels, amount, seed)
    assert np.array_equal(again[0], kept) and np.array_equal(again[1], carved)


def test_seeds_and_purposes_differ():
    words = [(seed, purpose) for seed in (0, 1) for purpose in (0, 1)]
    split = stratified_splits.stratified_split
    draws = {tuple(split(THREE_CLASSES, 0.5, *word)[1].tolist()) for word in words}
    assert len(draws) == 4


def test_limits_do_not_touch_validation():
    full = stratified_splits.SplitSettings(seed=3)
    small = stratified_splits.SplitSettings(seed=3, train_limit=10)
    train, validation = stratified_splits.split_train(THREE_CLASSES, full)
    few, same = stratified_splits.split_train(THREE_CLASSES, small)
    assert np.array_equal(validation, same) and set(few) < set(train) and len(few) == 10
    assert np.bincount(THREE_CLASSES[few]).tolist() == [5, 3, 2]
    limit = stratified_splits.stratified_limit
    full = [limit(THREE_CLASSES, number, 0) for number in (None, 1000, 1)]
    assert [len(chosen) for chosen in full] == [100, 100, 1]


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
    purposes = (0, 1, 2, streams.FEW_SHOT, streams.PERMUTED_LABELS, 5, 6)
    words: list[int | list[int]] = [[seed, purpose] for seed in SEEDS for purpose in purposes]
    words += [derived_seed(who, seed) for who in WHO for seed in SEEDS]
    mixed = [derived_seed("mixed_regions", seed) for seed in SEEDS]
    words += [[seed, index] for seed in mixed for index in range(1, 9)]
    assert len({int(np.random.default_rng(word).integers(2**62)) for word in words}) == len(words)


def test_the_streams_of_a_student_are_what_they_always_were():
    """Another order, view or noise would make every trained model another one."""
    labels = np.arange(60) % 2
    said = [
        batch_indices(1000, 64, 3, 40).tolist(),
        [generator_for(3, 40, purpose).initial_seed() for purpose in PURPOSES],
        few_shot_indices(TWO, labels, 10, 3).tolist(),
        np.random.default_rng([3, streams.PERMUTED_LABELS]).permutation(50).tolist(),
    ]
    assert hashlib.sha256(repr(said).encode()).hexdigest()[:16] == "8ddca5fd3dce9597"
