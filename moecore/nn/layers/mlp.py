"""The dense feed-forward block, with timm's parameter names (``fc1``, ``fc2``)."""

from torch import Tensor
from torch.nn.functional import gelu

from moecore.core.records import RoutingContext
from moecore.nn.layers.feed_forward import FeedForward
from moecore.nn.layers.linear import linear


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
