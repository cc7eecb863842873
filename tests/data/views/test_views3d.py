"""Views of volumes: voxels by hand, affines against the views themselves, and settings that are
refused.
"""

import pytest
import torch
from scipy.ndimage import map_coordinates

from moecore.core.files import UserError
from moecore.core.routing_records import TokenLayout
from moecore.core.streams import generator_for
from moecore.data.views.views import (
    AffineRanges,
    CropRanges,
    ViewSettings,
    make_random_views,
)
from moecore.data.views.views3d import (
    centred_volume_affines,
    volume_flip_affines,
    volume_rotations,
    warp_volumes,
)
from moecore.data.views.warping import clamp_or_reflect_indices, in_range_mask
from moecore.nn.correspondence import match_patches

SIZE = (6, 8, 10)
FULL = ViewSettings(
    shift=1,
    flip=True,
    affine=AffineRanges(degrees=20, translate=0.1, scale=(0.8, 1.2)),
)
VOLUMES = torch.rand(16, 1, *SIZE, generator=generator_for(9)).half()


def ramps(count: int, size=SIZE) -> torch.Tensor:
    """(count, 3, *size): channel i is the place along axis i, of voxel centres, as a share of the
    axis.
    """
    axes = [(torch.arange(length) + 0.5) / length for length in size]
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).expand(count, -1, -1, -1, -1)


def test_a_function_of_seed_and_step_that_leaves_the_data_alone():
    before = VOLUMES.clone()
    first, again, other = (
        make_random_views(VOLUMES, FULL, generator_for(1, step)) for step in (5, 5, 6)
    )
    assert torch.equal(first.images, again.images) and torch.equal(first.affines, again.affines)
    assert not torch.equal(first.affines, other.affines)
    assert torch.equal(VOLUMES, before)
    assert 0 <= first.images.min() and first.images.max() <= 1


def test_a_view_does_not_depend_on_the_other_volumes():
    alone = VOLUMES.clone()
    alone[1:] = 0
    assert torch.equal(
        make_random_views(VOLUMES, FULL, generator_for(1)).images[0],
        make_random_views(alone, FULL, generator_for(1)).images[0],
    )


def one_by_one(volumes, shifts, mirrored, fill):
    """The definition of a shifted and mirrored volume: axis after axis of one volume at a time."""
    for volume, moves, turned in zip(volumes, shifts.tolist(), mirrored.tolist(), strict=True):
        for axis, move in enumerate(moves, start=1):
            length = volume.shape[axis]
            places = torch.arange(length)
            if axis == 1 and turned:
                places = places.flip(0)
            volume = volume.index_select(
                axis, clamp_or_reflect_indices(places - move, length, fill)
            )
            volume = volume.clone()
            if fill == "zeros":
                volume.movedim(axis, 0)[~in_range_mask(places - move, length)] = 0
        yield volume.float()


@pytest.mark.parametrize(
    ("fill", "kind", "channels"),
    [("zeros", torch.float16, 1), ("border", torch.float32, 2), ("reflection", torch.float16, 2)],
)
def test_a_batch_has_the_bits_of_its_volumes_one_by_one(fill, kind, channels):
    volumes = torch.rand(9, channels, *SIZE, generator=generator_for(2)).to(kind)
    before = volumes.clone()
    draws = generator_for(4)
    shifts = torch.randint(-3, 4, (9, 3), generator=draws)
    mirrored = torch.rand(9, generator=draws) < 0.5
    views = make_random_views(
        volumes, ViewSettings(shift=3, flip=True, fill=fill), generator_for(4)
    )
    assert torch.equal(views.images, torch.stack([*one_by_one(volumes, shifts, mirrored, fill)]))
    assert torch.equal(volumes, before) and mirrored.any() and not mirrored.all()


def test_flips_mirror_the_first_axis_half_of_the_time():
    views = make_random_views(
        torch.rand(400, 1, 2, 2, 2), ViewSettings(flip=True), generator_for(0)
    )
    volumes = VOLUMES
    flipped = make_random_views(volumes, ViewSettings(flip=True), generator_for(3))
    turned = flipped.affines[:, 0, 0] < 0
    assert turned.any() and not turned.all()
    assert torch.equal(flipped.images[turned], volumes[turned].float().flip(2)) and torch.equal(
        flipped.images[~turned], volumes[~turned].float()
    )
    # left and right: x → 6 − x, and nothing else
    assert torch.equal(
        flipped.affines[turned][0],
        torch.tensor([[-1.0, 0, 0, 6], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
    )
    assert 150 < (views.affines[:, 0, 0] < 0).sum() < 250


@pytest.mark.parametrize(
    "settings",
    [
        ViewSettings(affine=FULL.affine, fill="border"),
        ViewSettings(shift=1, flip=True, affine=FULL.affine, fill="border"),
    ],
)
def test_the_affine_says_where_every_voxel_went(settings):
    """A ramp's value is the original place; so a view's voxel p must hold A⁻¹ p, wherever that lies
    inside the voxel centres.
    """
    views = make_random_views(ramps(8), settings, generator_for(4))
    centres = torch.stack(
        torch.meshgrid(*(torch.arange(length) + 0.5 for length in SIZE), indexing="ij"), dim=-1
    ).double()
    for view, affine in zip(views.images, views.affines.double(), strict=True):
        back = torch.linalg.inv(affine)
        original = centres @ back[:3, :3].T + back[:3, 3]
        limits = torch.tensor(SIZE)
        seen = ((original > 0.5) & (original < limits - 0.5)).all(dim=-1)
        assert seen.sum() > 50
        torch.testing.assert_close(
            view.movedim(0, -1)[seen].double() * limits, original[seen], atol=1e-3, rtol=0
        )


def test_sampling_is_scipys():
    affine = make_random_views(
        VOLUMES[:1], ViewSettings(affine=FULL.affine), generator_for(8)
    ).affines.double()
    back = torch.linalg.inv(affine[0])
    centres = (
        torch.stack(torch.meshgrid(*(torch.arange(length) + 0.5 for length in SIZE), indexing="ij"))
        .double()
        .flatten(1)
    )
    places = back[:3, :3] @ centres + back[:3, 3:] - 0.5
    expected = map_coordinates(
        VOLUMES[0, 0].float().numpy(), places.numpy(), order=1, mode="grid-constant", cval=0.0
    ).reshape(SIZE)
    torch.testing.assert_close(
        warp_volumes(VOLUMES[:1], affine, "zeros")[0, 0],
        torch.from_numpy(expected).float(),
        atol=1e-4,
        rtol=0,
    )


def test_a_quarter_turn_about_each_axis_by_hand():
    # about the first axis the second goes to where the third was, (0, 1, 0) → (0, 0, 1); then
    # cyclically
    quarter = torch.pi / 2
    for axis, (start, end) in enumerate(
        [((0, 1, 0), (0, 0, 1)), ((0, 0, 1), (1, 0, 0)), ((1, 0, 0), (0, 1, 0))]
    ):
        turns = torch.zeros(1, 3)
        turns[0, axis] = quarter
        found = volume_rotations(turns)[0, :3, :3] @ torch.tensor(start, dtype=torch.float64)
        torch.testing.assert_close(found, torch.tensor(end, dtype=torch.float64), atol=1e-6, rtol=0)


def test_rotations_keep_lengths_and_the_middle():
    turned = centred_volume_affines(volume_rotations(torch.rand(5, 3)), SIZE)
    middle = torch.tensor([3.0, 4.0, 5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(turned @ middle, middle.expand(5, 4))
    linear = turned[:, :3, :3]
    torch.testing.assert_close(
        linear @ linear.mT, torch.eye(3, dtype=torch.float64).expand(5, 3, 3)
    )
    torch.testing.assert_close(torch.linalg.det(linear), torch.ones(5, dtype=torch.float64))


def test_scale_and_translation_have_their_range():
    views = make_random_views(
        torch.zeros(300, 1, *SIZE),
        ViewSettings(affine=AffineRanges(scale=(0.5, 2.0), translate=0.25)),
        generator_for(5),
    )
    factors = views.affines[:, 0, 0]
    assert 0.5 <= factors.min() < 0.6 and 1.8 < factors.max() <= 2.0
    middle = views.affines @ torch.tensor([3.0, 4.0, 5.0, 1.0])
    moves = (middle[:, :3] - torch.tensor([3.0, 4.0, 5.0])).abs().amax(dim=0)
    assert (moves <= torch.tensor([1.5, 2.0, 2.5])).all() and (
        moves > torch.tensor([1.4, 1.9, 2.4])
    ).all()


def test_cubes_find_their_partners_through_the_affines():
    """A volume mirrored along the first axis: the cube (i, j, k) is partner of (1 − i, j, k)."""
    layout = TokenLayout(1, (2, 2, 2), (8, 8, 8))
    plain = torch.eye(4)[None]
    mirrored = volume_flip_affines(torch.tensor([True]), 8.0).float()
    found = match_patches(plain, mirrored, layout)
    assert found.index[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3] and found.found.all()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (ViewSettings(crop=CropRanges()), "crop"),
        (ViewSettings(affine=AffineRanges(shear=5)), "affine.shear"),
    ],
)
def test_settings_of_images_are_refused(settings, named):
    with pytest.raises(UserError, match=f"found {named}"):
        make_random_views(VOLUMES, settings, generator_for(0))
