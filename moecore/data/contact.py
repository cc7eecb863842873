"""One look at a data set: a few training images of every class."""

import numpy as np
from matplotlib.figure import Figure

from moecore.data.prepared import Prepared


def contact_sheet(prepared: Prepared, shots: int = 10, most_classes: int = 20) -> Figure:
    """A figure with the first ``shots`` training images of each class, a row a class (of at most ``most_classes``)."""
    images, labels = prepared.train
    names = prepared.card["classes"][:most_classes]
    figure = Figure(figsize=(0.6 * shots + 1.6, 0.6 * len(names) + 0.4), layout="constrained")
    axes = figure.subplots(len(names), shots, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    members = labels.T if labels.ndim == 2 else labels == np.arange(len(names))[:, None]  # (K, N)
    for row, name in enumerate(names):
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axis, index in zip(axes[row], np.flatnonzero(members[row])[:shots], strict=False):
            axis.imshow(images[index].transpose(1, 2, 0).squeeze(), cmap="gray", vmin=0, vmax=255)
    return figure
