"""Views of volumes: voxels by hand, affines against the views themselves, and settings that are
refused.
"""

import pytest
import torch
from scipy.ndimage import map_coordinates

from moecore.core.files import UserError
from moecore.core.routing_records import TokenLayout
from moecore.core.streams import generator_for
from moecore.data.views import views3d
from moecore.data.views.views import AffineRanges, CropRanges, ViewSettings, make_random_views
from moecore.data.views.warping import clamp_or_reflect_indices, in_range_mask
from moecore.nn.correspondence import match_patches

SIZE = (6, 8, 10)
FULL = ViewSettings(
    shift=1,
    flip=True,
    affine=AffineRanges(degrees=20, translate=0.1, scale=(0.8, 1.2)),
)
VOLUMES = torch.rand(16, 1, *SIZE, generator=generator_for(9)).half()


AXES = [(torch.arange(length) + 0.5).double() for length in SIZE]
CENTRES = torch.stack(torch.meshgrid(*AXES, indexing="ij"))  # of voxels (3, *SIZE)


def ramps(count: int) -> torch.Tensor:
    """(count, 3, *SIZE): channel i is the place along axis i, as a share of the axis."""
    shares = CENTRES / torch.tensor(SIZE).view(3, 1, 1, 1)
    return shares.float().expand(count, -1, -1, -1, -1)


def test_a_function_of_seed_and_step_that_leaves_the_data_alone():
    before = VOLUMES.clone()
    first, again, other = (
        make_random_views(VOLUMES, FULL, generator_for(1, step)) for step in (5, 5, 6)
    )
    assert torch.equal(first.images, again.images) and torch.equal(first.affines, again.affines)
    assert not torch.equal(first.affines, other.affines)
    assert torch.equal(VOLUMES, before)
    assert 0 <= first.images.min() and first.images.max() <= 1
    alone = VOLUMES.clone()
    alone[1:] = 0
    of_first = make_random_views(alone, FULL, generator_for(1, 5)).images[0]
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
    volumes = torch.rand(9, channels, *SIZE, generator=generator_for(2)).to(kind)
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
    centres = CENTRES.movedim(0, -1)
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
    moving = ViewSettings(affine=FULL.affine)
    affine = make_random_views(VOLUMES[:1], moving, generator_for(8)).affines.double()
    back = torch.linalg.inv(affine[0])
    places = (back[:3, :3] @ CENTRES.flatten(1) + back[:3, 3:] - 0.5).numpy()
    plain = VOLUMES[0, 0].float().numpy()
    expected = map_coordinates(plain, places, order=1, mode="grid-constant", cval=0.0)
    ours = views3d.warp_volumes(VOLUMES[:1], affine, "zeros")[0, 0].flatten()
    torch.testing.assert_close(ours, torch.from_numpy(expected).float(), atol=1e-4, rtol=0)


def test_a_quarter_turn_about_each_axis_by_hand():
    # about the first axis the second goes to where the third was, (0, 1, 0) → (0, 0, 1); then
    # cyclically
    quarter = torch.pi / 2
    for axis, (start, end) in enumerate(
        [((0, 1, 0), (0, 0, 1)), ((0, 0, 1), (1, 0, 0)), ((1, 0, 0), (0, 1, 0))]
    ):
        turns = torch.zeros(1, 3)
        turns[0, axis] = quarter
        found = views3d.volume_rotations(turns)[0, :3, :3] @ torch.tensor(
            start, dtype=torch.float64
        )
        torch.testing.assert_close(found, torch.tensor(end, dtype=torch.float64), atol=1e-6, rtol=0)


def test_rotations_keep_lengths_and_the_middle():
    turned = views3d.centred_volume_affines(views3d.volume_rotations(torch.rand(5, 3)), SIZE)
    middle = torch.tensor([3.0, 4.0, 5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(turned @ middle, middle.expand(5, 4))
    linear = turned[:, :3, :3]
    identity = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(linear @ linear.mT, identity.expand(5, 3, 3))
    torch.testing.assert_close(torch.linalg.det(linear), torch.ones(5, dtype=torch.float64))


def test_scale_and_translation_have_their_range():
    moving = ViewSettings(affine=AffineRanges(scale=(0.5, 2.0), translate=0.25))
    views = make_random_views(torch.zeros(300, 1, *SIZE), moving, generator_for(5))
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
    mirrored = views3d.volume_flip_affines(torch.tensor([True]), 8.0).float()
    found = match_patches(plain, mirrored, layout)
    assert found.index[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3] and found.mask.all()


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
