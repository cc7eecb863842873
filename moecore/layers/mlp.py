"""The dense feed-forward block, with timm's parameter names (``fc1``, ``fc2``)."""

from torch import Tensor, nn
from torch.nn.functional import gelu

from moecore.layers.linear import linear
from moecore.records import RoutingContext


class Mlp(nn.Module):
    """Linear, GELU (erf form), Linear over (B, T, width) tokens; returns them with an empty tuple of routing records."""

    wants: frozenset[str] = frozenset()

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = linear(width, hidden)
        self.fc2 = linear(hidden, width)

    def forward(self, tokens: Tensor, context: RoutingContext = RoutingContext()) -> tuple[Tensor, tuple[()]]:
        return self.fc2(gelu(self.fc1(tokens))), ()
