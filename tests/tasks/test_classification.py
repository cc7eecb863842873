import base64

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.backbones import SingleLayer, Swin, Vit
from moecore.core.files import UserError
from moecore.nn.backbones.patch_transformer_base import mean_of_cells
from moecore.statistics import comparisons
from moecore.statistics.comparisons import bootstrap_interval, count_paired_hits
from moecore.tasks import Cells, Classification, MultiLabel, class_task
from moecore.tasks.class_task import calibration_error, class_nll, reliability_bins, top1_hits
from moecore.tasks.regression import Regression, measure_age_bias
from tests.measure.test_truth import IMAGE

# Four images, two classes. Confidences 0.9, 0.9, 0.6, 0.6; right, wrong, right, right.
LOGITS = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]], dtype=torch.double).log()
LABELS = torch.tensor([0, 1, 1, 0])
# Four images, three classes; the best class is 0, 2, 1, 1.
SET_LOGITS = torch.tensor([[3.0, 1.0, 2.0], [-1.0, -2.0, -0.5], [0.0, 4.0, -4.0], [1.0, 5.0, 4.0]])
LABEL_SETS = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.uint8)
TWO = Classification(classes=("a", "b"))
AGE_LISTS = st.lists(st.floats(18, 100), min_size=3, max_size=30)
AGES = torch.tensor([60.0, 70.0, 80.0])
YEARS = Regression(target="age", unit="years", mean=50.0, deviation=10.0)
MOSAIC = IMAGE.model_copy(update={"task": Cells(classes=("a", "b", "c"), grid=2)})  # 8 × 8 pixels


def test_by_hand():
    assert top1_hits(LOGITS, LABELS).tolist() == [True, False, True, True]
    assert class_task.class_confidence(LOGITS).tolist() == pytest.approx([0.9, 0.9, 0.6, 0.6])
    # Brier: 2·0.1², 2·0.9², 2·0.4², 2·0.4²
    told = pytest.approx([0.02, 1.62, 0.32, 0.32])
    assert class_task.brier_scores(LOGITS, LABELS).tolist() == told
    assert class_nll(LOGITS, LABELS).exp().tolist() == pytest.approx([1 / 0.9, 10, *[1 / 0.6] * 2])
    assert class_task.confusion_counts(LOGITS, LABELS).tolist() == [[2, 0], [1, 1]]


def test_ece_and_bins_by_hand():
    # 0.9: accuracy 0.5, gap 0.4, weight 1/2. 0.6: accuracy 1, gap 0.4, weight 1/2.
    given = class_task.class_confidence(LOGITS), top1_hits(LOGITS, LABELS)
    assert calibration_error(*given) == pytest.approx(0.4)
    bins = reliability_bins(*given, bins=2)
    assert bins.count == (0, 4) and bins.accuracy == (None, 0.75)
    assert bins.confidence == (None, pytest.approx(0.75))
    # In one bin the gaps +0.4 and −0.4 cancel but for |0.75 − 0.75| = 0: bins matter.
    assert calibration_error(*given, bins=1) == pytest.approx(0)
    edges = torch.tensor([0.5, 0.500001, 1.0, 0.0])  # an edge belongs to the lower bin
    assert reliability_bins(edges, torch.ones(4).bool(), bins=2).count == (2, 2)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_ece_is_what_the_bins_say(pairs):
    sure = torch.tensor([p for p, _ in pairs], dtype=torch.double)
    hits = torch.tensor([h for _, h in pairs])
    bins = reliability_bins(sure, hits)
    filled = [i for i, count in enumerate(bins.count) if count]
    gaps = [bins.count[i] * abs(bins.accuracy[i] - bins.confidence[i]) for i in filled]
    assert sum(bins.count) == len(pairs)
    assert calibration_error(sure, hits) == pytest.approx(sum(gaps) / len(pairs), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
def test_correct_takes_both_forms_of_labels(dtype):
    assert top1_hits(SET_LOGITS, LABEL_SETS.to(dtype)).tolist() == [True, False, True, False]
    assert top1_hits(SET_LOGITS, torch.tensor([0, 1, 1, 1])).tolist() == [True, False, True, True]


def test_sigmoid_nll_by_hand():
    # logits ln 3 and −ln 3 have probabilities 3/4 and 1/4. Labels (1, 0): ln(4/3) twice; (0, 1): ln
    # 4 twice; (1, 1): one of each.
    logits = torch.tensor([[3.0, 1 / 3]]).log().repeat(3, 1)
    found = class_nll(logits, torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.uint8))
    assert found.tolist() == pytest.approx([2 * np.log(4 / 3), 2 * np.log(4), np.log(16 / 3)])
    assert torch.isfinite(class_nll(torch.tensor([[1e4, -1e4]]), torch.tensor([[0, 1]]))).all()


def test_hits_by_hand():
    # 1 0 1 0 0 0 0 0 | 1 and seven zeros: bytes 160 and 128.
    hits = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1]).bool()
    assert base64.b64decode(TWO.encode_scores(hits)) == bytes([160, 128])


@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 9))
def test_among_the_best_is_as_sorting_says(seed, classes, best):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (20, classes), generator=generator).float()  # with ties
    labels = torch.randint(0, classes, (20,), generator=generator)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :best]
    hits = class_task.topk_hits(logits, labels, best)
    assert hits.tolist() == (order == labels[:, None]).any(1).tolist()
    assert torch.equal(class_task.topk_hits(logits, labels, 1), order[:, 0] == labels)


def test_top5_is_there_for_six_classes_and_more_only():
    logits = torch.eye(6)
    labels = torch.arange(6)
    task = Classification(classes=tuple("abcdef"))
    assert bool(task.top5(logits, labels).all())
    assert task.details(logits, labels, labels).test_top5.value == 1
    few = Classification(classes=tuple("abcde"))
    assert few.top5(logits[:5, :5], labels[:5]) is None
    assert few.details(logits[:5, :5], labels[:5], labels[:5]).test_top5 is None
    sets = torch.nn.functional.one_hot(labels)
    assert MultiLabel(classes=tuple("abcdef")).top5(logits, sets) is None
    assert Regression(target="age").top5(logits[:, :1], labels.float()) is None


def test_the_fit_by_hand():
    # y = 60 70 80, ŷ = 64 70 73: errors 4 0 −7; centred y −10 0 10; centred errors 5 1 −6 (mean −1)
    # slope = 1 + (−10·5 + 10·(−6)) / 200 = 0.45 ; intercept = mean ŷ 69 − 0.45 · 70 = 37.5
    # corr = −110 / sqrt(200 · (25 + 1 + 36)) = −0.98781
    found = measure_age_bias(torch.tensor([[64.0], [70.0], [73.0]]), AGES)
    expected = {"mae": 11 / 3, "corr": -110 / (200 * 62) ** 0.5, "slope": 0.45, "intercept": 37.5}
    assert found == pytest.approx(expected)


@given(AGE_LISTS, st.floats(0.1, 2), st.floats(-20, 20), st.integers(0, 99))
def test_the_fit_is_numpys(ages, slope, intercept, seed):
    labels = np.array(ages)
    if np.ptp(labels) < 1:
        return
    predicted = intercept + slope * labels + np.random.default_rng(seed).normal(0, 3, len(labels))
    found = measure_age_bias(torch.tensor(predicted), torch.tensor(labels))
    expected = np.polyfit(labels, predicted, 1)
    assert (found["slope"], found["intercept"]) == pytest.approx(tuple(expected), abs=1e-6)
    assert found["corr"] == pytest.approx(np.corrcoef(predicted - labels, labels)[0, 1], abs=1e-9)


def test_one_answer_for_all_has_slope_0_and_correlation_minus_1():
    told = pytest.approx({"mae": 25 / 3, "corr": -1.0, "slope": 0.0, "intercept": 65.0})
    assert measure_age_bias(torch.full((3, 1), 65.0), AGES) == told


def test_differences_are_paired():
    # Shares: 3 of 4 against 1 of 4. Numbers: 3, 0, 3 against 1, 1, 1 is 1 more on average.
    one = torch.tensor([1, 1, 1, 0]).bool()
    other = torch.tensor([1, 0, 0, 0]).bool()
    expected = comparisons.compute_newcombe_interval(count_paired_hits(one.numpy(), other.numpy()))
    assert TWO.difference(one, other) == expected and expected.value == 0.5
    errors = torch.tensor([3.0, 0.0, 3.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    assert YEARS.difference(errors, ones) == bootstrap_interval(errors.numpy(), np.ones(3))
    assert YEARS.difference(errors, ones).value == 1
    assert YEARS.difference(errors, ones, level=0.999).low <= YEARS.difference(errors, ones).low


def test_the_tokens_of_a_cell_are_averaged_row_by_row():
    tokens = torch.arange(16.0).view(1, 16, 1)  # 4 × 4: the first cell has 0, 1, 4 and 5
    assert mean_of_cells(tokens, (4, 4), 4).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert mean_of_cells(tokens, (4, 4), 16).flatten().tolist() == list(range(16))


@torch.no_grad()
@pytest.mark.parametrize("patch", [2, 4])
def test_without_attention_a_cell_is_answered_by_its_own_pixels(patch):
    model = Vit(patch=patch, width=16, depth=1, heads=2, pooling="mean").build(MOSAIC).eval()
    model.blocks[0].attn.proj.weight.zero_()
    images = torch.rand(2, 2, 8, 8)
    before = model(images).prediction
    assert before.shape == (2, 12)
    images[:, :, :4, 4:] = 0  # the second cell
    changed = (model(images).prediction != before).view(2, 4, 3).any(dim=2)
    assert changed.tolist() == [[False, True, False, False]] * 2


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        (
            Vit(patch=4, width=16, depth=1, heads=2),
            "model.pooling: found class for mosaics; allowed: mean",
        ),
        (Vit(patch=8, width=16, depth=1, heads=2, pooling="mean"), "model.patch: found 8 for "),
        (SingleLayer(), "model.kind: found single_layer for .*allowed: vit"),
        (Swin(patch=2, width=8, depths=(1,), heads=(2,), window=2), "model.kind: found swin for "),
    ],
)
def test_models_that_cannot_answer_cells_are_refused(backbone, said):
    with pytest.raises(UserError, match=said):
        backbone.build(MOSAIC)
