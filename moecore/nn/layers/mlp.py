"""The dense layers of a transformer, with timm's parameter names (``fc1``, ``fc2``), and what a
feed-forward is.
"""

from torch import Tensor, nn
from torch.nn.functional import gelu

from moecore.core.records import RoutingContext


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A Linear with truncated-normal weights (std 0.02) and zero bias: the start of ViT and DeiT
    (timm's scheme).
    """
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class FeedForward(nn.Module):
    """``feed_forward(tokens, context)`` with tokens (B, T, d) returns (tokens (B, T, d), records).

    ``wants`` names the fields of the RoutingContext that it reads.
    """

    wants: frozenset[str] = frozenset()


class Mlp(FeedForward):
    """Linear, GELU (erf form), Linear over (B, T, width) tokens; returns them with an empty tuple
    of routing records.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = linear(width, hidden)
        self.fc2 = linear(hidden, width)

    def forward(
        self, tokens: Tensor, context: RoutingContext = RoutingContext()
    ) -> tuple[Tensor, tuple[()]]:
        return self.fc2(gelu(self.fc1(tokens))), ()
