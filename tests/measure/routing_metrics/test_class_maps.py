import pytest
import torch

from moecore.core.files import UserError
from moecore.core.records import RoutingRecord
from moecore.measure.routing_metrics.class_maps import class_maps


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
