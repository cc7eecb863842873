"""Corruptions of digital processing. Image fp64 (C, H, W) in [0, 1], severity 1 to 5."""

import io

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates

from moecore.data.corruptions import severity_length, severity_parameter


def contrast(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Every channel is drawn towards its mean; the parameter is what stays of the difference."""
    kept = severity_parameter(
        image, severity, (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)
    )
    mean = image.mean(axis=(1, 2), keepdims=True)
    return mean + kept * (image - mean)


def elastic_transform(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Pixels are displaced by a smooth random field; parameters: its root mean square, and the
    sigma of its smoothing, in pixels.

    Our rendering: the amplitude grows with the severity and there is no random affine, while the
    benchmark goes from wide to local warps.
    """
    amplitude = severity_length(image, severity, (0.4, 0.6, 0.85, 1.15, 1.5), (2, 3, 4.5, 6.5, 9))
    sigma = severity_length(image, severity, (2.5, 2.5, 2.5, 2.5, 2.5), (10, 10, 10, 10, 10))
    fields = gaussian_filter(
        random.uniform(-1, 1, (2, *image.shape[-2:])), (0, sigma, sigma), mode="reflect"
    )
    places = np.indices(image.shape[-2:]) + amplitude * fields / np.sqrt(
        np.square(fields).mean(axis=(1, 2), keepdims=True)
    )
    return np.stack(
        [map_coordinates(channel, places, order=1, mode="reflect") for channel in image]
    )


def pixelate(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Shrunk by means over boxes to a share (the parameter) of the side, and enlarged again.

    At 32 pixels a step stronger than CIFAR-10-C, whose first two (0.95, 0.9) hardly differ.
    """
    kept = severity_parameter(
        image, severity, (0.9, 0.85, 0.75, 0.65, 0.55), (0.6, 0.5, 0.4, 0.3, 0.25)
    )
    height, width = image.shape[-2:]
    small = (max(1, int(width * kept)), max(1, int(height * kept)))
    channels = (
        channel.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.BOX)
        for channel in split_channels(image)
    )
    return np.stack([np.asarray(channel) for channel in channels]) / 255


def jpeg_compression(image: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Through a JPEG file; the parameter is its quality.

    Three channels make one colour file, any other number one greyscale file each.
    """
    quality = round(severity_parameter(image, severity, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7)))
    if len(image) == 3:
        colour = Image.fromarray(to_uint8(image).transpose(1, 2, 0))
        return np.asarray(_compress_jpeg(colour, quality)).transpose(2, 0, 1) / 255
    return (
        np.stack(
            [np.asarray(_compress_jpeg(channel, quality)) for channel in split_channels(image)]
        )
        / 255
    )


def to_uint8(image: np.ndarray) -> np.ndarray:
    """Values in [0, 1], and whatever lies outside at its nearer end, as uint8, rounded."""
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def split_channels(image: np.ndarray) -> list[Image.Image]:
    """Each channel of (C, H, W) as a greyscale picture."""
    return [Image.fromarray(channel) for channel in np.ascontiguousarray(to_uint8(image))]


def _compress_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    with Image.open(file) as stored:
        stored.load()
        return stored
