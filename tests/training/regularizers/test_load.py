import pytest
import torch

from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.training.regularizers.load import Load, load
from tests.training.regularizers.steps import record, step

CHANCES = [[[0.9, 0.3, 0.3], [0.9, 0.5, 0.1]]]


def test_value_by_hand():
    # Mean chances: 0.9, 0.4, 0.2. Mean 0.5, variance (0.16 + 0.01 + 0.09)/3 = 0.26/3: over 0.25 =
    # 1.04/3 = 0.34667.
    assert load(chances=torch.tensor(CHANCES)).item() == pytest.approx(1.04 / 3)


def test_layers_are_summed():
    assert Load()(step(record(load=CHANCES), record(load=CHANCES))).item() == pytest.approx(
        2.08 / 3
    )
    assert Load.needs == {"routing", "load"}


@pytest.mark.parametrize("training", [True, False])
def test_a_step_down_its_gradient_evens_the_load_of_a_real_router(training):
    torch.manual_seed(0)
    router = NoisyTopK(k=1).build(8, 4).train(training)
    with torch.no_grad():
        router.weight[0] += 0.1
    tokens = torch.randn(4, 50, 8) + 1

    def loss():
        torch.manual_seed(1)  # the same noise
        return load(chances=router(tokens)[1].load)

    before = loss()
    (gradient,) = torch.autograd.grad(before, router.weight)
    with torch.no_grad():
        router.weight -= 1e-3 * gradient / gradient.norm()
    assert (before - loss()).item() == pytest.approx(1e-3 * gradient.norm().item(), rel=0.1)
