"""What a model predicts and how it routes under one changed setting (ERMoE, figures S3 and S5).

N images, T tokens per image, E experts, K classes; one record of fields (N, T, E) per MoE layer.
"""

from collections.abc import Sequence

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
    average_layers,
    expert_counts,
    load_cv2,
    normalised_entropy,
    token_entropy,
)
from moecore.statistics.intervals import Interval


class SettingLayer(Config):
    """The routing metrics of one MoE layer under one setting of its router."""

    load_cv2: float
    entropy: float
    token_entropy: float
    tail_mass: float | None
    """Eq. 12 with a threshold (None where no token has an eligible expert), else as the next."""
    tail_of_probs: float  # share of the probs outside the best k
    unchosen_mass: float
    fallback: float | None = None  # routers with a threshold only
    below_k: float | None = None


class SettingValues(SettingLayer):
    """What a model predicts under one setting, and the means over its MoE layers."""

    score: float  # the task's, with its 95 % limits
    low: float | None
    high: float | None
    layers: tuple[SettingLayer, ...]


def setting_values(
    score: Interval, records: Sequence[RoutingRecord], k: int, threshold: float | None
) -> SettingValues:
    """Return what a model predicts and how it routes, given its routers' k and threshold.

    score: the task's, of the images of ``records``.
    """
    layers = [_setting_layer(record, k, threshold) for record in records]
    return SettingValues(
        score=score.value,
        low=score.low,
        high=score.high,
        **average_layers(layers, SettingLayer.model_fields),
        layers=layers,
    )


def _setting_layer(record: RoutingRecord, k: int, threshold: float | None) -> SettingLayer:
    counts = expert_counts(record.chosen)
    tail = tail_of_probs(record.probs, k)
    scored = threshold is not None
    return SettingLayer(
        load_cv2=load_cv2(counts),
        entropy=normalised_entropy(counts),
        token_entropy=token_entropy(record.probs),
        tail_mass=tail_mass(record.logits, threshold, k) if scored else tail,
        tail_of_probs=tail,
        unchosen_mass=unchosen_mass(record.probs, record.chosen),
        fallback=fallback_rate(record.logits, threshold) if scored else None,
        below_k=below_k_rate(record.logits, threshold, k) if scored else None,
    )
