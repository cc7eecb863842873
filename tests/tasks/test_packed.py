"""How results keep the scores of images."""

import base64

import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.tasks.classification import Classification
from moecore.tasks.regression import Regression

TWO = Classification(classes=("a", "b"))
YEARS = Regression(target="age")


def test_hits_by_hand():
    # 1 0 1 0 0 0 0 0 | 1 and seven zeros: bytes 160 and 128.
    hits = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1]).bool()
    assert base64.b64decode(TWO.packed(hits)) == bytes([160, 128])


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_hits_come_back(hits):
    assert TWO.unpacked(TWO.packed(torch.tensor(hits)), len(hits)).tolist() == hits


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_errors_come_back(errors):
    scores = torch.tensor(errors, dtype=torch.float64)
    assert torch.equal(YEARS.unpacked(YEARS.packed(scores), len(errors)), scores)


def test_the_guess_that_does_not_look():
    assert YEARS.guess(torch.tensor([20.0, 40.0])) == 10
    # Of 20, 30 and 70 the median is 30: 10, 0 and 40 years off.
    assert YEARS.guess(torch.tensor([20.0, 30.0, 70.0])) == 50 / 3
    assert TWO.guess(torch.tensor([0, 0, 1])) == 0.5
