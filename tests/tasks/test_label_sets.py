import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.tasks.class_scores import correct, nll
from moecore.tasks.label_sets import false_discovery_rate, precise, sigmoid_nll

# Four images, three classes; the best class is 0, 2, 1, 1.
LOGITS = torch.tensor([[3.0, 1.0, 2.0], [-1.0, -2.0, -0.5], [0.0, 4.0, -4.0], [1.0, 5.0, 4.0]])
LABELS = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.uint8)


def test_precision_at_1_by_hand():
    # {0, 2} has 0; {0, 1} lacks 2; {1} has 1; {0, 2} lacks 1: two of four
    assert precise(LOGITS, LABELS).tolist() == [True, False, True, False]
    assert false_discovery_rate(LOGITS, LABELS) == 0.5
    assert false_discovery_rate(LOGITS[:3], LABELS[:3]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
def test_correct_takes_both_forms_of_labels(dtype):
    assert correct(LOGITS, LABELS.to(dtype)).tolist() == [True, False, True, False]
    assert correct(LOGITS, torch.tensor([0, 1, 1, 1])).tolist() == [True, False, True, True]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(0, 100))
def test_with_one_label_each_precision_at_1_is_accuracy(labels, seed):
    logits, labels = (
        torch.from_numpy(np.random.default_rng(seed).normal(size=(len(labels), 5))),
        torch.tensor(labels),
    )
    assert torch.equal(
        correct(logits, torch.nn.functional.one_hot(labels, 5).to(torch.uint8)),
        correct(logits, labels),
    )


def test_sigmoid_nll_by_hand():
    # logits ln 3 and −ln 3 have probabilities 3/4 and 1/4. Labels (1, 0): ln(4/3) twice; (0, 1): ln
    # 4 twice; (1, 1): one of each.
    logits = torch.tensor([[3.0, 1 / 3]]).log().repeat(3, 1)
    found = sigmoid_nll(logits, torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.uint8))
    assert found.tolist() == pytest.approx(
        [2 * np.log(4 / 3), 2 * np.log(4), np.log(4 / 3) + np.log(4)]
    )
    assert torch.equal(
        nll(logits, torch.tensor([[1, 0]] * 3, dtype=torch.uint8)),
        sigmoid_nll(logits, torch.tensor([[1, 0]] * 3)),
    )
    assert torch.isfinite(sigmoid_nll(torch.tensor([[1e4, -1e4]]), torch.tensor([[0, 1]]))).all()
