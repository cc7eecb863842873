import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from moecore.core.files import UserError
from moecore.core.streams import generator_for
from moecore.data.views import warping
from moecore.data.views.augmentations import RandAugment
from moecore.data.views.random_views import (
    AffineRanges,
    CropRanges,
    Mix,
    ViewSettings,
    make_random_views,
    mix_batch,
    prepare_evaluation_images,
)
from moecore.data.views.warping import MixedSizeImageList, clamp_or_reflect_indices, in_range_mask
from moecore.measure.invariance import draw_affines, transform_images
from moecore.nn.correspondence import match_patches
from moecore.parts import Classification, TokenLayout

IMAGES = torch.randint(0, 256, (32, 3, 20, 20), generator=generator_for(0), dtype=torch.uint8)
TURNED, AUGMENTED = AffineRanges(degrees=10), RandAugment()
FULL = ViewSettings(
    shift=2, crop=CropRanges(), flip=True, affine=TURNED, randaugment=AUGMENTED, erasing=0.5
)
SIZE = (28, 28)
VOLUME_SIZE = (6, 8, 10)
TURNED_3D = AffineRanges(degrees=20, translate=0.1, scale=(0.8, 1.2))
FULL_3D = ViewSettings(shift=1, flip=True, affine=TURNED_3D)
VOLUMES = torch.rand(16, 1, *VOLUME_SIZE, generator=generator_for(9)).half()
AXES = [(torch.arange(length) + 0.5).double() for length in VOLUME_SIZE]
CENTRES = torch.stack(torch.meshgrid(*AXES, indexing="ij"))  # of voxels (3, *VOLUME_SIZE)


def classes(number: int) -> Classification:
    return Classification(classes=tuple(map(str, range(number))))


def test_same_generator_same_views_and_global_state_untouched():
    before = torch.get_rng_state()
    first, again, other = (make_random_views(IMAGES, FULL, generator_for(1, n)) for n in (5, 5, 6))
    assert torch.equal(first.images, again.images) and torch.equal(first.affines, again.affines)
    assert not torch.equal(first.images, other.images)
    assert torch.equal(torch.get_rng_state(), before) and first.images.shape == (32, 3, 20, 20)
    assert first.images.dtype == torch.float32 and first.affines.shape == (32, 3, 3)


@pytest.mark.parametrize("fill", ["zeros", "border", "reflection"])
def test_images_one_by_one_have_the_views_of_a_batch(fill):
    """Where they happen to have one shape; what is cut out changes the rounding alone."""
    rows = [image.permute(1, 2, 0).numpy() for image in IMAGES]
    moving = FULL.model_copy(update={"fill": fill, "shift": 9, "erasing": 0.0})
    together = make_random_views(IMAGES, moving, generator_for(1))
    mixed = MixedSizeImageList(rows, 20, torch.device("cpu"))
    apart = make_random_views(mixed, moving, generator_for(1))
    assert torch.equal(together.affines, apart.affines)
    assert (together.images - apart.images).abs().mean() < 1e-5
    torch.testing.assert_close(together.images, apart.images, atol=1 / 255, rtol=0)


def test_a_view_of_images_of_different_shapes_is_each_ones_own():
    random = generator_for(3)
    draw = {"generator": random, "dtype": torch.uint8}
    sides = ((20, 50), (33, 21), (20, 20), (64, 24))
    rows = [torch.randint(0, 256, (*side, 3), **draw).numpy() for side in sides]
    settings = ViewSettings(crop=CropRanges(scale=(0.05, 1.0)), flip=True)
    mixed = MixedSizeImageList(rows, 16, torch.device("cpu"))
    views = make_random_views(mixed, settings, generator_for(7))
    assert views.images.shape == (4, 3, 16, 16)
    # by hand: where each pixel of a view comes from, with the nearest four of the original
    back = torch.linalg.inv(views.affines.double())
    for place in (0, 7, 15):
        for index, image in enumerate(rows):
            row, column, _ = (back[index] @ torch.tensor([place + 0.5, 3.5, 1.0]).double()).tolist()
            assert 0 <= row <= image.shape[0] and 0 <= column <= image.shape[1], "inside"
            expected = bilinear(image, row - 0.5, column - 0.5)
            assert torch.allclose(views.images[index, :, place, 3] * 255, expected, atol=0.05)


def bilinear(image, row: float, column: float) -> torch.Tensor:
    """Of an image (H, W, C) with nothing around it, at a place counted from the first pixel."""
    padded = F.pad(torch.from_numpy(image).double(), (0, 0, 1, 2, 1, 2))
    top, left = math.floor(row) + 1, math.floor(column) + 1
    down, right = row + 1 - top, column + 1 - left
    upper = padded[top, left] * (1 - right) + padded[top, left + 1] * right
    lower = padded[top + 1, left] * (1 - right) + padded[top + 1, left + 1] * right
    return (upper * (1 - down) + lower * down).float()


def test_images_kept_whole_need_a_crop_and_the_default_changes_nothing():
    whole = MixedSizeImageList([IMAGES[0].permute(1, 2, 0).numpy()] * 2, 16, torch.device("cpu"))
    with pytest.raises(UserError, match=r"views: found crop: null, but .* allowed: a crop"):
        make_random_views(whole, ViewSettings(flip=True), generator_for(0))
    assert prepare_evaluation_images(whole).shape == (2, 3, 16, 16)
    views = make_random_views(IMAGES, ViewSettings(), generator_for(0))
    assert torch.equal(views.images, prepare_evaluation_images(IMAGES))
    assert torch.equal(views.affines, torch.eye(3).expand(len(IMAGES), 3, 3))


def test_erasing_blacks_out_a_rectangle():
    white = torch.full((2000, 1, 20, 20), 255, dtype=torch.uint8)
    views = make_random_views(white, ViewSettings(erasing=0.25), generator_for(0)).images[:, 0]
    hidden = (views == 0).float()
    erased = hidden.sum((1, 2)) > 0
    assert erased.float().mean() == pytest.approx(0.25, abs=0.03)
    assert hidden[erased].mean((1, 2)).max() < 0.4
    rows = hidden.amax(2)
    columns = hidden.amax(1)
    assert torch.equal(hidden, rows[:, :, None] * columns[:, None, :])  # a rectangle
    assert torch.equal(views + hidden, torch.ones_like(views))


def test_half_of_the_images_are_mirrored():
    images = torch.zeros(4000, 1, 4, 4, dtype=torch.uint8)
    views = make_random_views(images, ViewSettings(flip=True), generator_for(0))
    assert (views.affines[:, 1, 1] < 0).float().mean() == pytest.approx(0.5, abs=0.03)


@given(st.integers(0, 10_000), st.sampled_from([(0.8, 0), (0, 1), (0.2, 1)]), st.floats(0, 1))
def test_label_mass_is_one_and_lambda_is_the_area(seed, alphas, probability):
    """Image i is everywhere i + 1, so a mixed image's mean tells λ, whoever the partner is."""
    labels = torch.arange(8)
    images = (labels + 1.0).view(-1, 1, 1, 1).expand(-1, 2, 7, 9) / 8
    mix = Mix(mixup=alphas[0], cutmix=alphas[1], probability=probability)
    mixed, soft = mix_batch(images, labels, classes(8), mix, generator_for(seed))
    assert torch.allclose(soft.sum(1), torch.ones(8), atol=1e-6) and (soft >= 0).all()
    assert torch.allclose(mixed.mean((1, 2, 3)), (soft * (labels + 1.0) / 8).sum(1), atol=1e-5)


def test_cutmix_takes_whole_pixels_in_a_box():
    labels = torch.arange(64)
    images = labels.view(-1, 1, 1, 1).expand(-1, 1, 10, 12) / 64
    mixed, soft = mix_batch(images, labels, classes(64), Mix(cutmix=1.0), generator_for(0))
    foreign = (mixed != images)[:, 0]
    assert torch.equal(foreign, foreign.any(2, keepdim=True) & foreign.any(1, keepdim=True))
    assert torch.allclose(soft[labels, labels], 1 - foreign.float().mean((1, 2)), atol=1e-6)


def test_mixing_is_a_function_of_the_generator():
    images = prepare_evaluation_images(IMAGES)
    labels = torch.arange(32) % 5
    before = torch.get_rng_state()
    mix = Mix(mixup=0.8, cutmix=1.0, probability=0.7)
    one, two = (mix_batch(images, labels, classes(5), mix, generator_for(9)) for _ in range(2))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < (one[0] == images).all((1, 2, 3)).sum() < 32


def test_transforms_draw_independently():
    names = (("rotation 5", 5), ("rotation 10", 10))
    angles = [draw_affines(name, 50, SIZE, 0)[:, 1, 0].asin().rad2deg() / n for name, n in names]
    assert abs(float(torch.corrcoef(torch.stack(angles))[0, 1])) < 0.5


@pytest.mark.parametrize("limit", [5, 10, 15])
def test_rotations_and_shears_fill_their_range_about_the_centre(limit):
    affines = draw_affines(f"rotation {limit}", 500, SIZE, 0)
    angles = torch.atan2(affines[:, 1, 0], affines[:, 0, 0]).rad2deg()
    assert limit * 0.97 < float(angles.max()) <= limit
    assert -limit <= float(angles.min()) < -limit * 0.97
    _fixed(affines, 14, 14)
    torch.testing.assert_close(torch.linalg.det(affines), torch.ones(500, dtype=torch.float64))
    affines = draw_affines(f"shear {limit}", 500, SIZE, 0)  # of columns by the row
    assert limit * 0.97 < math.degrees(math.atan(float(affines[:, 1, 0].abs().max()))) <= limit
    assert (affines[:, 0] == torch.tensor([1.0, 0, 0])).all(), "no row moves"
    _fixed(affines, 14, 14)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.1])
def test_scalings_are_exact(factor):
    affines = draw_affines(f"scaling {factor}", 5, SIZE, 0)
    expected = factor * torch.eye(2, dtype=torch.float64).expand(5, 2, 2)
    torch.testing.assert_close(affines[:, :2, :2], expected)
    _fixed(affines, 14, 14)


@pytest.mark.parametrize(
    ("shares", "across", "down"), [((0, 0.1), 0, 1), ((0.1, 0), 1, 0), ((0.1, 0.1), 1, 1)]
)
def test_translations_are_whole_pixels_of_at_most_a_tenth(shares, across, down):
    affines = draw_affines(f"translation {shares}", 500, (30, 40), 0)  # a tenth: 3 rows, 4 columns
    assert torch.equal(affines[:, :2, :2], torch.eye(2, dtype=torch.float64).expand(500, 2, 2))
    assert sorted(set(affines[:, 0, 2].tolist())) == list(range(-3 * down, 3 * down + 1))
    assert sorted(set(affines[:, 1, 2].tolist())) == list(range(-4 * across, 4 * across + 1))


def test_a_translation_moves_pixels_and_leaves_black():
    images = IMAGES[:1].clamp(min=1)
    affine = torch.eye(3, dtype=torch.float64)[None].clone()
    affine[0, :2, 2] = torch.tensor([2.0, -1.0])  # two down, one to the left
    moved = transform_images(images.numpy(), affine, len(images))
    assert torch.equal(moved[..., 2:, :-1], images[..., :-2, 1:]) and not moved[..., :2, :].any()
    assert not moved[..., -1].any()


def _fixed(affines: torch.Tensor, row: float, column: float) -> None:
    point = torch.tensor([row, column, 1.0], dtype=torch.float64)
    torch.testing.assert_close(affines @ point, point.expand(len(affines), 3))


@pytest.mark.parametrize(
    "settings",
    [
        *({"affine": {}}, {"jitter": {}}, {"randaugment": {"operations": 0}}),
        {"randaugment": {"names": ["identity"]}},
        {"randaugment": {"magnitude": 0, "names": ["rotate", "saturation"]}},
    ],
)
def test_what_is_called_an_identity_changes_no_image(settings):
    views = ViewSettings.model_validate(settings)
    (change,) = filter(None, (views.affine, views.jitter, views.randaugment))
    assert change.is_identity
    made = make_random_views(IMAGES, views, generator_for(1)).images
    torch.testing.assert_close(made, IMAGES / 255, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({}, False),
        ({"flip": True, "jitter": {"contrast": 0.5}, "erasing": 0.5}, False),
        ({"randaugment": {"names": ["contrast", "posterize"]}}, False),
        ({"randaugment": {"names": ["contrast", "rotate"]}}, True),
        ({"shift": 1}, True),
        ({"crop": {"scale": [0.8, 1.0]}}, True),  # it interpolates with what lies beyond the edge
        ({"affine": {"scale": [0.8, 0.9]}}, True),
    ],
)
def test_what_lies_outside_is_seen_where_views_leave_the_image(settings, leaves):
    views = ViewSettings.model_validate(settings)
    assert views.reaches_outside_image == leaves
    filled = [views.model_copy(update={"fill": fill}) for fill in ("zeros", "border")]
    made = [make_random_views(IMAGES, one, generator_for(1)).images for one in filled]
    assert torch.equal(*made) != leaves


def ramps(count: int) -> torch.Tensor:
    """(count, 3, *VOLUME_SIZE): channel i is the place along axis i, as a share of the axis."""
    shares = CENTRES / torch.tensor(VOLUME_SIZE).view(3, 1, 1, 1)
    return shares.float().expand(count, -1, -1, -1, -1)


def test_a_function_of_seed_and_step_that_leaves_the_data_alone():
    before = VOLUMES.clone()
    draws = [generator_for(1, step) for step in (5, 5, 6)]
    first, again, other = (make_random_views(VOLUMES, FULL_3D, one) for one in draws)
    assert torch.equal(first.images, again.images) and torch.equal(first.affines, again.affines)
    assert not torch.equal(first.affines, other.affines) and torch.equal(VOLUMES, before)
    assert 0 <= first.images.min() and first.images.max() <= 1
    alone = VOLUMES.clone()
    alone[1:] = 0
    of_first = make_random_views(alone, FULL_3D, generator_for(1, 5)).images[0]
    assert torch.equal(of_first, first.images[0]), "it does not depend on the other volumes"


def one_by_one(volumes, shifts, mirrored, fill):
    """The definition of a shifted and mirrored volume: axis after axis of one volume at a time."""
    for volume, moves, turned in zip(volumes, shifts.tolist(), mirrored.tolist(), strict=True):
        for axis, move in enumerate(moves, start=1):
            length = volume.shape[axis]
            places = torch.arange(length)
            if axis == 1 and turned:
                places = places.flip(0)
            indices = clamp_or_reflect_indices(places - move, length, fill)
            volume = volume.index_select(axis, indices).clone()
            if fill == "zeros":
                volume.movedim(axis, 0)[~in_range_mask(places - move, length)] = 0
        yield volume.float()


@pytest.mark.parametrize(
    ("fill", "kind", "channels"),
    [("zeros", torch.float16, 1), ("border", torch.float32, 2), ("reflection", torch.float16, 2)],
)
def test_a_batch_has_the_bits_of_its_volumes_one_by_one(fill, kind, channels):
    volumes = torch.rand(9, channels, *VOLUME_SIZE, generator=generator_for(2)).to(kind)
    before = volumes.clone()
    draws = generator_for(4)
    shifts = torch.randint(-3, 4, (9, 3), generator=draws)
    mirrored = torch.rand(9, generator=draws) < 0.5
    settings = ViewSettings(shift=3, flip=True, fill=fill)
    views = make_random_views(volumes, settings, generator_for(4))
    assert torch.equal(views.images, torch.stack([*one_by_one(volumes, shifts, mirrored, fill)]))
    assert torch.equal(volumes, before) and mirrored.any() and not mirrored.all()


def test_flips_mirror_the_first_axis_half_of_the_time():
    volumes = VOLUMES.repeat(25, 1, 1, 1, 1)
    flipped = make_random_views(volumes, ViewSettings(flip=True), generator_for(3))
    turned = flipped.affines[:, 0, 0] < 0
    assert 150 < turned.sum() < 250
    assert torch.equal(flipped.images[turned], volumes[turned].float().flip(2))
    assert torch.equal(flipped.images[~turned], volumes[~turned].float())
    # left and right: x → 6 − x, and nothing else
    mirror = torch.tensor([[-1.0, 0, 0, 6], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert torch.equal(flipped.affines[turned][0], mirror)


@pytest.mark.parametrize("changes", [{}, {"shift": 1, "flip": True}])
def test_the_affine_says_where_every_voxel_went(changes):
    """A ramp's value is the original place: voxel p must hold A⁻¹ p, inside the voxel centres."""
    settings = ViewSettings(affine=FULL_3D.affine, fill="border", **changes)
    views = make_random_views(ramps(8), settings, generator_for(4))
    centres = CENTRES.movedim(0, -1)
    for view, affine in zip(views.images, views.affines.double(), strict=True):
        back = torch.linalg.inv(affine)
        original = centres @ back[:3, :3].T + back[:3, 3]
        limits = torch.tensor(VOLUME_SIZE)
        seen = ((original > 0.5) & (original < limits - 0.5)).all(dim=-1)
        assert seen.sum() > 50
        found = view.movedim(0, -1)[seen].double() * limits
        torch.testing.assert_close(found, original[seen], atol=1e-3, rtol=0)


def test_sampling_is_scipys():
    moving = ViewSettings(affine=FULL_3D.affine)
    affine = make_random_views(VOLUMES[:1], moving, generator_for(8)).affines.double()
    back = torch.linalg.inv(affine[0])
    places = (back[:3, :3] @ CENTRES.flatten(1) + back[:3, 3:] - 0.5).numpy()
    plain = VOLUMES[0, 0].float().numpy()
    expected = map_coordinates(plain, places, order=1, mode="grid-constant", cval=0.0)
    ours = warping.warp_volumes(VOLUMES[:1], affine, "zeros")[0, 0].flatten()
    torch.testing.assert_close(ours, torch.from_numpy(expected).float(), atol=1e-4, rtol=0)


def test_a_quarter_turn_about_each_axis_by_hand():
    # about the first axis the second goes to where the third was, (0, 1, 0) → (0, 0, 1); then
    # cyclically
    quarter = torch.pi / 2
    x, y, z = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    for axis, (start, end) in enumerate([(y, z), (z, x), (x, y)]):
        turns = torch.zeros(1, 3)
        turns[0, axis] = quarter
        seen = warping.volume_rotations(turns)[0, :3, :3] @ torch.tensor(start, dtype=torch.float64)
        torch.testing.assert_close(seen, torch.tensor(end, dtype=torch.float64), atol=1e-6, rtol=0)


def test_rotations_keep_lengths_and_the_middle():
    turned = warping.centred_volume_affines(warping.volume_rotations(torch.rand(5, 3)), VOLUME_SIZE)
    middle = torch.tensor([3.0, 4.0, 5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(turned @ middle, middle.expand(5, 4))
    linear = turned[:, :3, :3]
    identity = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(linear @ linear.mT, identity.expand(5, 3, 3))
    torch.testing.assert_close(torch.linalg.det(linear), torch.ones(5, dtype=torch.float64))


def test_scale_and_translation_have_their_range():
    moving = ViewSettings(affine=AffineRanges(scale=(0.5, 2.0), translate=0.25))
    views = make_random_views(torch.zeros(300, 1, *VOLUME_SIZE), moving, generator_for(5))
    factors = views.affines[:, 0, 0]
    assert 0.5 <= factors.min() < 0.6 and 1.8 < factors.max() <= 2.0
    middle = views.affines @ torch.tensor([3.0, 4.0, 5.0, 1.0])
    moves = (middle[:, :3] - torch.tensor([3.0, 4.0, 5.0])).abs().amax(dim=0)
    assert (moves <= torch.tensor([1.5, 2.0, 2.5])).all()
    assert (moves > torch.tensor([1.4, 1.9, 2.4])).all()


def test_cubes_find_their_partners_through_the_affines():
    """A volume mirrored along the first axis: the cube (i, j, k) is partner of (1 − i, j, k)."""
    layout = TokenLayout(1, (2, 2, 2), (8, 8, 8))
    plain = torch.eye(4)[None]
    mirrored = warping.volume_flip_affines(torch.tensor([True]), 8.0).float()
    found = match_patches(plain, mirrored, layout)
    assert found.index[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3] and found.mask.all()


@pytest.mark.parametrize(
    ("settings", "named"), [({"crop": {}}, "crop"), ({"affine": {"shear": 5}}, "affine.shear")]
)
def test_settings_of_images_are_refused(settings, named):
    with pytest.raises(UserError, match=f"found {named}"):
        make_random_views(VOLUMES, ViewSettings(**settings), generator_for(0))
