"""The convolutional network of brain age: its published size, its bins, what it refuses."""

import pytest
import torch
from torch import nn

from moecore.core.files import UserError
from moecore.nn.backbones.base_model import parameter_counts
from moecore.nn.backbones.sfcn import Sfcn, soft_labels
from moecore.nn.predict import meta_device_context
from moecore.nn.routers.eigenbasis import Eigenbasis
from moecore.testing.check_helpers import IMAGE
from moecore.testing.model_checks import MOE
from tests.data.making import VOLUMES

CLASSES = VOLUMES.model_copy(update={"task": IMAGE.task})
ATTENDING = MOE.model_copy(update={"router": Eigenbasis(context="attention_output")})
SMALL = Sfcn(channels=(4, 8, 6), bins=3, first_bin=50, bin_width=10, bin_deviation=5)


def test_the_published_size():
    image = VOLUMES.model_copy(update={"size": (160, 192, 160)})
    with meta_device_context():
        model = Sfcn().build(image)
    assert model.layout.grid == (5, 6, 5)  # what the authors average over
    # Convolutions 27·(1·32 + 32·64 + 64·128 + 128·256 + 256·256) + 256·64 and a bias each, two
    # numbers of a batch norm for each of 800 channels, and a head of 64·40 + 40.
    convolutions = 27 * (32 + 32 * 64 + 64 * 128 + 128 * 256 + 256 * 256) + 256 * 64 + 800
    assert parameter_counts(model)["parameters"] == convolutions + 2 * 800 + 2600 == 2_952_936


def test_the_layers_in_the_order_of_the_authors():
    torch.manual_seed(0)
    model = SMALL.build(VOLUMES).eval()
    halving = [
        (nn.Conv3d(here, there, 3, padding=1), nn.BatchNorm3d(there), nn.MaxPool3d(2), nn.ReLU())
        for here, there in ((1, 4), (4, 8))
    ]
    last = (nn.Conv3d(8, 6, 1), nn.BatchNorm3d(6), nn.ReLU())
    theirs = nn.Sequential(*halving[0], *halving[1], *last, nn.AvgPool3d(4), nn.Conv3d(6, 3, 1))
    pairs = zip(theirs.state_dict().items(), model.state_dict().values(), strict=True)
    theirs.load_state_dict({name: value.view(like.shape) for (name, like), value in pairs})
    volumes = torch.rand(2, 1, 16, 16, 16)
    output = model(volumes)
    expected = theirs.eval()((volumes - 0.5) / 0.25).flatten(1)
    torch.testing.assert_close(output.heads[0], expected)
    torch.testing.assert_close(
        output.prediction[:, 0], expected.softmax(1) @ torch.tensor([55.0, 65, 75])
    )


def test_labels_over_bins_by_hand():
    # Edges 50, 60, 70, 80 and a deviation of 5: 60 is split in halves but for what lies above 70,
    # 1 − Φ(2) = 0.0228; 90 lies beyond all bins, and all but Φ(−4) falls to the last.
    rows = soft_labels(torch.tensor([60.0, 90.0]), torch.tensor([50.0, 60, 70, 80]), 5.0)
    expected = torch.tensor([[0.5, 0.4772, 0.0228], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_the_loss_is_the_divergence_from_the_label():
    model = SMALL.build(VOLUMES).train()
    labels = torch.tensor([60.0, 72.0])
    wanted = soft_labels(labels, model.edges, 5.0)
    output = model(torch.rand(2, 1, 16, 16, 16))
    exact = model.task_loss(output._replace(heads=(wanted.log(),)), labels)
    assert exact == pytest.approx(0, abs=1e-6)
    uniform = model.task_loss(output._replace(heads=(torch.zeros(2, 3),)), labels)
    # KL(q ‖ 1/3) = log 3 − H(q)
    entropy = -(wanted * wanted.log()).nansum(1).mean()
    torch.testing.assert_close(uniform, torch.tensor(3.0).log() - entropy)
    with pytest.raises(UserError, match=r"label_smoothing: found 0.1, .* allowed: 0"):
        model.task_loss(output, labels, 0.1)


@pytest.mark.parametrize(
    ("config", "image", "moe", "says"),
    [
        (Sfcn(), VOLUMES, None, r"multiples of 32 voxels .* \[16, 16, 16\] \(set `size`"),
        (SMALL, IMAGE, None, "have 2 axes; allowed: vit"),
        (SMALL, CLASSES, None, "head: found bins, .* classification; allowed: number"),
        (SMALL, VOLUMES, ATTENDING, "no attention, but the router eigenbasis reads attended"),
    ],
)
def test_what_does_not_fit_is_refused(config, image, moe, says):
    with pytest.raises(UserError, match=says):
        config.build(image, moe)
