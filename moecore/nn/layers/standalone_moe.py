"""A mixture-of-experts layer in anybody's torch module."""

from torch import Tensor, nn

from moecore.core.files import UserError
from moecore.core.routing_records import RoutingRecord
from moecore.core.torch_internals import is_in_backward_pass
from moecore.nn.experts.base import Experts
from moecore.nn.layers.moe import build_moe_feed_forward
from moecore.nn.routers.base import Router

TOKENS_ALONE = "noisy_top_k, top_k_softmax, expert_choice, soft_slots, or hash with by: position"


class MoELayer(nn.Module):
    """A layer by itself: ``layer(tokens)`` returns tokens of the shape that it was given.

    tokens: (N, d), (B, T, d) or (B, H, W, d), floating point; ``trace`` gives its record, of fields
    (B, T, E), with T = H·W for a grid and B = 1 for (N, d).
    """

    def __init__(self, width: int, router: Router, experts: Experts) -> None:
        """``width`` is d. Raises UserError for a router that reads more than tokens, or whose own
        loss reads more than records.
        """
        super().__init__()
        check_reads_tokens_alone(router, experts)
        self.width = width
        self.feed_forward = build_moe_feed_forward(router, experts, width)
        self.records: list[RoutingRecord] | None = None  # a list inside ``trace`` only

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim < 2 or tokens.shape[-1] != self.width or not tokens.is_floating_point():
            problem = f"found {tokens.dtype} of shape {tuple(tokens.shape)}"
            allowed = f"(N, {self.width}), (B, T, {self.width}) or (B, H, W, {self.width})"
            raise UserError(f"tokens: {problem}; allowed: floating point of shape {allowed}")
        batch = 1 if tokens.ndim == 2 else len(tokens)
        output, (record,) = self.feed_forward(tokens.reshape(batch, -1, self.width))
        if self.records is not None and not is_in_backward_pass():
            self.records.append(record)
        return output.view(tokens.shape)


def check_reads_tokens_alone(router: Router, experts: Experts) -> None:
    """Raise UserError for a router that reads, or whose own loss reads, what only a whole model or
    a training knows.
    """
    lacking = sorted(router.wants - experts.provides)
    if router.phase(0.0) != router.phase(1.0):
        lacking.append("the training's progress")
    if lacking:
        problem = f"found {router.kind}, which reads {', '.join(lacking)}"
        raise UserError(f"router: {problem}; a layer by itself has none; allowed: {TOKENS_ALONE}")
    if router.own_loss is not None:
        problem = f"found {router.kind}, whose loss {router.own_loss} reads a whole model"
        raise UserError(f"router: {problem}, not its records; allowed: {TOKENS_ALONE}")
