import torch
from my_study.cosine import Cosine

from moecore.testing import check_router


def test_it_keeps_what_every_router_promises():
    check_router(Cosine(k=2))


def test_a_longer_token_goes_to_the_same_experts():
    tokens = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    router = Cosine(k=2).build(width=8, experts=4)
    assert torch.equal(router(tokens)[1].chosen, router(3 * tokens)[1].chosen)
