"""Ridges on frozen features: against explicit refits, and few shots of the digits end to end."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.config import Config
from moecore.core.tensors import unpacked_values
from moecore.measure import few_shot
from moecore.measure.base import Subject, at_once
from moecore.measure.few_shot import BIAS, EXPONENTS, LEAST, FewShot
from moecore.measure.probes.linear_probe import ridges
from tests.measure.subjects import MODELS, measured_twice, trained, write_digits

SETTINGS = FewShot(shots=(1, 3, 1000), draws=3, batch=40, seed=2)


def drawn_set(seed: int, images: int, width: int, classes: int = 3):
    """Standardised features with the bias column, (N, D), and targets ±1, (N, K)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centres = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(images, width, generator=generator, dtype=torch.float64)
    found = 0.5 * centres[labels] + noise
    found = (found - found.mean(0)) / (found.std(0, correction=0) + LEAST)
    return few_shot.with_bias(found), few_shot.targets_of(labels, classes)


def refitted(x: torch.Tensor, y: torch.Tensor, penalty: float) -> torch.Tensor:
    """(XᵀX + λI)⁻¹XᵀY by its definition, (D, K)."""
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]).double(), x.T @ y)


@pytest.mark.parametrize(("images", "width"), [(12, 30), (12, 11), (30, 8), (13, 12), (12, 12)])
@pytest.mark.parametrize("exponent", [-10, -3, 0, 7, 19])
def test_weights_and_left_out_images_equal_explicit_refits(images, width, exponent):
    x, y = drawn_set(0, images, width)
    ridge = ridges(x, y)
    penalty = 2.0**exponent
    expected = refitted(x, y, penalty)
    torch.testing.assert_close(ridge.weights(penalty), expected, rtol=1e-6, atol=1e-8)
    others = [torch.arange(images) != place for place in range(images)]
    one_by_one = torch.stack([x[~keep][0] @ refitted(x[keep], y[keep], penalty) for keep in others])
    torch.testing.assert_close(ridge.left_out(penalty), one_by_one, rtol=1e-6, atol=1e-7)


@given(st.integers(0, 10**6), st.integers(4, 12), st.sampled_from(EXPONENTS))
def test_both_paths_agree(seed, images, exponent):
    # Columns of zeros change nothing, but make the features more than the images.
    x, y = drawn_set(seed, images, 3)
    wide = torch.cat([x, torch.zeros(images, 20, dtype=torch.float64)], dim=1)
    primal, dual = ridges(x, y), ridges(wide, y)
    assert primal.own.shape == (images, 4) and dual.own.shape == (images, images)
    penalty = 2.0**exponent
    torch.testing.assert_close(
        primal.weights(penalty), dual.weights(penalty)[:4], rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(
        primal.left_out(penalty), dual.left_out(penalty), rtol=1e-5, atol=1e-6
    )


def test_the_penalty_is_that_of_the_least_error_on_images_left_out():
    x, y = drawn_set(3, 18, 40)
    errors = {}
    for exponent in EXPONENTS:
        guesses = []
        for place in range(18):
            keep = torch.arange(18) != place
            guesses.append(x[place] @ refitted(x[keep], y[keep], 2.0**exponent))
        errors[exponent] = float((torch.stack(guesses) - y).square().mean())
    assert few_shot.preferred(ridges(x, y)) == min(errors, key=errors.__getitem__)


def test_of_equal_errors_the_largest_penalty_is_taken():
    x = torch.zeros(4, 2, dtype=torch.float64)
    assert few_shot.preferred(ridges(x, torch.ones(4, 2, dtype=torch.float64))) == EXPONENTS[-1]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    data = write_digits(tmp_path_factory.mktemp("few"))
    return {name: Subject(trained(data, moe), data) for name, moe in MODELS.items()}


@pytest.fixture(scope="module")
def results(subjects):
    return {
        name: measured_twice(few_shot.measure, subject, SETTINGS)
        for name, subject in subjects.items()
    }


def test_the_score_is_that_of_ridges_fitted_by_hand(subjects, results):
    """Features from the head's input, standardised by the few-shot set, V-MoE's bias column."""
    subject = subjects["vit"]
    model, data = subject.model, subject.data
    train, test = (
        model.encode(torch.from_numpy(np.array(split.images)).float() / 255)[0][:, 0].detach()
        for split in (data.train, data.test)
    )
    labels = torch.from_numpy(np.array(data.train.labels))
    row = results["vit"].rows[1]
    assert row.shots == 3
    hits = []
    for draw in range(3):
        generator = np.random.default_rng([2, draw])
        chosen = np.concatenate(
            [generator.permutation(np.flatnonzero(labels == one))[:3] for one in range(10)]
        )
        few = train[chosen].double()
        mean, scale = few.mean(0), few.std(0, correction=0) + 1e-5

        def ready(part, mean=mean, scale=scale):
            ones = torch.full((len(part), 1), BIAS, dtype=torch.float64)
            return torch.cat([(part.double() - mean) / scale, ones], dim=1)

        y = 2 * torch.nn.functional.one_hot(labels[chosen], 10).double() - 1
        weights = refitted(ready(few), y, 2.0 ** row.exponents[draw])
        right = (ready(test) @ weights).argmax(1) == torch.from_numpy(np.array(data.test.labels))
        assert row.scores[draw] == pytest.approx(float(right.double().mean()))
        hits.append(right.double().numpy())
    assert row.score == pytest.approx(np.mean(row.scores))
    assert row.low < row.score < row.high
    # What claims are judged by: one number a test image, the mean over the draws.
    items = unpacked_values(row.items)
    assert items == pytest.approx(np.mean(hits, axis=0), abs=1e-3)
    assert items.mean() == pytest.approx(row.score, abs=1e-5)


def test_numbers_above_the_smallest_class_are_skipped_with_the_reason(results):
    for found in results.values():
        assert [row.shots for row in found.rows] == [1, 3]
        (skipped,) = found.skipped
        assert skipped.shots == 1000
        assert skipped.why.startswith("the smallest class, ")
        assert skipped.why.endswith(" training images")
        assert (found.test_images, found.features) == (60, 16)


def test_the_choice_on_the_test_split_is_no_worse_than_one_penalty_for_all_draws(results):
    for found in results.values():
        for row in found.rows:
            assert row.score > 0.3, "chance is 0.1"
            assert row.leaky_low <= row.leaky_score <= row.leaky_high
            if len(set(row.exponents)) == 1:
                assert row.leaky_score >= row.score


def test_draws_are_the_same_for_all_and_nested(subjects):
    sets = [few_shot.drawn(subject, 4, 2, 1) for subject in subjects.values()]
    assert np.array_equal(*sets)
    labels = subjects["vit"].data.train.labels
    assert (labels[sets[0]] == np.arange(10)[:, None]).all()
    assert len(np.unique(sets[0])) == 40
    assert np.array_equal(few_shot.drawn(subjects["vit"], 2, 2, 1), sets[0][:, :2])
    assert not np.array_equal(few_shot.drawn(subjects["vit"], 4, 2, 0), sets[0])


def test_the_batch_changes_nothing_and_one_draw_has_no_interval(subjects, results):
    other = few_shot.measure(subjects["vit"], SETTINGS.model_copy(update={"batch": 7}), at_once)
    assert [row.scores for row in other.rows] == [row.scores for row in results["vit"].rows]
    (row,) = few_shot.measure(subjects["vit"], FewShot(shots=(2,), draws=1), at_once).rows
    assert row.low is row.high is None and row.score == row.scores[0]


def test_nothing_fits_where_classes_are_too_small(subjects):
    found = few_shot.measure(subjects["dense"], FewShot(shots=(1000,)), at_once)
    assert found.rows == () and len(found.skipped) == 1


def test_settings():
    assert isinstance(FewShot(), Config) and FewShot().shots == (1, 5, 10, 25)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        FewShot(shots=(0,))


def test_the_evaluators_constants_are_v_moes():
    """2^−10 … 2^19, a bias column of 100, 1e-5 beside a deviation (google-research/vmoe)."""
    assert EXPONENTS == tuple(range(-10, 20)) and LEAST == 1e-5
    assert few_shot.with_bias(torch.zeros(1, 2)).tolist() == [[0, 0, 100]]
