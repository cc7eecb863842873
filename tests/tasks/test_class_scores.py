import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.tasks.class_scores import brier, confidence, confusion, correct, ece, nll, reliability

# Four images, two classes. Confidences 0.9, 0.9, 0.6, 0.6; right, wrong, right, right.
LOGITS = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]], dtype=torch.double).log()
LABELS = torch.tensor([0, 1, 1, 0])


def test_by_hand():
    assert correct(LOGITS, LABELS).tolist() == [True, False, True, True]
    assert confidence(LOGITS).tolist() == pytest.approx([0.9, 0.9, 0.6, 0.6])
    # Brier: 2·0.1², 2·0.9², 2·0.4², 2·0.4²
    assert brier(LOGITS, LABELS).tolist() == pytest.approx([0.02, 1.62, 0.32, 0.32])
    assert nll(LOGITS, LABELS).exp().tolist() == pytest.approx([1 / 0.9, 10, 1 / 0.6, 1 / 0.6])
    assert confusion(LOGITS, LABELS).tolist() == [[2, 0], [1, 1]]


def test_ece_and_bins_by_hand():
    # 0.9: accuracy 0.5, gap 0.4, weight 1/2. 0.6: accuracy 1, gap 0.4, weight 1/2.
    assert ece(confidence(LOGITS), correct(LOGITS, LABELS)) == pytest.approx(0.4)
    bins = reliability(confidence(LOGITS), correct(LOGITS, LABELS), bins=2)
    assert (
        bins.count == (0, 4)
        and bins.confidence == (None, pytest.approx(0.75))
        and bins.accuracy == (None, 0.75)
    )
    # In one bin the gaps +0.4 and −0.4 cancel but for |0.75 − 0.75| = 0: bins matter.
    assert ece(confidence(LOGITS), correct(LOGITS, LABELS), bins=1) == pytest.approx(0)


def test_the_edge_of_a_bin_belongs_to_the_lower_bin():
    bins = reliability(
        torch.tensor([0.5, 0.500001, 1.0, 0.0]), torch.ones(4, dtype=torch.bool), bins=2
    )
    assert bins.count == (2, 2)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_ece_is_what_the_bins_say(pairs):
    sure, hits = (
        torch.tensor([p for p, _ in pairs], dtype=torch.double),
        torch.tensor([h for _, h in pairs]),
    )
    bins = reliability(sure, hits)
    filled = [i for i, count in enumerate(bins.count) if count]
    expected = sum(
        bins.count[i] * abs(bins.accuracy[i] - bins.confidence[i]) for i in filled
    ) / len(pairs)
    assert sum(bins.count) == len(pairs) and ece(sure, hits) == pytest.approx(expected, abs=1e-12)
