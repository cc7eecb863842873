import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from moecore.data import corruptions
from moecore.data.corruptions import CORRUPTIONS, SeverityAtSize, corrupt_images, motion_kernel
from moecore.data.prepared import Prepared
from moecore.data.sources.digits import Digits

NAMES = tuple(CORRUPTIONS)
WITHOUT_CHANCE = "defocus_blur zoom_blur brightness contrast pixelate jpeg_compression".split()
MOVES_OR_MIXES = "defocus_blur glass_blur motion_blur zoom_blur elastic_transform pixelate contrast"


def picture(number: int = 6, channels: int = 3, height: int = 18, width: int = 15) -> np.ndarray:
    """Grey waves with texture, neither black nor white, so that every corruption shows."""
    random = np.random.default_rng(7)
    rows, columns = np.mgrid[:height, :width]
    along = random.uniform(0.2, 0.6, (number, channels, 2, 1, 1))
    waves = 90 + 60 * np.sin(along[:, :, 0] * rows + along[:, :, 1] * columns)
    return (waves + random.uniform(0, 40, waves.shape)).astype(np.uint8)


def corrupted(images: np.ndarray, name: str, severity: int) -> np.ndarray:
    return corrupt_images(images[:1], name, severity, 0, [0])[0]


def constant(value: int, size: int, channels: int = 1) -> np.ndarray:
    return np.full((1, channels, size, size), value, np.uint8)


def shapes(number: int, size: int = 28) -> np.ndarray:
    """Bright textured blocks on black, as pieces of clothing are."""
    random = np.random.default_rng(3)
    images = np.zeros((number, 1, size, size))
    for image in images:
        top, left = random.integers(2, size // 3, 2)
        high, wide = random.integers(size // 2, size - 4, 2)
        waves = 40 * np.sin(np.arange(size)[:, None] * random.uniform(0.2, 1.5))
        block = random.uniform(90, 220) + waves + random.normal(0, 12, (size, size))
        image[0, top : top + high, left : left + wide] = block[top : top + high, left : left + wide]
    return np.clip(images, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> np.ndarray:
    folder = tmp_path_factory.mktemp("digits")
    Digits(size=28, train_limit=50, test_limit=60).write(folder)
    return np.array(Prepared.open(folder).test.images)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_depend_on_the_image_and_its_index_only(name):
    images = picture()
    indices = np.array([30, 4, 11, 5, 900, 0])
    whole = corrupt_images(images, name, 3, 1, indices)
    mixed = np.array([4, 1, 5, 0, 3, 2])
    assert np.array_equal(corrupt_images(images[mixed], name, 3, 1, indices[mixed]), whole[mixed])
    cuts = [slice(0, 1), slice(1, 5), slice(5, 6)]
    parts = [corrupt_images(images[part], name, 3, 1, indices[part]) for part in cuts]
    assert np.array_equal(np.concatenate(parts), whole)
    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    assert np.array_equal(corrupt_images(images, name, 3, 1, indices), whole)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("name", NAMES)
def test_seed_and_index_matter_where_there_is_chance_and_nowhere_else(name):
    images = picture()[:1]
    made = corrupt_images(images, name, 3, 1, [2])
    words = ((0, 2), (1, 3), (2, 1), (1, 21))
    others = [corrupt_images(images, name, 3, seed, [index]) for seed, index in words]
    same = [np.array_equal(made, other) for other in others]
    assert same == [name in WITHOUT_CHANCE] * 4


def test_every_word_of_the_draws_counts():
    words = [(1, "snow", 3, 2), (2, "snow", 3, 2), (1, "frost", 3, 2), (1, "snow", 4, 2)]
    words += [(1, "snow", 3, 4), (1, "snow", 32, 0), (11, "snow", 3, 2)]
    assert len({corruptions.corruption_rng(*word).random() for word in words}) == len(words)
    first, again = (corruptions.corruption_rng(*words[0]).random() for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", NAMES)
def test_any_size_and_any_number_of_channels(name):
    for channels, height, width in ((1, 8, 8), (3, 9, 13), (4, 33, 20), (2, 8, 40)):
        images = picture(2, channels, height, width)
        kept = images.copy()
        for severity in (1, 5):
            made = corrupt_images(images, name, severity, 0, [0, 1])
            assert made.shape == images.shape and made.dtype == np.uint8
        assert not np.array_equal(made[0], images[0]) and not np.array_equal(made[1], images[1])
        assert np.array_equal(images, kept)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_change_grows_with_the_severity(name, digits):
    for images in (digits, shapes(16, 96)):
        indices = range(len(images))
        made = [corrupt_images(images, name, s, 0, indices).astype(int) for s in (1, 2, 3, 4, 5)]
        change = [np.abs(one - images).mean() for one in made]
        assert change[0] > 0 and all(a < b for a, b in pairwise(change)), change


@pytest.mark.parametrize("name", [*MOVES_OR_MIXES.split(), "jpeg_compression"])
def test_what_only_moves_or_mixes_pixels_leaves_a_constant_image(name):
    for channels in (1, 3):
        images = constant(128, 24, channels)
        assert np.array_equal(corrupted(images, name, 4), images[0])


def test_parameters_are_those_of_32_and_of_224_pixels_and_geometric_between():
    small = (1, 2, 3, 4, 5)
    large = (8, 32, 9, 64, 5)
    for side in (8, 32):
        assert [SeverityAtSize(step, side).parameter(small, large) for step in (1, 2)] == [1, 2]
    at_224 = [SeverityAtSize(step, 224).parameter(small, large) for step in (1, 4)]
    assert at_224 == pytest.approx([8, 64])
    assert SeverityAtSize(4, 448).parameter(small, large) == pytest.approx(64)
    assert SeverityAtSize(4, 448).length(small, large) == pytest.approx(128)
    assert SeverityAtSize(2, 8).length(small, large) == 2
    assert SeverityAtSize(2, 224).length(small, large) == pytest.approx(32)
    middle = math.log(112 / 32) / math.log(7)  # of the way from 32 to 224, in logarithms
    assert SeverityAtSize(2, 112).parameter(small, large) == pytest.approx(2 * 16**middle)


def test_brightness_adds_to_the_largest_channel_and_keeps_the_hue():
    # 100 + 0.05 · 255 = 112.75; 100 + 0.2 · 255 = 151
    assert (corrupted(constant(100, 28), "brightness", 1) == 113).all()
    assert (corrupted(constant(100, 224), "brightness", 2) == 151).all()
    assert (corrupted(constant(250, 224), "brightness", 2) == 255).all()
    colours = np.zeros((1, 3, 224, 224), np.uint8)
    colours[0, :, 0, 0] = 100, 20, 0
    made = corrupted(colours, "brightness", 2)
    assert made[:, 0, 0].tolist() == [151, 30, 0]  # × 151 / 100
    assert made[:, 5, 5].tolist() == [51, 51, 51], "black becomes grey"


def test_contrast_draws_each_channel_to_its_own_mean():
    images = np.zeros((1, 2, 224, 224), np.uint8)
    images[0, 0, :112] = 200
    images[0, 1] = 30
    made = corrupted(images, "contrast", 1)  # mean 100, and 0.4 of the difference stays
    assert (made[0, :112] == 140).all() and (made[0, 112:] == 60).all() and (made[1] == 30).all()
    small = corrupted(images[:, :, 96:128, :32], "contrast", 1)  # 32 pixels: 0.75 stays
    assert (small[0, :16] == 175).all() and (small[0, 16:] == 25).all()


def test_pixelate_takes_means_over_blocks():
    stripes = np.zeros((1, 1, 224, 224), np.uint8)
    stripes[..., ::2, :] = 100
    # half the side: blocks of 2 × 2
    assert (corrupted(stripes, "pixelate", 2) == 50).all()
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (1, 1, 112, 112), np.uint8).repeat(2, 2).repeat(2, 3)
    assert np.array_equal(corrupted(blocks, "pixelate", 2), blocks[0])
    tall = random.integers(0, 256, (1, 1, 448, 224), np.uint8)
    # a quarter of the side
    made = corrupted(tall, "pixelate", 5)[0].reshape(112, 4, 56, 4)
    assert (np.ptp(made, axis=(1, 3)) == 0).all()
    assert np.abs(made[:, 0, :, 0] - tall.reshape(112, 4, 56, 4).mean((1, 3))).max() <= 1


def test_noises_have_their_spread():
    grey = constant(128, 224)
    values = corrupted(grey, "gaussian_noise", 1) / 255
    assert values.std() == pytest.approx(0.08, rel=0.02)
    assert values.mean() == pytest.approx(128 / 255, abs=0.002)
    # 12 photons for white: √(0.2 / 12) = 0.1291
    values = corrupted(constant(51, 224), "shot_noise", 3) / 255
    assert values.std() == pytest.approx(0.1291, rel=0.02)
    assert values.mean() == pytest.approx(0.2, abs=0.003)
    levels = set(np.unique(values * 255).round().astype(int))
    assert {0, 21, 42, 64, 85} <= levels <= set(np.rint(np.arange(13) * 255 / 12).astype(int))
    values = corrupted(grey, "impulse_noise", 4)
    assert (values == 255).mean() == pytest.approx(0.085, abs=0.005)
    assert (values == 0).mean() == pytest.approx(0.085, abs=0.005)
    assert (values == 128).mean() == pytest.approx(0.83, abs=0.008)


def test_black_stays_black_in_shot_noise_and_in_fog_from_the_scaled_image_up():
    black = constant(0, 224, 3)
    assert not corrupted(black, "shot_noise", 5).any() and not corrupted(black, "fog", 5).any()
    assert 10 < corrupted(black, "frost", 3).mean() < 200
    assert corrupted(black, "snow", 1).min() >= 25  # 0.2 · 0.5 · 255 of whitening
    assert corrupted(constant(255, 224), "frost", 3).min() >= 178  # 0.7 of the image stays
    # m = 128/255: m · m / (m + 1.5) = 0.1258 where there is no cloud
    made = corrupted(constant(128, 224), "fog", 1)
    assert (made.min(), made.max()) == (32, 128)


def test_weather_lies_alike_over_all_channels():
    grey = picture(1, 1, 32, 32)
    for name in ("snow", "frost", "fog"):
        one = corrupted(grey, name, 3)
        for number in (3, 4):
            several = corrupted(grey.repeat(number, 1), name, 3)
            assert np.array_equal(several, one.repeat(number, 0)), name


def test_jpeg_is_pillows_and_other_channels_go_one_by_one():
    images = picture(1, 4, 32, 32)

    def through(pixels: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=58)  # severity 3 at 32 pixels
        return np.asarray(Image.open(file))

    colour = corrupted(images[:, :3], "jpeg_compression", 3).transpose(1, 2, 0)
    assert np.array_equal(colour, through(np.ascontiguousarray(images[0, :3].transpose(1, 2, 0))))
    four = corrupted(images, "jpeg_compression", 3)
    assert all(np.array_equal(four[c], through(images[0, c])) for c in range(4))


def test_disk():
    # distances 0, 1 and √2 from the centre: weights 1, 0.5 and 1.5 − √2, by their number 1 + 4 ·
    # 0.5 + 4 · 0.0858
    corner = 1.5 - math.sqrt(2)
    weights = np.array([[corner, 0.5, corner], [0.5, 1, 0.5], [corner, 0.5, corner]])
    np.testing.assert_allclose(corruptions.disk_kernel(1), weights / (3 + 4 * corner))
    point = np.zeros((1, 9, 9))
    point[0, 4, 4] = 1
    blurred = corruptions.defocus_blur(point, SeverityAtSize(1, min(point.shape[-2:])), None)[
        0, 3:6, 3:6
    ]
    np.testing.assert_allclose(blurred, corruptions.disk_kernel(0.7))


def test_trail():
    # steps 0 and 0.5 with weights 1 and w = exp(−1.5² / 2); the second is shared by the centre and
    # its neighbour
    w = math.exp(-1.125)
    kernel = motion_kernel(1 / 3, 0)
    assert kernel.shape == (5, 5) and kernel.sum() == pytest.approx(1)
    assert kernel[2, 2] == pytest.approx((1 + w / 2) / (1 + w))
    assert kernel[2, 3] == pytest.approx(w / 2 / (1 + w))
    np.testing.assert_allclose(motion_kernel(2, 90), motion_kernel(2, 0).T, atol=1e-12)  # down
    np.testing.assert_allclose(motion_kernel(2, -45), motion_kernel(2, 45)[::-1], atol=1e-12)


def test_zoom_blur_flattens_a_slope_about_the_centre():
    slope = np.broadcast_to((np.arange(21) - 10) / 40 + 0.5, (1, 17, 21))
    # severity 2 of small images
    factor = (1 + (1 / np.linspace(1, 1.1, corruptions.NUMBER_OF_ZOOMS)).sum()) / (
        corruptions.NUMBER_OF_ZOOMS + 1
    )
    found = corruptions.zoom_blur(slope, SeverityAtSize(2, min(slope.shape[-2:])), None)
    np.testing.assert_allclose(found, (slope - 0.5) * factor + 0.5)


def test_glass_swaps_near_pixels_and_loses_none():
    order = corruptions.swapped_order((9, 14), 2, 1, np.random.default_rng(0))
    assert sorted(order) == list(range(126)) and order != list(range(126))
    back = corruptions.swapped_order((9, 14), 2, 0, np.random.default_rng(0))
    assert back == list(range(126))
    # each image is blurred by its own draws: a single swap moves at most 2 rows and 2 columns
    one = corruptions.swapped_order((1, 40), 2, 1, np.random.default_rng(1))
    assert np.mean(np.abs(np.array(one) - np.arange(40)) <= 4) > 0.8


def test_elastic_moves_by_its_amplitude():
    ramp = np.broadcast_to(np.arange(224.0), (1, 224, 224))
    # the displacement along columns, in pixels
    severity = SeverityAtSize(1, min(ramp.shape[-2:]))
    moved = corruptions.elastic_transform(ramp, severity, np.random.default_rng(0)) - ramp
    assert np.sqrt(np.square(moved[:, :, 20:-20]).mean()) == pytest.approx(2, rel=0.15)


def test_resampling():
    image = np.array([[[0.0, 10, 20], [30, 40, 50]]])
    same = corruptions.interpolate_at_rows_and_columns(image, np.arange(2), np.arange(3))
    np.testing.assert_array_equal(same, image)
    columns = np.array([-1, 0.25, 1.5, 9])
    between = corruptions.interpolate_at_rows_and_columns(image, np.array([0.5]), columns)
    np.testing.assert_allclose(between, [[[15, 17.5, 30, 35]]])


def test_clouds_fill_their_range_and_are_smooth_where_roughness_is_high():
    draw = lambda value: corruptions.cloud_field((40, 56), value, np.random.default_rng(0))
    smooth, rough = draw(4), draw(1.1)
    for field in (smooth, rough):
        assert field.shape == (40, 56) and field.min() == 0 and field.max() == 1
    assert np.abs(np.diff(smooth)).mean() < 0.5 * np.abs(np.diff(rough)).mean()


def test_noise_directions_belong_to_the_image():
    def draw(indices, seed):
        return corruptions.standard_normal_noise(np.array(indices), (3, 40, 50), seed)

    drawn = draw([5, 9, 2], 1)
    assert drawn.dtype == torch.float32 and drawn.shape == (3, 3, 40, 50)
    assert torch.equal(draw([2, 5], 1), drawn[[2, 0]]) and not torch.equal(draw([5], 2), drawn[:1])
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03)
    assert abs(float((drawn[0] * drawn[1]).mean())) < 0.05, "two images have nothing in common"


def test_noise_is_scaled_added_and_cut_to_the_range():
    images = np.array([[[[0, 51, 255]]]], np.uint8)
    drawn = torch.tensor([[[[-1.0, 2.0, 0.5]]]])
    some, none = (corruptions.add_noise(images, drawn, sigma) for sigma in (0.1, 0.0))
    torch.testing.assert_close(some, torch.tensor([[[[0, 0.4, 1]]]]))
    assert torch.equal(none, torch.from_numpy(images).float() / 255), "no noise changes no bit"
