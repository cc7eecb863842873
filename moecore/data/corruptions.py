"""Fifteen seeded corruptions of images (after Hendrycks & Dietterich, 2019, §4), and noise.

These are our own renderings for images of at least 8 × 8 pixels with any number of channels, not
the benchmark's files: errors are not comparable with published ones. Noise, blur, contrast,
brightness, pixelation and JPEG follow its recipes; frost, fog, snow and the elastic transform are
procedural, without photographs of ice or snow.

A corruption takes an image fp64 (C, H, W) in [0, 1] and a severity from 1 to 5. The benchmark has
two sets of parameters: for 224 pixels (ImageNet-C) and, milder, for 32 pixels (CIFAR-10-C). Both
are given here; between the two sides a parameter is interpolated geometrically in the image's
shorter side. Below 32 pixels it stays at its value for 32; above 224 lengths grow with the side.
"""

import hashlib
import io
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy
import torch
from numpy import ndarray
from numpy.random import Generator
from PIL import Image
from torch import Tensor

from moecore.core.files import UserError
from moecore.core.streams import generator_for
from moecore.data.views.augmentations import LUMA

# image sides, in pixels, of the two sets of parameters
SMALL_SIDE = 32
LARGE_SIDE = 224
PerSeverity = tuple[float, float, float, float, float]  # one positive value per severity, 1 to 5
NUMBER_OF_ZOOMS = 11  # enlargements averaged by zoom_blur
NOISE_SIGMAS = (0.05, 0.1, 0.2)  # default levels of Gaussian noise on pixels in [0, 1]


class SeverityAtSize(NamedTuple):
    step: int  # 1 to 5
    side: int  # the shorter of the image, pixels

    def parameter(self, small: PerSeverity, large: PerSeverity) -> float:
        """Interpolate between values for sides of 32 (``small``) and 224 pixels (``large``)."""
        position = math.log(self.side / SMALL_SIDE) / math.log(LARGE_SIDE / SMALL_SIDE)
        low = small[self.step - 1]
        high = large[self.step - 1]
        return low * (high / low) ** min(max(position, 0.0), 1.0)

    def length(self, small: PerSeverity, large: PerSeverity) -> float:
        return self.parameter(small, large) * max(1.0, self.side / LARGE_SIDE)


def interpolate_at_rows_and_columns(image: ndarray, rows: ndarray, columns: ndarray) -> ndarray:
    """Interpolate an image (C, H, W) at rows (h,) and columns (w,); return (C, h, w)."""
    return _interpolate_along(_interpolate_along(image, rows, -2), columns, -1)


def _interpolate_along(image: np.ndarray, positions: np.ndarray, axis: int) -> np.ndarray:
    positions = np.clip(positions, 0, image.shape[axis] - 1)
    low = np.minimum(positions.astype(int), max(image.shape[axis] - 2, 0))
    fraction = positions - low
    if axis == -2:
        fraction = fraction[:, None]
    high = np.minimum(low + 1, image.shape[axis] - 1)
    return np.take(image, low, axis) * (1 - fraction) + np.take(image, high, axis) * fraction


def cloud_field(size: tuple[int, int], roughness: float, rng: Generator, cells: int = 1) -> ndarray:
    """Return a random cloud (H, W) in [0, 1]: a sum of smooth noise on ever finer grids."""
    # cells: per side of the coarsest grid. roughness: amplitude ratio of a grid and the next one.
    field = np.zeros(size)
    height = 1.0
    while cells <= max(size):
        grid = rng.uniform(-1, 1, (1, cells + 1, cells + 1))
        places = (np.linspace(0, cells, number) for number in size)
        field += height * interpolate_at_rows_and_columns(grid, *places)[0]
        cells = cells * 2
        height = height / roughness
    return (field - field.min()) / (field.max() - field.min())


def gaussian_noise(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    sigma = severity.parameter((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38))
    return image + sigma * random.standard_normal(image.shape)


def shot_noise(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Add Poisson noise: pixel values become photon counts, fewer at higher severity."""
    photons = severity.parameter((500, 250, 100, 75, 50), (60, 25, 12, 5, 3))
    return random.poisson(image * photons) / photons


def impulse_noise(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Set random values to 0 or 1 (salt and pepper); their share grows with the severity."""
    amount = severity.parameter((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))
    uniform = random.random(image.shape)
    return np.where(uniform < amount / 2, 0.0, np.where(uniform < amount, 1.0, image))


def defocus_blur(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    radius = severity.length((0.7, 0.9, 1.1, 1.4, 1.8), (3, 4, 6, 8, 10))
    return apply_kernel(image, disk_kernel(radius))


def glass_blur(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Blur, swap every pixel, including the border, with random pixels near it, and blur again."""
    sigma = severity.length((0.25, 0.3, 0.32, 0.35, 0.4), (0.7, 0.9, 1.0, 1.1, 1.5))
    reach = round(severity.length((1, 1, 1, 1, 1), (1, 1, 2, 2, 3)))
    # One sweep per severity: in small images, with swaps of one pixel, only sweeps get stronger.
    order = swapped_order(image.shape[-2:], reach, severity.step, random)
    mixed = gaussian_smooth(image, sigma).reshape(len(image), -1)[:, order].reshape(image.shape)
    return gaussian_smooth(mixed, sigma)


def motion_blur(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Blur in a random direction, −45° to 45°; the trail's length grows with the severity."""
    sigma = severity.length((1, 1.5, 2, 2.5, 3.2), (3, 5, 8, 12, 15))
    return apply_kernel(image, motion_kernel(sigma, random.uniform(-45, 45)))


def zoom_blur(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Average the image and enlarged copies; the largest factor grows with the severity."""
    largest = severity.parameter((1.05, 1.1, 1.15, 1.2, 1.25), (1.1, 1.15, 1.2, 1.25, 1.3))
    centres = [(number - 1) / 2 for number in image.shape[-2:]]
    total = image.copy()
    for zoom in np.linspace(1, largest, NUMBER_OF_ZOOMS):
        axes = zip(centres, image.shape[-2:], strict=True)
        places = (centre + (np.arange(number) - centre) / zoom for centre, number in axes)
        total += interpolate_at_rows_and_columns(image, *places)
    return total / (NUMBER_OF_ZOOMS + 1)


def apply_kernel(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Return the image (C, H, W) with each channel correlated with the kernel (h, w)."""
    return scipy.ndimage.correlate(image, kernel[None], mode="nearest")


def gaussian_smooth(image: np.ndarray, sigma: float) -> np.ndarray:
    return scipy.ndimage.gaussian_filter(image, (0, sigma, sigma), mode="nearest")


def disk_kernel(radius: float) -> np.ndarray:
    """Return the kernel (h, h), with sum 1, of a disk; its edge is smoothed over one pixel."""
    reach = math.ceil(radius)
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    weights = np.clip(radius + 0.5 - np.hypot(rows, columns), 0, 1)
    return weights / weights.sum()


def motion_kernel(sigma: float, degrees: float) -> np.ndarray:
    """Return the kernel (h, h), sum 1, of a trail from the centre (0 degrees: right, 90: down)."""
    # Weights exp(−t² / 2σ²) up to 3σ, in half pixels, each spread over its four nearest pixels.
    reach = math.ceil(3 * sigma) + 1
    steps = np.arange(0, 3 * sigma, 0.5)
    weights = np.exp(-((steps / sigma) ** 2) / 2)
    angle = math.radians(degrees)
    rows = reach + steps * math.sin(angle)
    columns = reach + steps * math.cos(angle)
    first_row = rows.astype(int)
    first_column = columns.astype(int)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for down in (0, 1):
        for right in (0, 1):
            share = abs(1 - down - (rows - first_row)) * abs(1 - right - (columns - first_column))
            np.add.at(kernel, (first_row + down, first_column + right), weights * share)
    return kernel / kernel.sum()


def swapped_order(size: tuple[int, int], reach: int, sweeps: int, random: Generator) -> list[int]:
    """Swap each pixel with one within ``reach``, ``sweeps`` times; return flat source indices."""
    order = list(range(size[0] * size[1]))
    rows, columns = (axis.ravel() for axis in np.indices(size))
    for _ in range(sweeps):
        down, right = random.integers(-reach, reach + 1, (2, len(order)))
        row = np.clip(rows + down, 0, size[0] - 1)
        partners = row * size[1] + np.clip(columns + right, 0, size[1] - 1)
        for index, partner in enumerate(partners.tolist()):
            order[index], order[partner] = order[partner], order[index]
    return order


def snow(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Whiten the image; add flakes (smeared peaks of a random field) twice, once turned by 180°."""
    # The severity sets the field's mean (more flakes), the trail in pixels, and the unwhitened
    # share of the image. Trails have a direction between 45° and 135° (90° is down).
    flake = severity.length((1.5, 1.5, 1.5, 1.5, 1.5), (3, 3, 3, 3, 3))
    mean = severity.parameter((0.1, 0.15, 0.2, 0.25, 0.3), (0.15, 0.25, 0.35, 0.45, 0.55))
    image_share = severity.parameter((0.95, 0.92, 0.88, 0.84, 0.8), (0.8, 0.75, 0.7, 0.65, 0.55))
    size = image.shape[-2:]
    coarse = random.normal(mean, 0.3, (1, *(int(np.ceil(number / flake)) + 1 for number in size)))
    field = interpolate_at_rows_and_columns(coarse, *(np.arange(number) / flake for number in size))
    peaks = np.where(field < 0.5, 0.0, np.clip(field, 0, 1))
    sigma = severity.length((1, 1.2, 1.4, 1.6, 1.8), (4, 5, 6, 8, 10))
    layer = apply_kernel(peaks, motion_kernel(sigma, random.uniform(45, 135)))
    if len(image) == 3:
        grey = np.tensordot(np.array(LUMA), image, 1)[None]
    else:
        grey = image.mean(axis=0, keepdims=True)
    whitened = image_share * image + (1 - image_share) * np.maximum(image, 1.5 * grey + 0.5)
    return whitened + layer + layer[:, ::-1, ::-1]


def frost(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Darken the image and add ice, random ridges on a cloud (the benchmark uses photographs)."""
    image_weight = severity.parameter((1, 0.95, 0.9, 0.85, 0.75), (1, 0.8, 0.7, 0.65, 0.6))
    ice_weight = severity.parameter((0.2, 0.28, 0.36, 0.42, 0.5), (0.4, 0.55, 0.65, 0.72, 0.8))
    ridges = (1 - np.abs(2 * cloud_field(image.shape[-2:], 1.8, random, cells=3) - 1)) ** 3
    ice = 0.7 * ridges + 0.3 * cloud_field(image.shape[-2:], 1.5, random, cells=2)
    return image_weight * image + ice_weight * ice


def fog(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Add a random cloud, denser at higher severity, and rescale to at most the image's maximum."""
    thick = severity.parameter((0.2, 0.5, 0.75, 1, 1.5), (1.5, 2, 2.5, 2.8, 3.2))
    roughness = severity.parameter((3, 3, 2.5, 2, 1.75), (2, 2, 1.7, 1.5, 1.4))
    # The benchmark's cloud is a diamond-square fractal, ours a sum of smooth noises.
    largest = image.max()
    foggy = image + thick * cloud_field(image.shape[-2:], roughness, random)
    return foggy * (largest / (largest + thick))


def brightness(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Raise HSV's value, a pixel's largest channel, by the severity; keep hue and saturation."""
    added = severity.parameter((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5))
    # For any number of channels: each is multiplied by new value / old value.
    value = image.max(axis=0, keepdims=True)
    brighter = np.minimum(value + added, 1)
    return np.where(value > 0, image * brighter / np.where(value > 0, value, 1), brighter)


def contrast(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Shrink each channel's deviations from its mean by a factor that falls with the severity."""
    factor = severity.parameter((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05))
    mean = image.mean(axis=(1, 2), keepdims=True)
    return mean + factor * (image - mean)


def elastic_transform(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Displace pixels by a smooth random field, whose RMS in pixels grows with the severity."""
    # Our amplitude grows with severity; theirs goes from wide to local warps, plus an affine.
    amplitude = severity.length((0.4, 0.6, 0.85, 1.15, 1.5), (2, 3, 4.5, 6.5, 9))
    sigma = severity.length((2.5, 2.5, 2.5, 2.5, 2.5), (10, 10, 10, 10, 10))
    noise = random.uniform(-1, 1, (2, *image.shape[-2:]))
    fields = scipy.ndimage.gaussian_filter(noise, (0, sigma, sigma), mode="reflect")
    rms = np.sqrt(np.square(fields).mean(axis=(1, 2), keepdims=True))
    places = np.indices(image.shape[-2:]) + amplitude * fields / rms
    move = scipy.ndimage.map_coordinates
    return np.stack([move(channel, places, order=1, mode="reflect") for channel in image])


def pixelate(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Shrink by box means, more at higher severity, and enlarge to the original size."""
    # At 32 pixels one step stronger than CIFAR-10-C, whose 0.95 and 0.9 are nearly equal.
    share = severity.parameter((0.9, 0.85, 0.75, 0.65, 0.55), (0.6, 0.5, 0.4, 0.3, 0.25))
    height, width = image.shape[-2:]
    small = (max(1, int(width * share)), max(1, int(height * share)))
    channels = (
        channel.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.BOX)
        for channel in split_into_grey_pictures(image)
    )
    return np.stack([np.asarray(channel) for channel in channels]) / 255


def jpeg_compression(image: np.ndarray, severity: SeverityAtSize, random: Generator) -> np.ndarray:
    """Compress as JPEG, with lower quality at higher severity; channels separately unless RGB."""
    quality = round(severity.parameter((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)))
    if len(image) == 3:
        colour = Image.fromarray(to_uint8(image).transpose(1, 2, 0))
        return np.asarray(_compress_jpeg(colour, quality)).transpose(2, 0, 1) / 255
    channels = [
        np.asarray(_compress_jpeg(grey, quality)) for grey in split_into_grey_pictures(image)
    ]
    return np.stack(channels) / 255


def to_uint8(image: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def split_into_grey_pictures(image: np.ndarray) -> list[Image.Image]:
    """Return each channel of an image (C, H, W) in [0, 1] as an 8-bit greyscale picture."""
    return [Image.fromarray(channel) for channel in np.ascontiguousarray(to_uint8(image))]


def _compress_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    with Image.open(file) as stored:
        stored.load()
        return stored


Corruption = Callable[[np.ndarray, SeverityAtSize, Generator], np.ndarray]
NOISES = (gaussian_noise, shot_noise, impulse_noise)
BLURS = (defocus_blur, glass_blur, motion_blur, zoom_blur)
WEATHERS = (snow, frost, fog, brightness)
DIGITAL = (contrast, elastic_transform, pixelate, jpeg_compression)
CORRUPTIONS: dict[str, Corruption] = {
    corruption.__name__: corruption for corruption in (*NOISES, *BLURS, *WEATHERS, *DIGITAL)
}
MIN_SIDE = 8  # pixels; blurs and blocks mean nothing in smaller images


def corrupt_images(
    images: np.ndarray, name: str, severity: int, seed: int, indices: np.ndarray
) -> np.ndarray:
    """Return uint8 images (N, C, H, W) after corruption ``name``; shape and dtype do not change."""
    # name: key of CORRUPTIONS; indices: (N,) positions in the split. A result depends on the
    # image's bytes and (seed, name, severity, index) alone, not on the batch.
    height, width = images.shape[-2:]
    if min(height, width) < MIN_SIDE:
        raise UserError(f"corruptions: {height} × {width} image; allowed: {MIN_SIDE} pixels a side")
    strength = SeverityAtSize(severity, min(height, width))
    corrupted = np.empty_like(images, subok=False)
    # One image at a time: sums over pixels then round independently of the batch.
    for row, (image, index) in enumerate(zip(images, indices, strict=True)):
        random = corruption_rng(seed, name, severity, int(index))
        corrupted[row] = to_uint8(CORRUPTIONS[name](np.asarray(image) / 255, strength, random))
    return corrupted


def corruption_rng(seed: int, name: str, severity: int, index: int) -> Generator:
    digest = hashlib.sha256(f"{seed},{name},{severity},{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def standard_normal_noise(indices: np.ndarray, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return N(0, 1) noise fp32 (N, *shape), a function of the seed and each image's index."""
    noise = torch.empty(len(indices), *shape)
    for row, index in zip(noise, indices, strict=True):
        row.normal_(generator=generator_for(seed, *b"noise", int(index)))
    return noise


def add_noise(images: np.ndarray, directions: Tensor, sigma: float) -> Tensor:
    """Return clamp(images / 255 + sigma · directions, 0, 1), fp32, of uint8 images (N, C, H, W)."""
    return (torch.from_numpy(np.array(images)).float() / 255 + sigma * directions).clamp_(0, 1)
