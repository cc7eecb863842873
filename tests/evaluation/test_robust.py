import base64

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.evaluation.intervals import wilson
from moecore.evaluation.robust import packed, score, unpacked, worst_case


def test_score_by_hand():
    low, high = wilson(3, 4)[1:]
    assert score(torch.tensor([True, False, True, True])) == {"accuracy": 0.75, "low": low, "high": high, "correct": 3}


def test_packed_by_hand():
    # 1 0 1 0 0 0 0 0 | 1 and seven zeros: bytes 160 and 128.
    hits = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 1]).bool()
    assert base64.b64decode(packed(hits)) == bytes([160, 128])


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_unpacked_is_what_was_packed(hits):
    assert unpacked(packed(torch.tensor(hits)), len(hits)).tolist() == hits


def row(epsilon: float, hits: list[int]) -> dict:
    return {"epsilon": epsilon, "hits": packed(torch.tensor(hits).bool())}


def test_worst_case_by_hand():
    curves = {"a": [row(0, [1, 1, 1]), row(0.1, [1, 0, 1])], "b": [row(0, [1, 1, 1]), row(0.1, [1, 1, 0])], "idle": None}
    found = worst_case(curves, 3)
    assert [(line["epsilon"], line["correct"]) for line in found] == [(0, 3), (0.1, 1)] and found[1]["accuracy"] == pytest.approx(1 / 3)
    assert worst_case({"idle": None}, 3) == []


def test_worst_case_refuses_other_epsilons():
    with pytest.raises(ValueError, match="different epsilons"):
        worst_case({"a": [row(0.1, [1])], "b": [row(0.2, [1])]}, 1)
