"""Small real files in the real formats, for the tests of the data sources."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
from PIL import Image


def idx_bytes(array: np.ndarray) -> bytes:
    """A uint8 array as the content of an IDX file."""
    return (
        bytes((0, 0, 8, array.ndim))
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(np.uint8).tobytes()
    )


def fashion_folder(
    folder: Path, train: int = 200, test: int = 60, packed: bool = True
) -> dict[str, str]:
    """The four files of a tiny Fashion-MNIST; returns {name: sha256 of the content}."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for part, number in (("train", train), ("t10k", test)):
        arrays = {
            "images-idx3": random.integers(0, 256, (number, 28, 28)),
            "labels-idx1": np.arange(number) % 10,
        }
        for what, array in arrays.items():
            name = f"{part}-{what}-ubyte"
            content = idx_bytes(array)
            hashes[name] = hashlib.sha256(content).hexdigest()
            (folder / (name + ".gz" * packed)).write_bytes(
                gzip.compress(content) if packed else content
            )
    return hashes


def cifar_content(labels: np.ndarray, seed: int = 0) -> bytes:
    """Records of CIFAR's binary version; labels: (N, label bytes)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), np.uint8)
    return np.concatenate([labels.astype(np.uint8), pixels], 1).tobytes()


def image_classes(
    folder: Path,
    classes: dict[str, int],
    size: tuple[int, int] = (20, 14),
    mode: str = "RGB",
    suffix: str = ".png",
) -> None:
    """Class folders of random images, ``size`` = (width, height)."""
    random = np.random.default_rng(len(str(folder.name)))
    for name, number in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            pixels = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{i:03}{suffix}")
