"""Mosaics whose cells are answered one by one: each by the tokens of its own cell."""

import pytest
import torch

from moecore.core.files import UserError
from moecore.nn.backbones.patch_transformer_base import mean_of_cells
from moecore.nn.backbones.single_layer import SingleLayer
from moecore.nn.backbones.swin import Swin
from moecore.nn.backbones.vit import Vit
from moecore.tasks.cells import Cells
from tests.measure.test_truth import IMAGE

MOSAIC = IMAGE.model_copy(update={"task": Cells(classes=("a", "b", "c"), grid=2)})  # 8 × 8 pixels


def test_the_tokens_of_a_cell_are_averaged_row_by_row():
    tokens = torch.arange(16.0).view(1, 16, 1)  # 4 × 4: the first cell has 0, 1, 4 and 5
    assert mean_of_cells(tokens, (4, 4), 4).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert mean_of_cells(tokens, (4, 4), 16).flatten().tolist() == list(range(16))


@torch.no_grad()
@pytest.mark.parametrize("patch", [2, 4])
def test_without_attention_a_cell_is_answered_by_its_own_pixels(patch):
    model = Vit(patch=patch, width=16, depth=1, heads=2, pooling="mean").build(MOSAIC).eval()
    model.blocks[0].attn.proj.weight.zero_()
    images = torch.rand(2, 2, 8, 8)
    before = model(images).prediction
    assert before.shape == (2, 12)
    images[:, :, :4, 4:] = 0  # the second cell
    changed = (model(images).prediction != before).view(2, 4, 3).any(dim=2)
    assert changed.tolist() == [[False, True, False, False]] * 2


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        (Vit(patch=4, width=16, depth=1, heads=2), "model.pooling: found class, .*allowed: mean"),
        (Vit(patch=8, width=16, depth=1, heads=2, pooling="mean"), "model.patch: found 8, "),
        (SingleLayer(), "model.kind: found single_layer, .*allowed: vit"),
        (Swin(patch=2, width=8, depths=(1,), heads=(2,), window=2), "model.kind: found swin, "),
    ],
)
def test_models_that_cannot_answer_cells_are_refused(backbone, said):
    with pytest.raises(UserError, match=said):
        backbone.build(MOSAIC)
