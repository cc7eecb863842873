"""``python -m benchmarks.feeding``: how fast images are read, and what all of ImageNet takes."""

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.timing import time_fastest_call
from moecore.core.streams import generator_for
from moecore.data.files.decode import decode_image, decode_jpeg_to_pil, resize_and_encode_jpeg
from moecore.data.layouts.images import channel_moments
from moecore.data.views.random_views import CropRanges, ViewSettings, make_random_views
from moecore.data.views.warping import MixedSizeImageList, cut_parts_seen_by_views

IMAGENET = 1_281_167  # training images
PHOTO = (500, 375)  # pixels, the size of most images
SEVERAL = 32


class Feeding(NamedTuple):
    """Rates in images per second and core, except where noted, of two photos (JPEG, 500 × 375)."""

    decoded_224: float  # prepare, raw
    decoded_256: float
    packed_256: float  # prepare, short_side: 256
    unpacked_256: float  # training on them: decoding
    cut_224: float  # … and cutting out random resized crops, which the device resizes
    taken_224: float  # training on raw: gathered from memory
    sha256: float  # bytes per second
    counted: float  # bytes per second, of the histogram for mean and std
    packed_bytes: float  # per image


def feeding(repeats: int = 60) -> Feeding:
    """Measure all rates in one thread, on files that are in the page cache."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, pixels in enumerate(load_sample_images().images):
            paths.append(Path(folder) / f"{number}.jpg")
            photo = Image.fromarray(pixels).resize(PHOTO, Image.Resampling.BICUBIC)
            photo.save(paths[-1], quality=95)
        return _rates(paths, repeats)


def _rates(paths: list[Path], repeats: int) -> Feeding:
    packed = [resize_and_encode_jpeg(path, 256, 3) for path in paths]
    whole = [np.asarray(decode_jpeg_to_pil(one.content, 3)) for one in packed] * (SEVERAL // 2)
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (4096, 3, 224, 224), np.uint8)  # more than a cache holds
    out = np.empty((128, *raw.shape[1:]), np.uint8)
    uneven = MixedSizeImageList(whole, 224, torch.device("cpu"))
    crop = ViewSettings(crop=CropRanges(scale=(0.08, 1.0)))
    affines = make_random_views(uneven, crop, generator_for(0)).affines.double()
    content = raw[:256].tobytes()

    def a_second(run, number: float) -> float:
        return number / time_fastest_call(run, repeats)

    each = len(paths)
    return Feeding(
        a_second(lambda: [decode_image(path, 224, 3) for path in paths], each),
        a_second(lambda: [decode_image(path, 256, 3) for path in paths], each),
        a_second(lambda: [resize_and_encode_jpeg(path, 256, 3) for path in paths], each),
        a_second(lambda: [np.asarray(decode_jpeg_to_pil(one.content, 3)) for one in packed], each),
        a_second(lambda: cut_parts_seen_by_views(uneven, affines, (224, 224), "zeros"), SEVERAL),
        a_second(lambda: np.take(raw, random.permutation(4096)[:128], 0, out, "clip"), 128),
        a_second(lambda: hashlib.sha256(content).digest(), len(content)),
        a_second(lambda: channel_moments(raw[:256]), len(content)),
        sum(len(one.content) for one in packed) / each,
    )


def imagenet(rates: Feeding, cores: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield format, GB on disk, hours of ``prepare``, and training images per second and core.

    ``prepare`` is assumed to use ``cores`` cores, except for the hash: one thread.
    """
    for side, decoded in ((224, rates.decoded_224), (256, rates.decoded_256)):
        size = IMAGENET * 3 * side**2
        counted = size / rates.counted / cores
        taken = rates.taken_224 * (224 / side) ** 2
        yield (
            f"raw, {side}²",
            size / 1e9,
            (IMAGENET / decoded / cores + counted + size / rates.sha256) / 3600,
            taken,
        )
    size = IMAGENET * rates.packed_bytes
    hours = (IMAGENET / rates.packed_256 / cores + size / rates.sha256) / 3600
    both = 1 / (1 / rates.unpacked_256 + 1 / rates.cut_224)
    yield "jpeg, short side 256, quality 95", size / 1e9, hours, both


def main() -> None:
    """Print the rates, and ImageNet's training images from them."""
    rates = feeding()
    for name, rate in rates._asdict().items():
        print(f"{name:14} {rate:14,.0f}")
    print("\n| ImageNet as | GB | hours, 8 cores | hours, 64 cores | images/s a core |")
    print("|---|---:|---:|---:|---:|")
    for few, many in zip(imagenet(rates, 8), imagenet(rates, 64), strict=True):
        print(f"| {few[0]} | {few[1]:.0f} | {few[2]:.2f} | {many[2]:.2f} | {few[3]:,.0f} |")


if __name__ == "__main__":
    main()
