import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moecore.nn.layers.attention import Attention, attend


def test_explicit_attention_equals_the_fused_kernel_with_gradients():
    query, key, value = (torch.randn(2, 3, 7, 5, requires_grad=True) for _ in range(3))
    ours = attend(query, key, value)
    theirs = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(ours, theirs)
    for mine, reference in zip(
        torch.autograd.grad(ours.square().sum(), (query, key, value)),
        torch.autograd.grad(theirs.square().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads"):
        Attention(10, 3)
