"""What a trace knows of each token: what its experts may tell. N items, T tokens of a layer."""

import numpy as np
import torch
from torch import Tensor

from moecore.lens.traces import Trace
from moecore.measure.routing_metrics.expert_information import FEWEST
from moecore.measure.routing_metrics.token_labels import mask_rare_words


class TokenLabels:
    """Labels of some items of a trace, read once; ``remarks`` say what is left out, and why."""

    def __init__(self, trace: Trace, places: np.ndarray) -> None:
        """``places``: of the items, (N,)."""
        self.layers = trace.card.layers
        self.items = len(places)
        self.known: dict[str, Tensor] = {}
        self.remarks: list[str] = []
        for name, kind in (("positions", "position"), ("labels", "label"), ("tokens", "word")):
            values = trace.beside(name, places)
            if values is not None:
                self.known[kind] = values
        if "word" in self.known:
            self.known["word"] = torch.from_numpy(mask_rare_words(self.known["word"].numpy()))
        if self.items < FEWEST:
            problem = f"found {self.items} items; allowed: {FEWEST} and more, as they are exchanged"
            self.remarks.append(
                f"purity, and what experts tell of labels and words: {problem} to know chance"
            )
        elif "label" in self.known and len(self.known["label"].clamp_min(-1).unique()) < 2:
            self.remarks.append("purity: found one label; allowed: two and more")

    def by_kind(self, number: int, before: Tensor | None) -> dict[str, Tensor]:
        """Return kind → labels of a layer's tokens, (N or 1, T or 1), −1 where unknown.

        before: first experts of the layer before it, (N, T') or None.  Labels of other tokens than
        this layer's are left out, and of too few items all but positions.
        """
        tokens = self.layers[number].tokens
        labels = {"position": torch.arange(tokens)[None]}
        given = self.known if before is None else self.known | {"layer_before": before}
        for kind, values in given.items():
            values = values[:, None] if values.ndim == 1 else values
            fits = values.shape[1] in (1, tokens)
            if fits and values.max() >= 0 and (kind == "position" or self.items >= FEWEST):
                labels[kind] = number_from_zero(values)
        return labels


def number_from_zero(labels: Tensor) -> Tensor:
    """Return labels of any size as 0, 1, …, in their order, and −1 for those below 0."""
    known = labels >= 0
    places = torch.full_like(labels, -1)
    places[known] = labels[known].unique(return_inverse=True)[1]
    return places
