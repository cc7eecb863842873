import torch
from my_study.cosine import Cosine

TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def test_each_token_has_k_experts_whatever_its_length():
    router = Cosine(k=2).build(width=8, experts=4)
    _, record = router(TOKENS)
    _, longer = router(3 * TOKENS)
    assert (record.chosen.sum(dim=-1) == 2).all()
    assert torch.equal(record.chosen, longer.chosen)


def test_a_gradient_reaches_the_directions():
    router = Cosine(k=1).build(width=8, experts=4)
    _, record = router(TOKENS)
    record.combine.sum().backward()
    assert router.directions.grad.abs().sum() > 0
