"""The loss of one training step, term by term."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import cross_entropy

from moecore.records import Step
from moecore.regularizers import Regularizer


class Objective(NamedTuple):
    """Cross-entropy plus weighted regularizers; called with a Step it gives the raw terms by name."""

    regularizers: Sequence[Regularizer] = ()
    label_smoothing: float = 0.0

    def terms(self, step: Step) -> dict[str, Tensor]:
        """Unweighted scalars, fp32: ``task`` and one per regularizer. Labels are (B,) classes or (B, K) shares."""
        task = cross_entropy(step.output.prediction.float(), step.batch.labels, label_smoothing=self.label_smoothing)
        return {"task": task} | {regularizer.kind: regularizer(step) for regularizer in self.regularizers}

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        """The weighted sum that is minimised."""
        return terms["task"] + sum(regularizer.weight * terms[regularizer.kind] for regularizer in self.regularizers)
