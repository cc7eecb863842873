"""The explorer of two seeds, of a text, and by keys alone, as a person meets it."""

import re

from moecore.measure.base import MeasuredModel
from moecore.measure.explorer import Explorer
from moecore.measure.router_regret import RouterRegret
from moecore.measure.routing_metrics import expert_roles
from moecore.measure.routing_metrics.expert_similarity import decode_choices
from moecore.nn.backbones.language_model import LanguageModel
from moecore.report.page.explorer_page import match_choices
from tests.browser import LOOKS, clipped, opened
from tests.measure.subjects import built
from tests.measure.test_words import MOE, text
from tests.report.explored import (
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


def test_two_seeds_side_by_side(browser, tmp_path):
    """Their experts are matched on the choices of routing.roles; unlike patches are marked."""
    found = two_seeds()
    path = written(tmp_path / "seeds.html", found)
    roles, others = found.phases["pretrain"].of(expert_roles.ExpertRoles)["vmoe"]
    layers = [decode_choices(expert_roles.read_encoded_choices(one)[1]) for one in (roles, others)]
    partners = match_choices(*layers)
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
            marks = panel.locator(".cell").evaluate_all(unlike_cells)
            assert marks == unlike
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
        (explored, *_), (regret, *_) = (
            found.phases["pretrain"].of(kind)["vmoe"] for kind in (Explorer, RouterRegret)
        )
        image = explored.facts["images"][3]
        (best,) = [one for one in regret.facts["best"][1] if one["image"] == image]
        words = ", ".join(map(str, best["experts"])) or "no other experts"
        panel.locator(f"[data-token='{best['tokens'][0]}']").first.click()
        assert words in settled(page).locator(".panel >> nth=0 >> .best").inner_text()
        other = next(token for token in range(1, 9) if token not in best["tokens"])
        panel.locator(f"[data-token='{other}']").first.click()
        tried = settled(page).locator(".panel >> nth=0 >> .best").inner_text()
        assert tried.startswith("other experts were tried of: ")
        margin = expert_roles.read_layers(roles)[1].values["margin"]
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
        assert page.locator(".unlike").count() == 0
        assert "set routing.roles for" in seed.inner_text()


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
            shown = [re.sub("[0-9]$", "", one) for one in numbers(page)]
            assert shown == list(result.words[1])
            assert clipped(page) == [] and page.locator("#kind").is_hidden()
            assert page.locator(".details h3").inner_text() == f"Token 3, {result.words[1][2]}"
            page.locator("[data-expert='3']").click()
            words = [word for word, _ in result.layers[0].experts[3].words]
            names = settled(page).locator(".expert .name").all_inner_texts()
            assert names == words != []
