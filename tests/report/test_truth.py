"""What the page says of experts and truth: the share of routing's worth that a method finds."""

import numpy as np
import pytest

from moecore.measure.truth import Result
from moecore.report.measures.truth import phase_blocks, share_of_routings_worth
from moecore.report.typed_results import Measured, Phase
from moecore.statistics.crossed import encode_item_values
from moecore.tasks.classification import Classification
from moecore.tasks.next_token import NextToken
from moecore.training.outcome import Outcome

RIGHT = {"dense": 4, "vmoe": 6, "told": 9}  # of ten images


def trained(right: int, seed: int) -> Measured:
    scores = (np.arange(10) + seed) % 10 < right
    outcome = Outcome.model_construct(test_items=encode_item_values(scores.astype(float)))
    return Measured({Outcome: outcome, Result: Result(images=10, layers=())})


def phase(**right: int) -> Phase:
    models = {
        method: {seed: trained(number, seed) for seed in range(3)}
        for method, number in right.items()
    }
    return Phase("pretrain", {}, Classification(classes=("a", "b")), models)


def test_a_method_between_floor_and_ceiling():
    """(6 - 4) / (9 - 4) of ten images, with each seed."""
    share = share_of_routings_worth(phase(**RIGHT), "vmoe")
    assert share.value == pytest.approx(0.4) and (share.seeds, share.items) == (3, 10)
    (block,) = phase_blocks(phase(**RIGHT))
    said = [line for line in block.words if line.startswith("vmoe finds 40 % [")]
    assert len(said) == 1 and not any(line.startswith("told") for line in block.words)


def test_of_a_text_less_is_better():
    nats = {name: 10 - number for name, number in RIGHT.items()}
    share = share_of_routings_worth(phase(**nats)._replace(task=NextToken(words=9)), "vmoe")
    assert share.value == pytest.approx(0.4)


@pytest.mark.parametrize("method", RIGHT)
def test_without_floor_or_ceiling_or_worth_there_is_no_share(method):
    others = {name: number for name, number in RIGHT.items() if name != method}
    assert share_of_routings_worth(phase(**others), "vmoe") is None
    assert share_of_routings_worth(phase(**RIGHT | {"told": 4}), method) is None
