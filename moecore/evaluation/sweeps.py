"""One row of a sweep at test time: what a model predicts and how it routes under one changed setting (ERMoE, figures S3 and S5).

N images, T tokens per image, E experts, K classes; one record of fields (N, T, E) per MoE layer.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moecore.evaluation.classification import correct
from moecore.evaluation.eligibility import below_k_rate, fallback_rate, tail_mass, tail_of_probs, unchosen_mass
from moecore.evaluation.intervals import wilson
from moecore.evaluation.regression import absolute_error
from moecore.evaluation.robust_errors import error_score
from moecore.evaluation.routing import expert_counts, load_cv2, normalised_entropy, token_entropy
from moecore.records import RoutingRecord, real


def row(logits: Tensor, labels: Tensor, records: Sequence[RoutingRecord], k: int, threshold: float | None) -> dict[str, Any]:
    """Accuracy with its Wilson interval, the routing metrics' means over the MoE layers, and each layer's under ``layers``.

    logits: (N, K); labels: (N,).  For real labels, of predictions (N, 1), ``mae`` stands in the place of accuracy.
    ``tail_mass`` is eq. 12 where there is a ``threshold``, else the share of the probs outside the best k
    (``tail_of_probs``), which is there for all.  A mean is None where a layer has no value: eq. 12 needs an eligible expert.
    """
    layers = [_layer(record, k, threshold) for record in records]
    return {**_standing(logits, labels), **_means(layers), "layers": layers}


def _standing(logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    if real(labels):
        return error_score(absolute_error(logits, labels))
    hits = correct(logits, labels)
    accuracy = wilson(int(hits.sum()), len(hits))
    return {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high}


def _layer(record: RoutingRecord, k: int, threshold: float | None) -> dict[str, float | None]:
    counts, tail = expert_counts(record.chosen), tail_of_probs(record.probs, k)
    values = {
        "load_cv2": load_cv2(counts), "entropy": normalised_entropy(counts), "token_entropy": token_entropy(record.probs),
        "tail_mass": tail, "tail_of_probs": tail, "unchosen_mass": unchosen_mass(record.probs, record.chosen),
    }  # fmt: skip
    if threshold is None:
        return values
    scores = record.logits
    values |= {"fallback": fallback_rate(scores, threshold), "below_k": below_k_rate(scores, threshold, k)}
    return values | {"tail_mass": tail_mass(scores, threshold, k)}


def _means(layers: list[dict[str, float | None]]) -> dict[str, float | None]:
    columns = {name: [layer[name] for layer in layers] for name in layers[0]}
    return {name: None if None in values else sum(values) / len(values) for name, values in columns.items()}
