"""Samples of a data set: a few training images of every class, or slices of a few volumes."""

import numpy as np
import torch
from matplotlib.figure import Figure

from moecore.data.prepared import Prepared
from moecore.report.figures.drawing import displayable_image

MOST_CLASSES = 20
PLANES = ("sagittal", "coronal", "axial")  # across the axes right, anterior, superior


def draw_dataset_samples(prepared: Prepared, shots: int = 10) -> Figure:
    """Draw ``shots`` training images of each of up to MOST_CLASSES classes, a row per class.

    For volumes: the middle slices of ``shots``, from young to old, one row per plane. For labels
    that are not classes: the first images.
    """
    images = prepared.train.images
    labels = prepared.train.labels
    by_class = prepared.task.by_class(torch.from_numpy(labels))
    if by_class is None:
        if images.ndim == 5:
            return draw_volume_montage(prepared, shots)
        number = min(shots, len(labels))
        figure = Figure(figsize=(1.2 * number, 1.6), layout="constrained")
        for image, axis in zip(
            np.asarray(images[:number]), _bare(figure, 1, number)[0], strict=True
        ):
            axis.imshow(displayable_image(image), cmap="gray", vmin=0, vmax=255)
        figure.suptitle(prepared.card["name"], fontsize=9)
        return figure
    rows, classes = by_class
    names = prepared.task.classes[:MOST_CLASSES]
    figure = Figure(figsize=(0.6 * shots + 1.6, 0.6 * len(names) + 0.4), layout="constrained")
    axes = _bare(figure, len(names), shots)
    for row, name in enumerate(names):
        axes[row, 0].set_ylabel(name, rotation=0, ha="right", va="center")
        for axis, index in zip(axes[row], rows[classes == row].tolist()[:shots], strict=False):
            axis.imshow(displayable_image(images[index]), cmap="gray", vmin=0, vmax=255)
    return figure


def draw_volume_montage(prepared: Prepared, shots: int = 8) -> Figure:
    """Draw middle slices of ``shots`` training volumes by age; * marks those with quality flags."""
    volumes = prepared.train.images
    ages = prepared.train.labels
    subjects = prepared.subjects("train")
    unit = prepared.card["task"]["unit"]
    order = np.argsort(ages, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(shots, len(order))).astype(int))]
    figure = Figure(figsize=(1.3 * len(chosen) + 0.9, 4.6), layout="constrained")
    axes = _bare(figure, len(PLANES), len(chosen))
    for column, index in enumerate(chosen):
        flags = " *" if subjects[index]["qc_flags"] else ""
        title = f"{ages[index]:.1f} {unit}, {subjects[index]['sex'] or '?'}{flags}"
        axes[0, column].set_title(title, fontsize=7)
        for axis, picture in zip(axes[:, column], middle_slices(volumes[index, 0]), strict=True):
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
    for axis, plane in zip(axes[:, 0], PLANES, strict=True):
        axis.set_ylabel(plane, fontsize=8)
    simulated = "simulated, " if prepared.card["simulated"] else ""
    title = f"{prepared.card['name']} ({simulated}{len(ages)} training volumes)"
    figure.suptitle(title, fontsize=9)
    return figure


def middle_slices(volume: np.ndarray) -> list[np.ndarray]:
    """Return the middle slice across each axis of a volume (D, H, W) in RAS order, fp32."""
    volume = volume.astype(np.float32)
    return [volume.take(length // 2, axis).T[::-1] for axis, length in enumerate(volume.shape)]


def _bare(figure: Figure, rows: int, columns: int) -> np.ndarray:
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    return axes
