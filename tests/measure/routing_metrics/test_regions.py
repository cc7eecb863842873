"""The routing of tissues alone, with a model whose routing is known."""

import numpy as np
import pytest
import torch
from torch import nn

from moecore.core.files import UserError
from moecore.core.records import Layout, ModelOutput, RoutingRecord
from moecore.measure.routing_metrics.imed import class_maps
from moecore.measure.routing_metrics.regions import region_routing, shuffled
from moecore.training.isolation import isolate
from tests.volumes import ball

NAMES = ("wm", "gm", "free_2")


class Bright(nn.Module):
    """Scores of a cube: expert 0 likes its largest voxel, expert 1 the opposite, expert 2 is at
    0.5; the best one is chosen.
    """

    layout = Layout(1, (2, 2, 2), (4, 4, 4))

    def forward(self, images):
        cubes = torch.nn.functional.adaptive_max_pool3d(images, self.layout.grid).flatten(1)
        first = torch.cat(
            [torch.full((len(images), 1), 7.0), cubes], dim=1
        )  # a special token that likes expert 0 very much
        scores = torch.stack([first, 1 - first, torch.full_like(first, 0.5)], dim=-1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(
            -1, scores.argmax(dim=-1, keepdim=True), True
        )
        return ModelOutput(
            images.mean(dim=(1, 2, 3, 4))[:, None],
            (
                RoutingRecord(scores * 100, *[scores] * 2, ~chosen, scores),
                RoutingRecord(scores, scores, scores, chosen, scores),
            ),
        )


def test_rows_by_hand():
    # two volumes of 4³ in cubes of 2³. tissue a: one voxel of grey 0.9 in each volume; tissue b: a
    # voxel of 0.1 in the first volume and two in different cubes of the second, so three cubes; the
    # other cubes and the special token do not count.
    volumes, regions = np.zeros((2, 1, 4, 4, 4), np.float16), np.zeros((2, 2, 4, 4, 4), np.uint8)
    volumes[:, 0, 0, 0, 0], regions[:, 0, 0, 0, 0] = 0.9, 255
    for volume, place in ((0, (3, 3, 3)), (1, (3, 3, 3)), (1, (0, 3, 3))):
        volumes[(volume, 0, *place)], regions[(volume, 1, *place)] = 0.1, 255
    rows = {
        row.region: row for row in region_routing(Bright(), volumes, regions, ("a", "b"), NAMES)
    }
    assert list(rows) == ["a", "b", "random_a", "random_b"]
    assert [name for name, _ in rows["a"].experts] == ["wm", "free_2"] and rows["a"].share == {
        "wm": 1.0,
        "gm": 0.0,
        "free_2": 0.0,
    }
    assert [score for _, score in rows["a"].experts] == pytest.approx([0.9, 0.5], abs=1e-3)
    assert [name for name, _ in rows["b"].experts] == ["gm", "free_2"] and rows["b"].share[
        "gm"
    ] == 1.0
    assert rows["b"].experts[0][1] == pytest.approx(0.9, abs=1e-3)


def test_a_share_scales_the_voxels():
    volume, share = (
        torch.full((1, 1, 1, 1, 2), 0.8),
        torch.tensor([[[[255, 51]]]], dtype=torch.uint8),
    )
    torch.testing.assert_close(isolate(volume, share).flatten(), torch.tensor([0.8, 0.16]))
    assert isolate(volume.half(), share).dtype == torch.float16


def test_the_control_keeps_as_much_inside_the_brain_and_nothing_outside():
    image, regions = ball(60, 0)
    share, brain = torch.from_numpy(regions[None, 0]), torch.from_numpy(image > 0)
    found = shuffled(share, brain, 3)
    assert (
        torch.equal(found[brain].sort().values, share[brain].sort().values)
        and (found[~brain] == 0).all()
    )
    assert (
        not torch.equal(found, share)
        and torch.equal(found, shuffled(share, brain, 3))
        and not torch.equal(found, shuffled(share, brain, 4))
    )
    two = shuffled(share.expand(2, -1, -1, -1), brain.expand(2, -1, -1, -1), 3)
    assert torch.equal(two[0], found[0]) and not torch.equal(two[0], two[1])


def test_what_does_not_fit_is_refused():
    volumes, regions = np.ones((2, 1, 4, 4, 4), np.float16), np.full((2, 1, 4, 4, 4), 255, np.uint8)
    with pytest.raises(UserError, match="must fit"):
        region_routing(Bright(), volumes, regions, ("a", "b"), NAMES)
    with pytest.raises(UserError, match="a name for each"):
        region_routing(Bright(), volumes, regions, ("a",), NAMES[:2])
    with pytest.raises(UserError, match="0 tokens"):
        region_routing(Bright(), volumes, 0 * regions, ("a",), NAMES)


def record(probs: torch.Tensor) -> RoutingRecord:
    other = torch.full_like(probs, 9.0)  # only the clean probs may be read
    return RoutingRecord(other, probs, other, other > 0, other)


def test_means_over_images_and_tokens_by_hand():
    probs = torch.tensor(
        [[[1.0, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]], [[1, 0, 0], [0, 0, 1]]]
    )  # three images, two tokens
    maps = class_maps([record(probs), record(probs.flip(-1))], torch.tensor([1, 0, 1]), 2)
    assert maps.shape == (2, 2, 3) and maps.dtype == torch.float64
    # class 0: image 1 alone; class 1: images 0 and 2, four tokens: twice expert 0, once 1, once 2
    assert maps[:, 0].tolist() == [[0, 0, 1], [0.5, 0.25, 0.25]]
    assert torch.equal(maps[:, 1], maps[:, 0].flip(-1))


def test_order_of_images_does_not_matter_and_maps_sum_to_one():
    generator = torch.Generator().manual_seed(0)
    probs, labels = (
        torch.randn(40, 3, 8, generator=generator).softmax(-1),
        torch.randint(0, 4, (40,), generator=generator),
    )
    maps, order = class_maps([record(probs)], labels, 4), torch.randperm(40, generator=generator)
    torch.testing.assert_close(class_maps([record(probs[order])], labels[order], 4), maps)
    torch.testing.assert_close(
        maps.sum(-1), torch.ones(4, 1, dtype=torch.float64), atol=1e-6, rtol=0
    )
    shares = torch.bincount(labels).double() / 40
    torch.testing.assert_close((shares[:, None] * maps[:, 0]).sum(0), probs.double().mean((0, 1)))


def test_a_class_without_images_is_nan():
    maps = class_maps([record(torch.full((2, 1, 4), 0.25))], torch.tensor([0, 2]), 3)
    assert maps[1].isnan().all() and maps[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("layers", "labels", "named"),
    [
        (0, [0, 1], "no MoE layers"),
        (1, [0], "2 images were routed, but there are 1 labels"),
        (1, [0, 3], "found labels 0 to 3; allowed: 0 to 2"),
    ],
)
def test_misfits_are_named(layers, labels, named):
    with pytest.raises(UserError, match=named):
        class_maps([record(torch.full((2, 1, 4), 0.25))] * layers, torch.tensor(labels), 3)
