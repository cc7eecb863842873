"""The sources `clusters` and `subspaces`: labels and truth are what they say, by undoing them."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from moecore.core.files import UserError
from moecore.data.drawn_images import DrawnSource
from moecore.data.prepared import SPLITS, Prepared, Split
from moecore.data.sources.clusters import Clusters
from moecore.data.sources.subspaces import Subspaces
from moecore.testing import check_source

FEW = {"train": 3000, "validation": 300, "test": 1000}


def prepared(source: DrawnSource, folder) -> Prepared:
    source.prepare(folder)
    return Prepared.open(folder)


def unpacked(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return values in −1 to 1, (n, S, S), and kinds from 0, (n,)."""
    truth = split.images[:, 1]
    assert (truth == truth[:, :1, :1]).all()
    return (split.images[:, 0] - 128.0) / 127, truth[:, 0, 0].astype(int) - 1


def test_a_cluster_is_its_centre_and_the_label_its_features_sign(tmp_path):
    source = Clusters(**FEW, clusters=3, grid=3)
    rule = source._rule()
    directions = np.concatenate(rule)
    assert np.allclose(directions @ directions.T, np.eye(6))
    split = prepared(source, tmp_path).test
    values, kinds = unpacked(split)
    patches = values.reshape(-1, 3, 7, 3, 7).swapaxes(2, 3).reshape(-1, 9, 49)
    parts = patches * 2 * np.abs(directions).max() @ directions.T  # (n, 9, 6)
    rows = np.arange(len(kinds))
    # patches that are one direction alone: what is left of them is rounding
    left = patches * 2 * np.abs(directions).max() - parts @ directions
    alone = np.abs(left).max(axis=-1) < 0.01
    assert (alone.sum(axis=1) == 3).all(), "the feature, the centre, the other's feature"
    strengths = np.where(alone[..., None], parts, 0).sum(axis=1)  # (n, 6)
    there = np.abs(strengths) > 0.3
    assert (there[:, :3].sum(axis=1) == 2).all() and (there[:, 3:].sum(axis=1) == 1).all()
    assert (there[:, 3:].argmax(axis=1) == kinds).all()
    assert ((strengths[rows, kinds] > 0) == split.labels).all()
    assert np.abs(strengths[there]).min() > 0.48 and np.abs(strengths).max() < 2.02
    places = alone[:, :, None] & (np.abs(parts[..., 3:]) > 0.3)
    assert (places.any(axis=2).sum(axis=0) > 60).all(), "a centre lies anywhere"


def test_a_linear_map_is_bound_by_the_theorem_and_those_of_each_cluster_are_not(tmp_path):
    data = prepared(Clusters(**FEW), tmp_path)
    (train, train_kinds), (test, kinds) = unpacked(data.train), unpacked(data.test)
    train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    one = LogisticRegression(max_iter=200).fit(train, data.train.labels)
    assert one.score(test, data.test.labels) <= 0.875
    for kind in range(4):
        own, there = train_kinds == kind, kinds == kind
        each = LogisticRegression(max_iter=200).fit(train[own], data.train.labels[own])
        assert each.score(test[there], data.test.labels[there]) > 0.97


def test_a_point_lies_in_its_subspace_and_its_label_is_the_largest_coordinate(tmp_path):
    source = Subspaces(**FEW, subspaces=5, rank=3, noise=0)
    bases = source._rule()
    split = prepared(source, tmp_path).test
    values, kinds = unpacked(split)
    points = values.reshape(-1, 36)
    inside = np.einsum("kdr,nd->nkr", bases, points)  # of every subspace
    left = np.linalg.norm(points[:, None] - np.einsum("kdr,nkr->nkd", bases, inside), axis=2)
    whole = (np.abs(points) < 0.999).all(axis=1)  # nothing clipped
    assert whole.mean() > 0.9 and (left.argmin(axis=1) == kinds)[whole].mean() > 0.99
    own = inside[np.arange(len(kinds)), kinds]
    clear = np.diff(np.sort(own, axis=1)[:, 1:])[:, 0] > 0.02  # more than rounding
    assert (own.argmax(axis=1) == split.labels)[clear & whole].all() and clear.mean() > 0.9


@pytest.mark.parametrize("source", [Clusters(**FEW), Subspaces(**FEW)])
def test_splits_are_apart_and_as_foreseen(source, tmp_path):
    data = check_source(source, tmp_path)
    together = np.concatenate([getattr(data, name).images for name in SPLITS])
    assert len(np.unique(together.reshape(len(together), -1), axis=0)) == sum(FEW.values())
    assert data.card["truth"] == len(np.unique(data.test.images[:, 1]))
    other = prepared(source.model_copy(update={"seed": 1}), tmp_path / "other").test
    assert not np.array_equal(other.images, data.test.images)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (Clusters(clusters=5, patch=3), "clusters: found 5; allowed: at most 4"),
        (Subspaces(rank=5, size=2), "rank: found 5; allowed: at most 4"),
    ],
)
def test_what_cannot_be_is_said_before_and_by_prepare(source, problem, tmp_path):
    assert source.preview().problem.startswith(problem)
    with pytest.raises(UserError, match=problem):
        source.prepare(tmp_path)
