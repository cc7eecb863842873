"""How one MoE layer uses its experts: load, entropy, the router's confidence, and who is eligible.

B images, T tokens per image, E experts; a record's fields are (B, T, E).
"""

from moecore.core.config import Config
from moecore.core.records import RoutingRecord
from moecore.measure.routing_metrics.eligibility import (
    below_k_rate,
    fallback_rate,
    tail_mass,
    tail_of_probs,
    unchosen_mass,
)
from moecore.measure.routing_metrics.expert_use import (
    Confidence,
    confidence,
    expert_counts,
    load_cv2,
    normalised_entropy,
    token_entropy,
)


class Use(Config):
    """One MoE layer's values, or the means over layers of those that all of them have.

    ``load…`` and ``entropy`` tell of the experts chosen, ``processed…`` of those that had a weight:
    under capacity or pruning they may differ.
    """

    load_cv2: float
    entropy: float
    processed_load_cv2: float
    processed_entropy: float
    processed_share: float
    experts_per_token: float
    token_entropy: float
    confidence_highest: float
    unchosen_mass: float
    tail_of_probs: float | None = None  # routers with k only
    fallback: float | None = None  # routers with a threshold only, as the next two
    below_k: float | None = None
    tail_mass: float | None = None  # None too where no token has an eligible expert


class LayerUse(Use):
    """One MoE layer's."""

    load: tuple[float, ...]  # share of the choices per expert
    confidence: Confidence


def layer_use(layer: RoutingRecord, threshold: float | None, k: int | None) -> LayerUse:
    """The metrics of one MoE layer; threshold and k: of its router, None where it has none."""
    counts = expert_counts(layer.chosen)
    used = expert_counts(layer.combine != 0)
    sure = confidence(layer.probs)
    fallback = None
    below_k = None
    tail = None
    if threshold is not None:
        fallback = fallback_rate(layer.logits, threshold)
        if k is not None:
            below_k = below_k_rate(layer.logits, threshold, k)
            tail = tail_mass(layer.logits, threshold, k)
    return LayerUse(
        load=(counts.double() / counts.sum()).tolist(),
        load_cv2=load_cv2(counts),
        entropy=normalised_entropy(counts),
        processed_load_cv2=load_cv2(used),
        processed_entropy=normalised_entropy(used),
        processed_share=float(used.sum() / counts.sum()),
        experts_per_token=float(counts.sum()) / layer.chosen[..., 0].numel(),
        unchosen_mass=unchosen_mass(layer.probs, layer.chosen),
        confidence=sure,
        confidence_highest=sure.highest,
        token_entropy=token_entropy(layer.probs),
        tail_of_probs=None if k is None else tail_of_probs(layer.probs, k),
        fallback=fallback,
        below_k=below_k,
        tail_mass=tail,
    )
