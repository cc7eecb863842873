"""Routing of the explorer's first test images after some epochs of a training.

Traces are stored next to the checkpoint, so that a resumed training reports all epochs. Nothing is
selected by them.
"""

from pathlib import Path

import numpy as np

from moecore.core.files import read_json, write_json
from moecore.data.prepared import Prepared
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.nn.routing_traces import ImageTraces, build_image_traces
from moecore.training.outcome import WatchedEpoch

IMAGES = 32  # the largest number in the explorer
VOLUMES = 6  # fewer, as volumes are large
MAX_EPOCHS = 12


def spread_places(total: int, number: int) -> list[int]:
    """Return ``number`` evenly spread indices below ``total``, or all.

    A larger number extends the list: the indices follow van der Corput's sequence of base 2, that
    is start, middle, quarters, and so on.
    """
    places: dict[int, None] = {}
    step = 0
    while len(places) < min(number, total):
        place = int(f"{step:b}"[::-1], 2) * total >> step.bit_length()
        places.setdefault(place)
        step += 1
    return list(places)


def explorer_image_indices(data: Prepared, number: int) -> list[int]:
    """Return indices in the test split of the first images that the explorer shows."""
    images = data.test.images
    limit = VOLUMES if images.ndim == 5 else IMAGES
    return spread_places(len(images), min(number, limit))


def watched_epochs(epochs: int) -> tuple[int, ...]:
    """Return at most MAX_EPOCHS of ``epochs``, from 1, evenly spread, with the last."""
    spread = np.linspace(epochs, 1, min(epochs, MAX_EPOCHS)).round().astype(int)
    return tuple(np.unique(spread).tolist())


def write_epoch_trace(folder: Path, epoch: int, model: Model, data: Prepared) -> None:
    """Write predictions and routing of the explorer's images after ``epoch``."""
    images = np.array(data.test.images[explorer_image_indices(data, IMAGES)])
    prediction, records = predict_in_batches(model, images, batch=IMAGES)
    traces = build_image_traces(prediction, records, data.task, model.layouts)
    write_json(_trace_path(folder, epoch), traces.model_dump(mode="json"))


def read_epoch_traces(folder: Path, data: Prepared, epochs: int) -> tuple[WatchedEpoch, ...]:
    """Return what ``write_epoch_trace`` wrote; raise UserError if an epoch is missing."""
    places = explorer_image_indices(data, IMAGES)
    return tuple(
        WatchedEpoch(
            epoch=epoch,
            images=places,
            trace=ImageTraces.model_validate(read_json(_trace_path(folder, epoch))),
        )
        for epoch in watched_epochs(epochs)
    )


def _trace_path(folder: Path, epoch: int) -> Path:
    return folder / "traces" / f"{epoch:04d}.json"
