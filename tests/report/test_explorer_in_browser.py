import re
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import pytest
import torch

from moecore.measure import Explorer, RouterRegret
from moecore.measure.base import MeasuredModel
from moecore.measure.routing_metrics import expert_roles
from moecore.measure.routing_metrics.expert_similarity import decode_choices
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.predict import predict_in_batches
from moecore.report.page.explorer_page import match_experts_by_choices
from moecore.routers import NoisyTopK, Told
from tests.browser import LOOKS, clipped, opened
from tests.measure.subjects import NASTY, OF_VOLUMES, built, images, moe, subject, volumes
from tests.measure.test_truth import subject as measured_on_dialects
from tests.measure.test_words import MOE, text
from tests.report.explored import (
    DENSE,
    PICKED,
    address,
    alone,
    first_explored,
    numbers,
    settled,
    state,
    study,
    two_seeds,
    written,
)
from tests.tasks.test_classification import MOSAIC


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    return written(folder / "whole.html", study())


def best(model, pixels, layer: int, image: int) -> list[str]:
    _, records = predict_in_batches(model.model, pixels, 5)
    return [str(int(one)) for one in records[layer].combine[image, 1:].argmax(-1)]


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_fits_and_is_complete(browser, whole, width, scheme):
    with opened(browser, address(whole, PICKED), width, scheme) as page:
        settled(page)
        assert clipped(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator(".panel:visible").count() == 2
        assert page.locator(".panel:visible .cell").count() == 18
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
        assert dark == (scheme == "dark")


def test_a_phone_begins_with_one_model_and_large_targets(browser, whole):
    with opened(browser, whole, 390, "light") as page:
        settled(page)
        assert page.locator(".panel:visible").count() == 1
        box = page.locator(".cell").first.bounding_box()
        assert box["width"] >= 40 and box["height"] >= 40
        page.locator("#images [role=option] >> nth=4").click()
        page.locator(".cell >> nth=8").click()
        assert state(page)["image"] == "4" and state(page)["patch"] == "9"


def test_patches_carry_the_numbers_of_their_experts(browser, folder):
    model = subject(images(), moe())
    path = written(folder / "numbers.html", alone(model))
    where = [0, 25, 12, 37, 6]
    with opened(browser, address(path, "#image=3&layer=2"), 1400, "light") as page:
        assert numbers(page) == best(model, model.data.test.images[where], 1, 3)
        assert state(page)["layer"] == "2"


def test_the_slider_marks_what_changed(browser, whole):
    start = PICKED.replace("step=2", "step=0").replace("attack", "noise")
    with opened(browser, address(whole, start), 1400, "light") as page:
        clean = numbers(page)
        panel = page.locator(".panel >> nth=0")
        assert panel.locator(".count").inner_text() == "clean image"
        page.locator("#step").focus()
        page.keyboard.press("End")
        assert state(page)["step"] == "4" and page.locator("#label").inner_text() == "σ = 0.4"
        assert page.locator("#step").get_attribute("aria-valuetext") == "σ = 0.4"
        moved = numbers(page)
        arrows = [text for text in moved if "→" in text]
        assert panel.locator(".cell.changed").all_text_contents() == arrows != []
        assert [text.split("→")[0] for text in moved] == clean
        assert panel.locator(".count").inner_text() == f"{len(arrows)} of 9 patches changed"


def test_a_laptop_shows_every_control_without_scrolling(browser, whole):
    with opened(browser, whole, 1400, "light") as page:
        settled(page)
        assert page.evaluate("document.documentElement.scrollHeight") <= 900
        assert page.locator(".panel:visible").count() == 2
        values = {"phase": "1", "method": "prc", "beside": "vmoe", "layer": "1"}
        for name, value in (values | {"kind": "augmentation"}).items():
            page.select_option(f"#{name}", value)
        found = state(page)
        assert (found["phase"], found["method"], found["beside"]) == ("finetune", "prc", "vmoe")
        assert (found["layer"], found["kind"], found["step"]) == ("2", "augmentation", "0")
        assert page.locator(".panel h2").all_inner_texts() == ["prc", "vmoe"]
        page.locator("#step").fill("1")
        settled(page)
        assert page.locator("#label").inner_text() == "moved"
        assert "are not in the clean image" in page.locator(".count").first.inner_text()
        page.locator("#tint").uncheck()
        background = "getComputedStyle(document.querySelector('.cell')).backgroundColor"
        assert page.evaluate(background) == "rgba(0, 0, 0, 0)"
        page.locator("#tint").check()
        assert page.evaluate(background) != "rgba(0, 0, 0, 0)"
        page.select_option("#beside", "")
        assert state(page)["beside"] == "" and page.locator(".panel:visible").count() == 1


def test_pointing_at_a_patch_shows_its_probabilities_in_both(browser, whole):
    with opened(browser, address(whole, PICKED), 1400, "light") as page:
        settled(page)
        heads = page.locator(".details h3")
        assert heads.all_inner_texts() == ["Patch in row 2, column 1"] * 2
        page.locator(".panel >> nth=1").locator(".cell >> nth=8").hover()
        assert heads.all_inner_texts() == ["Patch in row 3, column 3"] * 2
        for panel in (0, 1):
            rows = page.locator(f".panel >> nth={panel}").locator(".details li")
            assert rows.count() == 4 and rows.locator(".mark", has_text="chosen").count() == 2
            shares = [float(text.split()[0]) for text in rows.locator(".number").all_inner_texts()]
            assert sum(shares) == pytest.approx(100, abs=3)
        page.locator("h1").hover()
        assert heads.all_inner_texts() == ["Patch in row 2, column 1"] * 2
        page.locator(".panel >> nth=1").locator(".cell >> nth=8").click()
        assert state(page)["patch"] == "9"
        special = page.locator(".specials button").first
        special.click()
        assert state(page)["patch"] == "0" and heads.first.inner_text() == "The class token"
        assert special.get_attribute("aria-pressed") == "true"


def test_an_expert_shows_its_load_classes_and_patches(browser, whole):
    result = first_explored(study())
    with opened(browser, address(whole, PICKED), 1400, "light") as page:
        settled(page)
        panel = page.locator(".panel >> nth=0")
        panel.locator("[data-expert='3']").click()
        assert state(page)["expert"] == "3"
        use = result.layers[1].experts[3]
        head = panel.locator(".expert h3").inner_text().split(" · ")[1]
        assert head == f"load {100 * use.load:.0f} %"
        names = panel.locator(".classes .name").all_inner_texts()
        classes = [NASTY, "class 1", "class 2"]
        assert names == [classes[place] for place, _ in use.classes]
        crops = panel.locator(".crops li")
        assert crops.count() == len(use.favourites)
        assert f"image {use.favourites[0].image}," in crops.first.get_attribute("title")
        dim = panel.locator(".cell.dim").all_text_contents()
        assert dim and not [text for text in dim if text.split("→")[-1] == "3"]
        panel.locator("[data-expert='3']").click()
        assert "expert" not in state(page) and panel.locator(".cell.dim").count() == 0


def test_by_keyboard_alone(browser, whole):
    with opened(browser, address(whole, "#image=0&patch=1"), 1400, "light") as page:
        settled(page)
        order = []
        for _ in range(17):
            page.keyboard.press("Tab")
            focused = "document.activeElement.id || document.activeElement.className"
            order.append(page.evaluate(focused))
        assert order[:9] == ["", *"phase method beside layer kind step tint images".split()]
        assert order[9:15] == ["", "cells", "list", "", "cells", "list"]
        page.locator("#images").focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
            page.keyboard.press(key)
            settled(page)
        assert state(page)["image"] == "3", "one on, four on and held at the end, one back"
        grid = page.locator(".cells >> nth=0")
        grid.focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown"):
            page.keyboard.press(key)
            settled(page)
        assert state(page)["patch"] == "8"
        assert page.evaluate("document.activeElement.className") == "cells"
        active = grid.get_attribute("aria-activedescendant")
        cell = page.locator(f"[id='{active}']")
        assert cell.get_attribute("aria-selected") == "true"
        assert cell.get_attribute("aria-label").startswith("Patch in row 3, column 2: expert ")
        assert page.locator("#said").inner_text().count("Patch in row 3, column 2: expert ") == 2
        page.locator(".list >> nth=0").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        assert "expert" in state(page)
        page.keyboard.press("Escape")
        assert "expert" not in state(page)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_epochs_of_a_training(browser, whole):
    start = address(whole, "#method=prc&beside=vmoe&kind=epoch")
    with opened(browser, start, 1400, "dark") as page:
        settled(page)
        assert page.locator("#label").inner_text() == "epoch 1 of 10"
        first, second = page.locator(".count").all_inner_texts()[:2]
        assert first.endswith("patches changed until the end") and not first.startswith("0 ")
        assert second == "no training epoch was looked at in this model"
        page.locator("#step").fill("1")
        settled(page)
        assert page.locator(".count").first.inner_text().startswith("0 of 9 patches changed")


def test_an_address_brings_the_view_back(browser, whole):
    with opened(browser, address(whole, PICKED + "&expert=1"), 1400, "light") as page:
        found = state(page)
        assert found == dict(parse_qsl(PICKED[1:])) | {"expert": "1"}
        page.evaluate("location.hash = '#method=prc&beside=&image=99&layer=-3&step=x&kind=blur'")
        page.wait_for_function("state.image === 4")
        found = state(page)
        assert (found["method"], found["layer"], found["step"]) == ("prc", "1", "0")
        assert found["kind"] == "noise"


def test_a_dense_model_says_that_there_is_nothing_to_see(browser, whole):
    with opened(browser, address(whole, "#method=dense&beside=prc"), 1400, "light") as page:
        settled(page)
        assert page.locator(".panel >> nth=0").inner_text().endswith(DENSE[1:] + ".")
        assert page.locator(".panel >> nth=1").locator(".cell").count() == 9
        option = page.locator("#beside option[value=dense]")
        assert option.is_disabled() and option.inner_text() == "dense (no experts: no routing)"


def test_volumes_are_three_slices(browser, folder, tmp_path):
    path = written(folder / "volumes.html", alone(volumes(tmp_path), OF_VOLUMES))
    with opened(browser, address(path, "#patch=22"), 390, "light") as page:
        settled(page)
        assert clipped(page) == []
        frames = page.locator("figure:visible")
        assert frames.locator("figcaption").all_inner_texts() == ["axial", "coronal", "sagittal"]
        assert page.locator(".panel:visible .cell").count() == 48
        # token 22 is cube 21 = (1, 1, 1): x, y and z of 4 cubes each
        assert page.locator("h3").first.inner_text() == "Cube 2 to the right, 2 to the front, 2 up"
        moves = {0: ("ArrowUp", 26), 1: ("ArrowUp", 27), 2: ("ArrowRight", 31)}
        for frame, (key, token) in moves.items():
            page.locator(".cells").nth(frame).focus()
            page.keyboard.press(key)
            assert state(page)["patch"] == str(token)
        assert page.locator(".answer").first.inner_text().endswith("years")
        assert page.locator("#truth").inner_text().startswith("age ")
        page.locator("#step").fill("1")
        settled(page)
        assert "of 64 patches changed" in page.locator(".count").first.inner_text()


def test_four_hundred_experts_and_a_thousand_classes(browser, folder):
    path = written(folder / "many.html", alone(subject(images(classes=1000), moe(400))))
    with opened(browser, address(path, "#expert=399&step=2"), 390, "dark") as page:
        settled(page)
        assert clipped(page) == [] and page.locator("[role=option][data-expert]").count() == 400
        inside = page.locator(".list").first.bounding_box()
        row = page.locator("[data-expert='399']").first.bounding_box()
        assert inside["y"] <= row["y"] <= inside["y"] + inside["height"]
        assert page.locator(".details .quiet").first.inner_text() == "the first 8 of 400"
        assert page.locator(".panel .cell").first.inner_text() != ""


def test_one_layer_and_large_colour_images(browser, folder):
    data = images(size=64, channels=3, number=8)
    path = written(folder / "one.html", alone(subject(data, moe(blocks=(1,)), patch=4)))
    with opened(browser, path, 390, "light") as page:
        settled(page)
        assert page.locator("#layer option").all_inner_texts() == ["1 of 1"]
        assert page.locator(".cell").count() == 256 and clipped(page) == []


def test_the_true_kind_stands_beside_the_expert(browser, folder):
    """Told that a patch is of kind n the router chooses expert n − 1; noise leaves the truth."""
    model = measured_on_dialects(Told())
    explored = alone(model)
    result = first_explored(explored)
    assert {one.kind for one in result.shown} == {"clean", "noise", "attack"}
    assert all(one.picture.shape[1] == 1 for one in result.shown)
    assert result.layers[0].crops.shape[1] == 1
    experts = result.layers[0].experts
    assert [use.kinds for use in experts] == [((kind, 1.0),) for kind in (1, 2, 3)]
    places = (model.data.test.images[:, -1, ::4, ::4] == 2).mean(axis=0)
    assert experts[1].peak == places.max()
    drawn = result.layers[0].places.array()[1, 0]
    assert drawn.tolist() == np.rint(places / places.max() * 255).tolist()
    kinds = model.data.test.images[result.images[2], -1, ::4, ::4].ravel().tolist()
    path = written(folder / "kinds.html", explored)
    for view in ("#image=2", "#image=2&kind=noise&step=4", "#image=2&kind=attack&step=1"):
        with opened(browser, address(path, view), 1400, "light") as page:
            assert numbers(page) == [f"{kind - 1}k{kind}" for kind in kinds]
            assert f"true kind {kinds[3]}" in page.locator(".details h3").inner_text()
            assert clipped(page) == []


def test_of_a_mosaic_every_cells_answer_stands_beside_its_label(browser, folder):
    model = measured_on_dialects(NoisyTopK(k=1), image=MOSAIC)
    path = written(folder / "cells.html", alone(model))
    test, image = model.data.test, 3
    place = first_explored(alone(model)).images[image]
    logits = model.model(torch.from_numpy(test.images[[place]]) / 255).prediction.view(4, 3)
    answers, labels = logits.argmax(dim=1), torch.from_numpy(test.labels[place])
    with opened(browser, address(path, f"#image={image}"), 390, "light") as page:
        said = settled(page).locator(".answer >> nth=0").inner_text()
        assert said.startswith(f"{int((answers == labels).sum())} of 4 cells right: ")
        assert re.findall("([abc]) [0-9]+ %", said) == ["abc"[answer] for answer in answers]
        right = ", ".join("abc"[label] for label in labels)
        assert page.locator("#truth").inner_text() == f"{right}, number {place} of the test split"
        assert clipped(page) == []


def test_two_seeds_side_by_side(browser, tmp_path):
    """Their experts are matched on the choices of routing.roles; unlike patches are marked."""
    found = two_seeds()
    path = written(tmp_path / "seeds.html", found)
    roles, others = found.phases["pretrain"].of(expert_roles.ExpertRoles)["vmoe"]
    layers = [decode_choices(expert_roles.read_encoded_choices(one)[1]) for one in (roles, others)]
    partners = match_experts_by_choices(*layers)
    both = address(path, PICKED.replace("prc", "vmoe seed 1"))
    with opened(browser, both, 1400, "light") as page:
        names = page.locator("#beside option").all_inner_texts()
        assert names == ["none", "vmoe", "prc", "vmoe seed 1"]
        page.locator("#step").fill("0")
        first, second = ([int(one) for one in numbers(page, panel)] for panel in (0, 1))
        unlike = [partners[one] != other for one, other in zip(first, second, strict=True)]
        assert 0 < sum(unlike) < 9
        for panel in page.locator(".panel").all():
            unlike_cells = "cells => cells.map(cell => cell.classList.contains('unlike'))"
            assert panel.locator(".cell").evaluate_all(unlike_cells) == unlike
            assert f"◥ {sum(unlike)} of 9 patches" in panel.locator(".image").inner_text()
        tint = "rows => rows.map(row => row.querySelector('.badge').getAttribute('style'))"
        panels = page.locator(".panel").all()
        colours = [panel.locator("[data-expert]").evaluate_all(tint) for panel in panels]
        assert [colours[1][partner] for partner in partners] == colours[0]
        page.locator(".panel >> nth=0").locator("[data-expert='2']").click()
        assert state(page)["expert2"] == str(partners[2])
        texts = page.locator(".panel >> nth=0").inner_text()
        assert f"its match in vmoe seed 1: expert {partners[2]}" in texts
        assert "Without it the accuracy is worse by" in texts and "would lower the loss by" in texts
        assert "it most often follows, in the layer before" in texts
        assert "followed by" not in texts, "there are two layers"
        panel = page.locator(".panel >> nth=0")
        phase = found.phases["pretrain"]
        (explored, *_), (regret, *_) = (phase.of(kind)["vmoe"] for kind in (Explorer, RouterRegret))
        image = explored.facts["images"][3]
        (best,) = [one for one in regret.facts["best"][1] if one["image"] == image]
        words = ", ".join(map(str, best["experts"])) or "no other experts"
        panel.locator(f"[data-token='{best['tokens'][0]}']").first.click()
        assert words in settled(page).locator(".panel >> nth=0 >> .best").inner_text()
        other = next(token for token in range(1, 9) if token not in best["tokens"])
        panel.locator(f"[data-token='{other}']").first.click()
        tried = settled(page).locator(".panel >> nth=0 >> .best").inner_text()
        assert tried.startswith("other experts were tried of: ")
        margin = expert_roles.read_layer_roles(roles)[1].values["margin"]
        mean = f"layer mean {100 * margin:.{int(margin < 0.0995)}f} %"
        assert f"% more probable than the next expert; margin of the choice, {mean}" in texts
        biased = page.evaluate("marginOf = () => -0.03, marginWords(views[0], 1)")
        assert biased.startswith("3.0 % less probable than the next expert; ")
        seed = page.locator(".panel >> nth=1")
        assert "favourite patches are kept of the first seed" in seed.inner_text()
        assert seed.locator(".map canvas").count() == 1
        page.locator("#step").fill("2")
        settled(page)
        assert page.locator(".unlike").count() == 0, "of further seeds only clean images are kept"
        page.locator("#step").fill("0")
        page.select_option("#beside", "prc")
        settled(page)
        assert page.locator(".unlike").count() == 0 and "set routing.roles for" in seed.inner_text()


def test_keys_that_no_control_takes(browser, tmp_path):
    start = address(written(tmp_path / "whole.html", study()), "#image=0&patch=1&layer=1&beside=")
    with opened(browser, start, 1400, "light") as page:
        settled(page)
        assert "Shift ← → layer" in page.locator("#keys").inner_text()
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Shift+ArrowRight"):
            page.keyboard.press(key)
            settled(page)
        assert (state(page)["image"], state(page)["layer"]) == ("1", "2")
        before = page.evaluate("views[0].expert")
        page.keyboard.press("Shift+ArrowUp" if before else "Shift+ArrowDown")
        assert state(page)["expert"] == str(before - 1 if before else 1)
        page.keyboard.press("Escape")
        assert "expert" not in state(page)


def test_a_text_is_words_with_their_experts(browser, tmp_path):
    data = text(tmp_path / "words")
    backbone = LanguageModel(width=8, depth=2, heads=2, span=6)
    explored = alone(MeasuredModel(built(backbone, MOE, data, 1.5), data))
    result = first_explored(explored)
    path = written(tmp_path / "text.html", explored)
    for width, scheme in LOOKS:
        with opened(browser, address(path, "#image=1&patch=2"), width, scheme) as page:
            assert [re.sub("[0-9]$", "", one) for one in numbers(page)] == list(result.words[1])
            assert clipped(page) == [] and page.locator("#kind").is_hidden()
            assert page.locator(".details h3").inner_text() == f"Token 3, {result.words[1][2]}"
            page.locator("[data-expert='3']").click()
            words = [word for word, _ in result.layers[0].experts[3].words]
            assert settled(page).locator(".expert .name").all_inner_texts() == words != []
