import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from moecore.core.files import UserError
from moecore.measure.calibrators.temperature import FittedTemperature, Temperature


def drawn(images: int, temperature: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are right after division by ``temperature``: labels are drawn from
    softmax(logits / temperature).
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, 5, generator=generator)
    return logits * temperature, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, 8.0])
def test_recovers_the_temperature_that_made_the_labels(temperature):
    assert Temperature().fit(*drawn(20_000, temperature)).temperature == pytest.approx(
        temperature, rel=0.03
    )


def test_is_the_minimum_of_the_nll():
    logits, labels = drawn(500, 3.0)
    fitted = Temperature().fit(logits, labels)

    def nll(temperature: float) -> float:
        return float(cross_entropy(logits.double() / temperature, labels))

    assert not fitted.at_limit and all(
        nll(fitted.temperature) < nll(fitted.temperature * factor)
        for factor in (0.99, 1.01, 0.5, 2)
    )


def test_solves_a_case_by_hand():
    # Logit gap 2, right in 3 of 4: the mean confidence is the accuracy where σ(2/T) = 3/4, so T = 2
    # / ln 3.
    logits, labels = (
        torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]),
        torch.tensor([0, 0, 1, 1]),
    )
    assert Temperature().fit(logits, labels).temperature == pytest.approx(2 / math.log(3), rel=1e-9)


def test_keeps_order_and_survives_json():
    logits, labels = drawn(200, 2.0)
    fitted = Temperature().fit(logits, labels)
    assert torch.equal(fitted.apply(logits).argmax(1), logits.argmax(1))
    assert FittedTemperature.from_json(fitted.to_json()) == fitted


def test_says_where_no_temperature_inside_the_limits_is_best():
    labels = torch.tensor([0, 1, 0, 1])
    right = torch.nn.functional.one_hot(labels, 2).float()
    assert Temperature(lowest=0.1).fit(right, labels) == FittedTemperature(
        temperature=0.1, at_limit=True
    )
    assert Temperature(highest=9).fit(-right, labels) == FittedTemperature(
        temperature=9, at_limit=True
    )
    assert Temperature(highest=9).fit(torch.zeros(4, 2), labels) == FittedTemperature(
        temperature=9, at_limit=True
    )


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "N ≥ 1"),
        (torch.zeros(4, 3), torch.zeros(3, dtype=torch.long), "are needed"),
        (torch.tensor([[float("nan"), 0], [0, 1]]), torch.tensor([0, 1]), "1 of 2"),
        (torch.tensor([[float("inf"), 0], [0, 1]]), torch.tensor([0, 1]), "infinite"),
        (torch.zeros(2, 3), torch.tensor([1, 1]), "of class 1"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "0 to 2"),
    ],
)
def test_refuses_in_one_sentence(logits, labels, words):
    with pytest.raises(UserError, match=words):
        Temperature().fit(logits, labels)
