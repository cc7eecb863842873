import json

import numpy as np
import pytest
import torch

from moecore.core.files import UserError
from moecore.lens import Trace, build_record, trace_explorer, traces, write_trace
from moecore.lens.analyses import TopTokens, analyse_trace, update_top_tokens
from moecore.lens.page import draw_expert_patch_figures, render_trace_page, write_lens_pages
from moecore.lens.recording import record_trained_model, shrink_to_pictures
from moecore.lens.trace_explorer import ExplorerDataCollector, TraceWithNumbers, render_traces
from moecore.measure.explorer import Explorer
from moecore.nn.backbones.vit import Vit
from moecore.parts import MeasuredModel, TokenLayout
from moecore.report.page.explorer_page import STUDY_EXPLORER_HEAD
from moecore.training.artifacts import save_model, save_vocab
from tests.browser import LOOKS, clipped, opened
from tests.measure.subjects import built, compute_without_cache, digits
from tests.measure.test_words import MOE, subject
from tests.report.explored import address, settled

BYTES = torch.arange(5 * 3 * 8 * 8).view(5, 3, 8, 8).to(torch.uint8)
__all__ = ["subject"]
WORDS = ("the", "lens", "reads", "traces")
TOKENS = torch.tensor([[0, 1, 2, 3], [1, 1, 0, 2], [3, 2, 1, 0]])
CHOICES = [[1, 0, 1, 1], [0, 0, 1, 1], [2, 1, 1, 0]]  # the first item is the surest


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
    pictures = trace.item_tensor("pictures")
    assert pictures.dtype == torch.uint8 and pictures.shape[-1] % layer.grid[-1] == 0
    names = [name for name, _ in draw_expert_patch_figures(trace)]
    assert names == ["Experts of patches", *(f"Patches of experts, layer {n}" for n in (1, 2))]
    assert render_trace_page(trace, analyse_trace(trace)).count('<section id="patches">') == 1


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
    layout = TokenLayout(1, (2, 2), (8, 8))
    top = update_top_tokens(TopTokens.of_none(3), record, record.probs, layout, np.arange(3))
    for expert, patches in ((2, [(0, 2), (1, 0)]), (1, [(0, 3)])):
        found = [field[top.keys[:, expert] >= 0, expert].tolist() for field in top[1:3]]
        assert list(zip(*found, strict=True)) == patches


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
        ([(1, (2, 3))], BYTES, r"layouts: found 1 special tokens and a grid .2, 3.; allowed: tog"),
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


def explored(model: MeasuredModel, folder) -> ExplorerDataCollector:
    (folder / "model").mkdir()
    save_model(folder / "model", model.model)
    if model.model.image.task.long:
        save_vocab(folder / "model", model.data)
    record_trained_model(folder / "model", model.data.folder, folder / "trace")
    return ExplorerDataCollector(Trace(folder / "trace"))


def test_of_our_language_model_it_is_the_measurement(subject, tmp_path):
    own = Explorer(images=1).explore(subject, compute_without_cache)
    ours = explored(subject, tmp_path).build_page_data(items=1)
    assert (ours.grid, ours.images, ours.words) == (own.grid, own.images, own.words)
    assert ours.shown[0].trace.layers == own.shown[0].trace.layers
    for layer, other in zip(ours.layers, own.layers, strict=True):
        experts = [one.model_copy(update={"favourites": ()}) for one in layer.experts]
        assert experts == list(other.experts) and experts[0].words


def test_of_our_images_it_is_the_measurement_but_for_what_needs_the_model(tmp_path):
    data = digits(tmp_path / "digits")
    model = MeasuredModel(built(Vit(patch=4, width=8, depth=2, heads=1), MOE, data, 1.5), data)
    own = Explorer(images=1, epsilons=(), augmentations=()).explore(model, compute_without_cache)
    ours = explored(model, tmp_path).build_page_data(items=1)
    assert ours.shown[0].picture == own.shown[0].picture and ours.labels == own.labels
    for layer, other in zip(ours.layers, own.layers, strict=True):
        assert layer.places == other.places
        for one, expert in zip(layer.experts, other.experts, strict=True):
            assert one.favourites[:8] == expert.favourites[:8] and len(one.favourites) == 16
            same = {"favourites": ()}
            assert one.model_copy(update=same) == expert.model_copy(update=same)


def write_words(folder, **beside):
    """Three texts of four words, whose experts are known."""
    with write_trace(folder, "foreign", WORDS) as trace:
        for row in range(3):
            record = first_choices_record(*CHOICES)
            batch = record.map_tensors(lambda field, row=row: field[row : row + 1])
            trace.add([batch], tokens=TOKENS[row : row + 1], **beside)
    return Trace(folder)


def test_examples_by_hand(tmp_path, monkeypatch):
    """One an item, the surest item first; drawn are all items that chose the expert."""
    explorer = write_words(tmp_path / "one"), write_words(tmp_path / "kinds", labels=TOKENS[:1])
    explorer, of_kinds = (ExplorerDataCollector(one) for one in explorer)
    surest, drawn = explorer.layers[0].examples[0]
    assert [one.token.image for one in surest] == [0, 1, 2]
    sure = [0.9 + 0.1 / 3, 0.75 + 0.25 / 3, 0.6 + 0.4 / 3]
    assert [one.token.probability for one in surest] == pytest.approx(sure, abs=1e-4)
    assert surest[0].context == ("the", "lens", "reads traces")
    assert surest[2].context == ("traces reads lens", "the", "")
    assert sorted(one.token.image for one in drawn) == [0, 1, 2]
    assert {one.token.patch for one in drawn if one.token.image == 1} <= {0, 1}
    profiles = explorer.layers[0].profiles
    assert [one.load for one in profiles] == pytest.approx([4 / 12, 7 / 12, 1 / 12], abs=1e-5)
    # labels 0 to 3 stand at places 0 to 3: expert 2 has place 0 of the last item alone
    assert of_kinds.layers[0].profiles[2].kinds == ((1, 1.0),) and of_kinds.build_page_data().kinds
    monkeypatch.setattr(traces, "PROBABILITIES_PER_FILE", 1)  # a file an item
    assert len((many := write_words(tmp_path / "many")).card.chunks) == 3
    assert ExplorerDataCollector(many).build_page_data() == explorer.build_page_data()
    assert [one.load for one in ExplorerDataCollector(many, items=1).layers[0].profiles] == [
        0.25,
        0.75,
        0,
    ]


def test_the_page_shows_less_where_it_grew_too_large(tmp_path, monkeypatch):
    trace = write_words(tmp_path / "trace")
    explored = TraceWithNumbers(ExplorerDataCollector(trace), analyse_trace(trace))
    whole = render_traces(explored, STUDY_EXPLORER_HEAD)
    monkeypatch.setattr(trace_explorer, "MAX_PAGE_BYTES", len(whole.encode()) - 1)
    assert len(render_traces(explored, STUDY_EXPLORER_HEAD)) < len(whole)


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_reader_sees_what_an_expert_gets(browser, tmp_path, width, scheme):
    write_words(tmp_path / "texts")
    with write_trace(tmp_path / "images", "<foreign>", layouts=[(0, (2, 2))]) as trace:
        trace.add([first_choices_record(*CHOICES)], pictures=BYTES[:3], labels=TOKENS[:, 0])
    for name in ("texts", "images"):
        write_lens_pages(tmp_path / name, tmp_path / f"{name}.html")
    with opened(browser, tmp_path / "texts.html", width, scheme) as page:
        page.locator("nav").get_by_text("Explorer").click()
        settled(page).locator("[data-expert='0']").click()
        rows = settled(page).locator(".contexts")
        assert rows.nth(0).locator("b").all_inner_texts() == ["lens", "lens", "the"]
        assert rows.nth(1).locator("li").count() == 3
        assert "reads traces" in rows.nth(0).locator("li").first.inner_text()
        assert page.locator("#truth").inner_text() == "Text 1, number 0 of the trace"
        text = page.locator("main").inner_text()
        assert "followed by" not in text and "Without it" not in text and "best:" not in text
        assert clipped(page) == [] and page.locator("#method").is_hidden()
    pictures = address(tmp_path / "images_explorer.html", "#expert=1&image=1")
    with opened(browser, pictures, width, scheme) as page:
        lists = settled(page).locator(".crops")
        assert [lists.nth(place).locator("canvas").count() for place in (0, 1)] == [3, 3]
        assert "image 0, patch in row" in lists.nth(0).locator("li").first.get_attribute("title")
        assert page.locator(".panel h2").first.inner_text() == "<foreign>"
        assert page.locator(".expert .name").all_inner_texts()[0] == "label 0"
        page.keyboard.press("Shift+ArrowUp")
        assert settled(page).evaluate("state.experts[0]") == 0 and clipped(page) == []


def test_another_trace_stands_beside_with_its_experts_matched(browser, tmp_path):
    """The same choices by experts of other numbers, in two models of one name."""
    experts = [row % 3 for row in (1, 2, 0, 0, 1, 1, 2, 0, 2, 1, 0, 2)]
    for name, renumbered in (("one", experts), ("two", [(one + 1) % 3 for one in experts])):
        record = first_choices_record(*torch.tensor(renumbered).repeat(2).view(6, 4).tolist())
        with write_trace(tmp_path / name, "foreign", WORDS) as trace:
            trace.add([record], tokens=TOKENS.repeat(2, 1))
    write_lens_pages(tmp_path / "one", tmp_path / "lens.html", against=tmp_path / "two")
    with opened(browser, tmp_path / "lens_explorer.html", 1400, "light") as page:
        one, two = settled(page).locator(".panel h2").all_inner_texts()
        assert (one, two) == ("foreign", f"foreign, {tmp_path / 'two'}")
        page.locator(".panel").first.locator("[data-expert='1']").click()
        texts = settled(page).locator("main").inner_text()
        assert page.evaluate("state.experts") == [1, 2] and f"its match in {two}: expert 2" in texts
        assert f"0 of 4 words go to another expert than in {one}" in texts


def test_layers_of_other_tokens_have_no_explorer(tmp_path, capsys):
    (tmp_path / "lens_explorer.html").write_text("of an earlier trace", encoding="utf-8")
    with write_trace(tmp_path / "trace", "two streams") as trace:
        trace.add([first_choices_record([0, 1]), first_choices_record([0, 1, 2])])
    write_lens_pages(tmp_path / "trace", tmp_path / "lens.html")
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "explorer" in one]
    assert line.startswith("explorer: layers with different tokens; allowed: ")
    assert not (tmp_path / "lens_explorer.html").exists()
    assert line in (tmp_path / "lens.html").read_text(encoding="utf-8")
