"""The spread over experts, also over data-parallel ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, multiprocessing

from moecore.statistics.variation import squared_cv
from moecore.training.regularizers.balance import total_over_ranks
from moecore.training.regularizers.importance import importance


def test_value_by_hand():
    # (1, 2, 3, 6): mean 3, population variance (4 + 1 + 0 + 9)/4 = 3.5: 3.5/9.
    assert squared_cv(torch.tensor([1.0, 2, 3, 6])).item() == pytest.approx(3.5 / 9)


@given(st.lists(st.floats(0.125, 8), min_size=2, max_size=8), st.floats(0.125, 8))
def test_scale_does_not_matter_and_equal_values_give_0(values, scale):
    values = torch.tensor(values, dtype=torch.float64)
    assert squared_cv(values * scale).item() == pytest.approx(squared_cv(values).item(), abs=1e-12)
    assert squared_cv(torch.full_like(values, scale)).item() == pytest.approx(0, abs=1e-12)


def test_one_process_changes_nothing():
    values = torch.ones(3)
    assert total_over_ranks(values) is values


def on_rank(rank, folder):
    """The mean over ranks of each rank's gradient, as DDP takes it, for half of the batch."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    weight, tokens = torch.load(f"{folder}/inputs.pt", weights_only=True)
    weight.requires_grad_()
    loss = importance(probs=(tokens[rank : rank + 1] @ weight).softmax(-1))
    loss.backward()
    distributed.all_reduce(weight.grad)
    if rank == 0:
        torch.save((loss.detach(), weight.grad / 2), f"{folder}/outputs.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch without gloo")
def test_two_ranks_have_the_loss_and_gradient_of_the_whole_batch(tmp_path):
    weight, tokens = torch.randn(5, 4, requires_grad=True), torch.randn(2, 6, 5)
    torch.save((weight.detach(), tokens), tmp_path / "inputs.pt")
    multiprocessing.spawn(on_rank, (str(tmp_path),), nprocs=2)
    loss, gradient = torch.load(tmp_path / "outputs.pt", weights_only=True)
    expected = importance(probs=(tokens @ weight).softmax(-1))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0])
