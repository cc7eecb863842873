"""The prepared layout: the card tells the truth, and a damaged folder is refused by name.

Work in several threads: results in order, errors where they are due, one thread for BLAS
meanwhile.
"""

import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from moecore.core.files import UserError, read_json, write_json
from moecore.data.prepared import Prepared
from moecore.data.splits import SplitSettings
from moecore.data.workers import each, one_blas_thread
from moecore.data.writer import Facts, Part, moments, write_prepared
from moecore.tasks.classification import Classification


class Made(SplitSettings):
    kind: str = "made"


FACTS = Facts("Made", Classification(classes=("a", "b")), 3, 4, "none", "here", Made())
IMAGES = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 4), np.uint8)
LABELS = np.arange(10) % 2


def parts(**changed):
    whole = Part(LABELS, [IMAGES[:7], IMAGES[7:]])
    return {"train": whole, "validation": whole, "test": whole} | changed


def test_card_and_arrays(tmp_path):
    card = write_prepared(tmp_path, FACTS, parts())
    opened = Prepared.open(tmp_path, verify=True)
    assert (
        opened.card == card
        and card["counts"]["test"] == {"a": 5, "b": 5}
        and card["settings"]["kind"] == "made"
    )
    assert np.array_equal(opened.train.images, IMAGES) and np.array_equal(
        opened.test.labels, LABELS
    )
    assert (
        opened.train.labels.dtype == np.int64
        and isinstance(opened.train.images, np.memmap)
        and len(card["files"]) == 6
    )
    assert np.allclose(card["mean"], (IMAGES / 255).mean((0, 2, 3))) and np.allclose(
        card["std"], (IMAGES / 255).std((0, 2, 3))
    )


def test_writing_twice_gives_the_same_bytes(tmp_path):
    assert write_prepared(tmp_path / "a", FACTS, parts()) == write_prepared(
        tmp_path / "b", FACTS, parts()
    )


def test_moments_do_not_depend_on_chunks():
    assert moments(IMAGES, 3) == moments(IMAGES)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": Part(LABELS + 1, [IMAGES])}, "labels of train run from 1 to 2; allowed: 0 to 1"),
        ({"test": Part(LABELS * 0, [IMAGES])}, "no image in test of class b"),
        ({"train": Part(LABELS, [IMAGES[:9]])}, "9 images for 10 labels"),
        ({"train": Part(LABELS, [IMAGES, IMAGES])}, "expected uint8 (10, 3, 4, 4)"),
        ({"train": Part(LABELS, [IMAGES[:, :1]])}, "expected uint8 (10, 3, 4, 4)"),
        ({"train": Part(LABELS, [IMAGES.astype(float)])}, "float64"),
    ],
)
def test_wrong_parts_are_refused(tmp_path, changed, said):
    with pytest.raises(UserError) as error:
        write_prepared(tmp_path, FACTS, parts(**changed))
    assert said in str(error.value)


def test_a_finished_array_is_taken_over(tmp_path):
    np.save(tmp_path / "decoded.npy", IMAGES)
    write_prepared(tmp_path / "out", FACTS, parts(train=Part(LABELS, tmp_path / "decoded.npy")))
    assert not (tmp_path / "decoded.npy").exists() and np.array_equal(
        Prepared.open(tmp_path / "out").train.images, IMAGES
    )


def truncate(folder):
    path = folder / "train_images.npy"
    path.write_bytes(path.read_bytes()[:-100])


def header_only(folder):
    path = folder / "test_labels.npy"
    path.write_bytes(path.read_bytes()[:20])


def rubbish(folder):
    (folder / "test_images.npy").write_bytes(b"no array at all")


def pickled(folder):
    np.save(folder / "test_labels.npy", np.array([{}] * 10, object), allow_pickle=True)


def absent(folder):
    (folder / "validation_labels.npy").unlink()


def other_shape(folder):
    np.save(folder / "test_images.npy", IMAGES[:, :, :2])


def other_counts(folder):
    np.save(folder / "test_labels.npy", np.zeros(10, np.int64))


def no_key(folder):
    write_json(
        folder / "card.json",
        {k: v for k, v in read_json(folder / "card.json").items() if k != "counts"},
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "train_images.npy: expected 608 bytes, found 508"),
        (header_only, "test_labels.npy: not a whole .npy file"),
        (rubbish, "test_images.npy: not a whole .npy file"),
        (pickled, "test_labels.npy: "),
        (absent, "validation_labels.npy: no such file"),
        (other_shape, "holds uint8 (10, 3, 2, 4); card.json says uint8 (10, 3, 4, 4)"),
        (other_counts, "class counts are not those of card.json"),
        (no_key, "lacks counts"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, said):
    write_prepared(tmp_path, FACTS, parts())
    damage(tmp_path)
    with pytest.raises(UserError) as error:
        Prepared.open(tmp_path)
    assert said in str(error.value)


def test_one_changed_byte_is_seen_only_by_verify(tmp_path):
    write_prepared(tmp_path, FACTS, parts())
    path = tmp_path / "train_images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    Prepared.open(tmp_path)
    with pytest.raises(UserError, match="train_images.npy: has sha256"):
        Prepared.open(tmp_path, verify=True)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("threads", ["1", "3"])
def test_results_come_in_order(threads, monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", threads)

    def late(number: int) -> int:
        time.sleep(0.002 * (5 - number % 5))
        return number * number

    assert list(each(late, range(23))) == [number * number for number in range(23)]


def test_an_error_is_raised_where_its_result_is_due(monkeypatch):
    monkeypatch.setenv("MOECORE_THREADS", "2")
    found = each(lambda number: 6 // (3 - number), range(6))
    assert [next(found) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(found)


def test_blas_has_one_thread_meanwhile_and_its_own_afterwards():
    before = blas_threads()
    assert before and list(each(lambda _: blas_threads(), range(3))) == [{1}] * 3
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
