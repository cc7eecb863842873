import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.training.regularizers.jensen_shannon import JensenShannon, jensen_shannon
from tests.training.regularizers.test_pairwise_consistency import SPREAD, two_views

# p = (1, 0), q = (½, ½), m = (¾, ¼): KL(p ‖ m) = ln(4/3); KL(q ‖ m) = ½ ln(2/3) + ½ ln 2 = ½
# ln(4/3). Half their sum:
VALUE = 0.75 * math.log(4 / 3)
FIRST, SECOND = (
    torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]),
    torch.tensor([[[0.5, 0.5], [0.0, 1.0]]]),
)  # the second pair: ln 2


def test_value_by_hand():
    both, one = torch.tensor([[True, True]]), torch.tensor([[True, False]])
    assert jensen_shannon(first=FIRST, second=SECOND, found=both).item() == pytest.approx(
        (VALUE + math.log(2)) / 2
    )
    assert jensen_shannon(first=FIRST, second=SECOND, found=one).item() == pytest.approx(VALUE)
    assert jensen_shannon(first=FIRST, second=SECOND, found=~both).item() == 0


@given(st.integers(0, 1000), st.floats(0.1, 30))
def test_bounds_and_symmetries(seed, sharpness):
    generator = torch.Generator().manual_seed(seed)
    first, second = (
        sharpness * torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    ).softmax(-1)
    found = torch.rand(3, 5, generator=generator) < 0.5
    found[0, 0] = True
    value = jensen_shannon(first=first, second=second, found=found)
    assert -1e-12 <= value.item() <= math.log(2) + 1e-12
    torch.testing.assert_close(jensen_shannon(first=second, second=first, found=found), value)
    names = torch.randperm(4)
    torch.testing.assert_close(
        jensen_shannon(first=first[..., names], second=second[..., names], found=found), value
    )
    assert jensen_shannon(first=first, second=first, found=found).item() == 0


def test_gradient():
    first, second = torch.randn(2, 2, 3, 4, dtype=torch.float64).softmax(-1).unbind()
    found = torch.tensor([[True, True, False]] * 2)
    first, second = first.requires_grad_(), second.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: jensen_shannon(first=a, second=b, found=found), (first, second)
    )


def test_probabilities_of_zero_stay_finite():
    first, second = FIRST.clone().requires_grad_(), FIRST.flip(-1).clone().requires_grad_()
    for other in (second, first):  # no expert in common; equal, with a shared zero
        loss = jensen_shannon(first=first, second=other, found=torch.tensor([[True, True]]))
        loss.backward()
        assert loss.isfinite() and first.grad.isfinite().all()
    assert second.grad.isfinite().all()


def test_layers_are_summed_and_pairs_come_from_the_affines():
    # View 2 shows view 1's patch 0 as its patch 1: tokens 1 and 2 are the only pair, p = (1, 0)
    # with q = (½, ½).
    e0, e1, even = torch.tensor([1.0, 0]), torch.tensor([0, 1.0]), torch.tensor([0.5, 0.5])
    layer = torch.stack([torch.stack([e0, e0, e1]), torch.stack([e1, e1, even])])
    moved = two_views(layer, layer, move=4)
    assert JensenShannon(weight=7.0)(moved).item() == pytest.approx(2 * VALUE)
    assert JensenShannon(special=True)(moved).item() == pytest.approx(
        VALUE + math.log(2)
    )  # each layer: (VALUE + ln 2)/2
    assert (
        JensenShannon.needs == {"routing", "two_views"}
        and JensenShannon().weight == 5e-3
        and not JensenShannon().special
    )


def test_one_view_is_refused():
    with pytest.raises(UserError, match=r"jensen_shannon: the batch has 1 view\(s\)"):
        JensenShannon()(two_views(SPREAD, views=1))
