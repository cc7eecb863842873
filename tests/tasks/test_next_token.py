"""The task of the next word, against log_softmax by hand."""

import math

import pytest
import torch

from moecore.core.files import UserError
from moecore.tasks.next_token import NextToken

TASK = NextToken(words=5)


def made():
    torch.manual_seed(0)
    return torch.randn(3, 4, 5), torch.randint(5, (3, 4))


def test_loss_is_the_mean_of_nats():
    prediction, labels = made()
    each = -prediction.double().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert math.isclose(TASK.loss(prediction, labels), each.mean(), rel_tol=1e-6)
    torch.testing.assert_close(TASK.scores(prediction, labels), each.mean(dim=1))
    torch.testing.assert_close(TASK.token_loss(prediction, labels), each)
    blocks = TASK.loss(prediction, labels, reduction="none")
    torch.testing.assert_close(blocks.double(), each.mean(dim=1), rtol=1e-6, atol=1e-6)
    assert math.isclose(TASK.running(prediction, labels), 3 * each.mean(), rel_tol=1e-6)


def test_the_guess_is_the_entropy_of_the_words():
    labels = torch.tensor([[0, 0, 1, 2]])
    wanted = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert math.isclose(TASK.guess(labels), wanted)


def test_scores_are_kept_and_read_back():
    prediction, labels = made()
    scores = TASK.scores(prediction, labels)
    assert torch.equal(TASK.unpacked(TASK.packed(scores), 3), scores)
    interval = TASK.interval(scores)
    assert interval.low < interval.value < interval.high


def test_what_does_not_fit_is_refused():
    prediction, labels = made()
    with pytest.raises(ValueError, match=r"\(N, M, 5\) and \(N, M\) are needed"):
        TASK.loss(prediction[0], labels)
    with pytest.raises(UserError, match="labels run from 0 to 7; allowed: 0 to 4"):
        TASK.check(torch.tensor([[0, 7]]).numpy(), "labels")
    assert TASK.needs_classes("label_smoothing") is None
    assert TASK.needs_classes("shots") == "the labels are the words of a text"
