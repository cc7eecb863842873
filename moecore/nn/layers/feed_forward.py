"""What a block's feed-forward is, dense or with experts."""

from torch import nn


class FeedForward(nn.Module):
    """``feed_forward(tokens, context)`` with tokens (B, T, d) returns (tokens (B, T, d), records).

    ``wants`` names the fields of the RoutingContext that it reads.
    """

    wants: frozenset[str] = frozenset()
