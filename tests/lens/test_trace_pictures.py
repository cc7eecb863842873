"""Traces of images: where tokens lie, small pictures, and the patches of every expert."""

import json

import pytest
import torch

from moecore.core.files import UserError
from moecore.lens.analyses import analyse_trace
from moecore.lens.page import draw_trace_pictures, render_lens, typical_patches
from moecore.lens.recording import record_trained_model, shrink_to_pictures
from moecore.lens.traces import Trace, write_trace
from moecore.measure.exploring.expert_gallery import expert_use_by_image
from moecore.nn.backbones.vit import Vit
from moecore.nn.router_hooks import build_record
from moecore.training.artifacts import save_model
from tests.measure.subjects import built, digits
from tests.measure.test_words import MOE

BYTES = torch.arange(5 * 3 * 8 * 8).view(5, 3, 8, 8).to(torch.uint8)


def first_choices_record(*items, experts=3):
    """A record of one choice a token: of each item its tokens' experts, the first ones surer."""
    chosen = torch.tensor(items)
    sure = torch.linspace(0.9, 0.6, len(items))[:, None, None]
    probs = torch.nn.functional.one_hot(chosen, experts) * sure
    logits = (probs + (1 - probs.sum(-1, keepdim=True)) / experts).log()
    best = logits.softmax(-1).topk(1)
    return build_record(logits, best.indices, best.values)


def test_our_images_come_with_pictures_and_their_layout(tmp_path):
    data = digits(tmp_path / "digits")
    model = built(Vit(patch=4, width=8, depth=2, heads=1), MOE, data, 1.5)
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model", model)
    record_trained_model(tmp_path / "model", data.folder, tmp_path / "trace", items=20)
    trace = Trace(tmp_path / "trace")
    (layer, *_) = trace.card.layers
    assert (layer.special, layer.grid) == (model.layout.special, model.layout.grid)
    pictures = trace.beside("pictures")
    assert pictures.dtype == torch.uint8 and pictures.shape[-1] % layer.grid[-1] == 0
    names = [name for name, _ in draw_trace_pictures(trace)]
    assert names == ["Experts of patches", *(f"Patches of experts, layer {n}" for n in (1, 2))]
    assert render_lens(trace, analyse_trace(trace)).count('<section id="patches">') == 1


def test_special_tokens_have_no_neighbours(tmp_path):
    """Three special tokens change expert at each step, the patches never: F1 is 1 of these."""
    items = [[0, 1, 2, expert, expert, expert, expert] for expert in (0, 1, 2, 0, 1)]
    values = []
    for layouts in ((), [(3, (2, 2))]):
        with write_trace(tmp_path / "trace", "drawn", layouts=layouts) as trace:
            trace.add([first_choices_record(*items)])
        numbers = analyse_trace(Trace(tmp_path / "trace"))
        values.append(numbers.layers[0].quantities["consistency_2"].value)
    assert values[1] == 1 > values[0]


def test_patches_of_an_expert():
    """Expert 2 is chosen by the third patch of item 0, and less surely by two of item 1."""
    record = first_choices_record([2, 0, 0, 2, 1], [0, 2, 2, 0, 0], [2, 0, 0, 0, 0])
    use = expert_use_by_image(record, 1, torch.zeros(3, 5, 0, dtype=torch.bool))
    assert typical_patches(use, 2) == [(0, 2), (1, 0)]
    assert typical_patches(use, 1) == [(0, 3)]


def test_pictures_are_small_and_of_whole_patches():
    images = torch.rand(2, 4, 224, 224)
    small = shrink_to_pictures(images, (14, 14))
    assert small.shape == (2, 3, 84, 84) and small.dtype == torch.uint8
    kept = shrink_to_pictures(images[:, :1, :28, :28], (7, 7))
    assert torch.equal(kept, (images[:, :1, :28, :28] * 255).round().byte())


def test_a_trace_of_the_first_format_is_read(tmp_path):
    with write_trace(tmp_path / "trace", "drawn") as trace:
        trace.add([first_choices_record([0, 1, 2])])
    path = tmp_path / "trace/trace.json"
    card = json.loads(path.read_text()) | {"format": 1}
    for layer in card["layers"]:
        del layer["special"], layer["grid"]
    path.write_text(json.dumps(card))
    assert Trace(tmp_path / "trace").card.layers[0].layout() == (0, (3,), ())
    card["layers"][0] |= {"special": 1, "grid": [3]}
    path.write_text(json.dumps(card))
    with pytest.raises(UserError, match=r"layers.0: found 1 special .* grid \(3,\); allowed: tog"):
        Trace(tmp_path / "trace")


@pytest.mark.parametrize(
    ("layouts", "pictures", "problem"),
    [
        (
            [(1, (2, 3))],
            BYTES,
            r"layouts: found 1 special tokens and a grid .2, 3.; allowed: tog",
        ),
        ([(1, (2, 2))] * 2, BYTES, "layouts: found 2; allowed: one for all, or one of each of 1"),
        ([3], BYTES, "layouts: found 3; allowed: pairs"),
        ([(1, (2, 2))], BYTES.float(), "found pictures of shape .* torch.float32; allowed:"),
        ([(1, (2, 2))], BYTES[:, :2], "found pictures of shape .5, 2, 8, 8., "),
        ([(1, (2, 2))], BYTES[..., :7], "found pictures of .8, 7. pixels and a grid .2, 2."),
        ([], BYTES, r"found pictures of .* and a grid \(\) of patches; allowed: grids of"),
    ],
)
def test_what_lies_otherwise_is_refused(tmp_path, layouts, pictures, problem):
    with pytest.raises(UserError, match=problem) as error:
        with write_trace(tmp_path / "trace", "drawn", layouts=layouts) as trace:
            trace.add([first_choices_record(*[[0, 1, 2, 0, 1]] * 5)], pictures=pictures)
    assert "\n" not in str(error.value)
