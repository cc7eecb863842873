"""Fewer images, favourite patches and models in the explorer's page, where all are too many bytes.

N images, T tokens of each, n experts of a token.
"""

from collections.abc import Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from moecore.core.encoded_arrays import decode_compressed_text, encode_arrays
from moecore.data.prepared import evenly_spaced_indices
from moecore.nn.routing_traces import BYTE

MOST_BYTES = 3_000_000  # of the page
LEAST = 0.25  # of the images, before models are left out
STEP = 0.9  # what is kept of a page that is hardly too large
BY_IMAGE = ("images", "labels", "words")  # lists with an entry an image


class KeptShare(NamedTuple):
    """How much of all that was measured the page has."""

    share: float  # of each model's images, and of each expert's favourite patches; rounded up
    models: int  # of each phase, the first ones

    def shrink(self, size: int) -> "KeptShare":
        """Return a smaller one, for a page of so many bytes, which are too many.

        Never below what fits by more than STEP: what does not shrink with the images stays.
        """
        fraction = MOST_BYTES / size
        if self.share > LEAST:
            return self._replace(share=max(LEAST, self.share * min(STEP, fraction)))
        return self._replace(models=min(self.models - 1, int(self.models * fraction)))

    def number(self, total: int) -> int:
        """Return how many of so many images, or patches, are kept."""
        return ceil(self.share * total)


def thin_model(model: dict[str, Any], kept: KeptShare) -> dict[str, Any]:
    """Return what the page knows of a model, of some images, evenly spread, and favourites alone.

    model: an explorer's ``Result`` as data, its images changed in any way under ``shown``.
    """
    total = len(model["images"])
    places = evenly_spaced_indices(total, kept.number(total)).tolist()
    tokens = model["special"] + prod(model["grid"])
    wide = [len(layer["experts"]) > BYTE for layer in model["layers"]]
    lists = {name: [model[name][place] for place in places] for name in BY_IMAGE if model[name]}
    return model | {
        **lists,
        "kinds": model["kinds"] and pick_rows(model["kinds"], total, places),
        "layers": [thin_layer(layer, kept) for layer in model["layers"]],
        "shown": [
            shown
            | {
                "picture": shown["picture"] and thin_picture(shown["picture"], places),
                "origins": shown["origins"] and pick_rows(shown["origins"], total, places),
                "trace": thin_trace(shown["trace"], tokens, wide, places),
            }
            for shown in model["shown"]
        ],
    }


def thin_layer(layer: dict[str, Any], kept: KeptShare) -> dict[str, Any]:
    """Return a layer with the first favourites of each expert, and their crops."""
    experts, rows, first = [], [], 0
    for expert in layer["experts"]:
        number = kept.number(len(expert["favourites"]))
        experts.append(expert | {"favourites": expert["favourites"][:number]})
        rows += range(first, first + number)
        first += len(expert["favourites"])
    crops = layer["crops"] and thin_picture(layer["crops"], rows)
    return layer | {"experts": experts, "crops": crops}


def thin_picture(picture: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return an ``EncodedPicture`` as data with some of its pictures."""
    total, *axes = picture["shape"]
    pixels = pick_rows(picture["pixels"], total, places)
    return {"shape": [len(places), *axes], "pixels": pixels}


def thin_trace(
    trace: dict[str, Any], tokens: int, wide: Sequence[bool], places: Sequence[int]
) -> dict[str, Any]:
    """Return ``ImageTraces`` as data of some of its images.

    wide: of each layer whether a number of an expert takes two bytes.
    """
    total = len(trace["answers"])  # an epoch of the training may have looked at more
    layers = []
    for text, is_wide in zip(trace["layers"], wide, strict=True):
        size = 2 if is_wide else 1
        number = len(decode_compressed_text(text)) // (total * tokens)  # bytes of a token
        experts = (number - size) // (size + 1)
        sizes = [tokens * one for one in (size, experts * size, experts)]
        layers.append(pick_rows(text, total, places, sizes))
    picked = {name: [trace[name][place] for place in places] for name in ("answers", "values")}
    return picked | {"layers": layers}


def pick_rows(text: str, total: int, places: Sequence[int], sizes: Sequence[int] = ()) -> str:
    """Return packed arrays, each with ``total`` rows, with some of their rows.

    text: of ``encode_arrays``; sizes: of each array the bytes of a row, () of a single one.
    """
    data = np.frombuffer(decode_compressed_text(text), np.uint8)
    parts = np.split(data, total * np.cumsum(sizes, dtype=int)[:-1])
    return encode_arrays(*(part.reshape(total, -1)[list(places)] for part in parts))
