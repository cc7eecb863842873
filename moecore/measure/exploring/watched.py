"""The routing of the explorer's first test images after some epochs of a training.

What was seen is kept beside the checkpoint, so a training that was killed reports all of them.
Nothing is decided by it: the images are only looked at.
"""

from pathlib import Path

import numpy as np

from moecore.core.files import read_json, write_json
from moecore.data.prepared import Prepared
from moecore.nn.backbones.base_model import Model
from moecore.nn.predict import predict_in_batches
from moecore.nn.routing_traces import ImageTraces, build_image_traces
from moecore.training.outcome import WatchedEpoch

IMAGES = 32  # the most that the explorer shows
VOLUMES = 6  # the same of volumes, which are large
EPOCHS = 12


def spread_places(total: int, number: int) -> list[int]:
    """``number`` of ``total`` places, spread evenly, all where there are fewer.

    The first ones stay when ``number`` grows: they follow van der Corput's sequence of base 2, so
    the first, the middle one, those at the quarters, and so on.
    """
    places: dict[int, None] = {}
    step = 0
    while len(places) < min(number, total):
        place = int(f"{step:b}"[::-1], 2) * total >> step.bit_length()
        places.setdefault(place)
        step += 1
    return list(places)


def explorer_image_indices(data: Prepared, number: int) -> list[int]:
    """The places in the test split of the first images that the explorer shows."""
    images = data.test.images
    most = VOLUMES if images.ndim == 5 else IMAGES
    return spread_places(len(images), min(number, most))


def watched_epochs(epochs: int) -> tuple[int, ...]:
    """At most EPOCHS of ``epochs``, from 1, evenly spread; the last is always there."""
    spread = np.linspace(epochs, 1, min(epochs, EPOCHS)).round().astype(int)
    return tuple(np.unique(spread).tolist())


def write_epoch_trace(folder: Path, epoch: int, model: Model, data: Prepared) -> None:
    """Write into ``folder`` what the model does with the images after ``epoch``."""
    images = np.array(data.test.images[explorer_image_indices(data, IMAGES)])
    prediction, records = predict_in_batches(model, images, batch=IMAGES)
    seen = build_image_traces(prediction, records, data.task, model.layouts)
    write_json(_trace_path(folder, epoch), seen.model_dump(mode="json"))


def read_epoch_traces(folder: Path, data: Prepared, epochs: int) -> tuple[WatchedEpoch, ...]:
    """Return what was kept in ``folder``; raises UserError where an epoch is missing."""
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
