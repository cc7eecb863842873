import json
from pathlib import Path

import numpy as np
import pytest

from moecore.predict import pictures as predicted
from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.page.explorer_page import render_study_explorer
from moecore.report.page.report_page import render_report
from moecore.report.result_types import Models
from moecore.report.results_and_displays import read_results
from moecore.study.run_and_claims import RunSelection
from moecore.study.stages import MEASURED_STAGES
from moecore.tasks.classification import Classification
from tests.browser import LOOKS, clipped, opened
from tests.report import explored
from tests.report.generated import CLASSES, NEW, card, write_results
from tests.report.test_claims import claim

METHODS = {"dense": False, "vmoe": True, "prc": True, "ermoe": True, "tgr": True, "moge": True}
PHASES = ("pretrain", "finetune")
STAGES = (*MEASURED_STAGES, "invariance", "few_shot", *NEW)
SETTINGS = (
    "methods: {dense: {}, vmoe: {router: {kind: noisy_top_k}}, "
    "moge: {router: {kind: noisy_top_k}, regularizers: [{kind: group_sparsity}]}} "
    "# <script>alert(1)</script>\n"
)
PLACE = "document.querySelector('.places [aria-current]').hash"
HEIGHTS = {1400: 8000, 390: 12000}
EVIL = {
    "class": '"><img src=x onerror="window.ran=1">',
    "method": "</script><script>window.ran=2</script>",
    "data": "<svg onload=window.ran=3>{{ 7 * 7 }}</style>",
    "participant": "sub-<script>window.ran=4</script>\u202e",
    "caption": "' onmouseover='window.ran=5' <!-- & \\u003c $x$",
    "reason": "<a href=javascript:window.ran=6>a</a>",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Six methods, two phases, everything measured; one seed."""
    root = tmp_path_factory.mktemp("study")
    write_results(root, METHODS, [0], list(PHASES), STAGES)
    run = RunSelection(methods=tuple(METHODS), seeds=(0,), phases=PHASES)
    return read_results(run, SETTINGS, root, STAGES)


@pytest.fixture(scope="module")
def written(study, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    evaluated = evaluate_claims([claim(says="<img src=x onerror=alert(1)>")], study)
    path.write_text(render_report(study, evaluated, explorer="explorer.html"), encoding="utf-8")
    (path.parent / "explorer.html").write_text("<title>Explorer</title>", encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_nothing_is_clipped_and_little_is_scrolled(browser, written, width, scheme):
    with opened(browser, written, width, scheme) as shown:
        assert clipped(shown) == []
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        assert shown.evaluate("document.documentElement.scrollHeight") < HEIGHTS[width]
        assert len(shown.locator("body").inner_text().split()) <= 1500
        assert shown.title() == shown.locator("h1").inner_text()
        shown.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert clipped(shown) == []
        lead = shown.locator(".lead").bounding_box()
        picture = shown.locator(".pair figure").first.bounding_box()
        assert lead["y"] + lead["height"] < 700 and picture["y"] < 700
        behind = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (behind == "rgb(20, 24, 29)") == (scheme == "dark")


def test_the_explorer_is_linked_from_the_first_screen(browser, written, study, undrawn):
    with opened(browser, written, 1400, "light") as shown:
        link = shown.get_by_role("link", name="Explore the routing")
        assert link.bounding_box()["y"] < 900
        link.click()
        assert shown.title() == "Explorer"
    plain = render_report(study)
    assert "explorer" not in plain and "63.04" not in plain, "no claim asks for PRC's numbers"


def test_tables_sort_by_mouse_and_by_keyboard(browser, written):
    with opened(browser, written, 1400, "light") as shown:
        table = shown.locator("#pretrain table").first
        names = table.locator("tbody th")
        before = names.all_inner_texts()
        assert before == list(METHODS)
        head = table.get_by_role("columnheader", name="Load CV²")
        button = head.get_by_role("button", name="Load CV²", exact=True)
        button.click()
        assert head.get_attribute("aria-sort") == "ascending", "best first, and lower is better"
        heads = table.locator("thead th").all_inner_texts()
        (place,) = [at for at, text in enumerate(heads, 1) if "Load CV²" in text]
        values = table.locator(f"tbody tr > :nth-child({place})").all_inner_texts()
        numbers = [float(value) for value in values if value != "–"]
        assert numbers == sorted(numbers) and values[-1] == "–", "dense has none, and is last"
        button.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        button.press("Space")
        assert head.get_attribute("aria-sort") == "none" and names.all_inner_texts() == before
        table.get_by_role("button", name="Method").click()
        assert names.all_inner_texts() == sorted(METHODS)


def test_one_paper_at_a_time(browser, written):
    with opened(browser, written, 1400, "light") as shown:
        shown.locator("summary", has_text="on the metrics of every paper").first.click()
        tabs = shown.locator("#pretrain").get_by_role("tab")
        panes = shown.locator("#pretrain").get_by_role("tabpanel")
        assert panes.count() == 1 and "pairwise" in panes.first.inner_text()
        tabs.get_by_text("MoGE", exact=True).click()
        assert "mixture of group experts" in panes.first.inner_text()
        shown.keyboard.press("ArrowLeft")
        assert "teacher-guided" in panes.first.inner_text()
        shown.keyboard.press("Home")
        assert "pairwise" in panes.first.inner_text()
        assert tabs.first.get_attribute("aria-selected") == "true"
        heads = panes.first.locator("thead").inner_text()
        assert "63.04" in heads, "the paper's own number: a claim of PRC is tested"


def follow(link) -> None:
    """Click a link of the bar unscrolled: scrolling to it would change what the bar lists."""
    link.evaluate("one => one.click()")


@pytest.mark.parametrize("width", [1400, 390])
def test_the_bar_follows_and_marks(browser, written, width):
    with opened(browser, written, width, "light") as shown:
        bar = shown.locator(".bar")
        assert bar.locator(".places [aria-current]").inner_text() == "Answer"
        bar.get_by_role("link", name="Fine-tuned on Digits").click()
        assert bar.bounding_box()["y"] == 0
        shown.wait_for_function(f"{PLACE} === '#finetune'")
        assert bar.locator(".parts:visible").count() == 1
        follow(bar.locator(".parts:visible").get_by_role("link", name="Robustness", exact=True))
        fold = shown.locator("#finetune-robustness")
        shown.wait_for_function("document.getElementById('finetune-robustness').open")
        # What the link leads to lies below the bar and its list of parts.
        low = bar.locator(".parts:visible").bounding_box()
        assert fold.bounding_box()["y"] >= low["y"] + low["height"] - 1
        shown.keyboard.press("End")
        shown.wait_for_function(f"{PLACE} === '#settings'")


def test_a_link_opens_the_fold_and_the_pane_that_it_points_into(browser, written):
    address = written.resolve().as_uri()
    pane = "pretrain-every_method_on_the_metrics_of_every_paper-4"
    with opened(browser, f"{address}#pretrain-cost", 1400, "light") as shown:
        shown.goto(f"{address}#{pane}")
        shown.reload()
        assert shown.locator(f"#{pane}").is_visible()
        fold = shown.locator("#pretrain-calibration")
        assert fold.get_attribute("open") is None
        shown.evaluate("location.hash = 'pretrain-calibration'")
        shown.wait_for_function("document.getElementById('pretrain-calibration').open")
        fold.locator("summary").first.click()
        assert fold.get_attribute("open") is None
        follow(shown.locator('.bar a[href="#pretrain-calibration"]'))
        shown.wait_for_function("document.getElementById('pretrain-calibration').open")


@pytest.mark.parametrize("width", [1400, 390])
def test_a_word_is_explained_where_it_stands(browser, written, width):
    with opened(browser, written, width, "dark") as shown:
        asked = shown.locator("#pretrain table").first.get_by_role("button", name="What is mCE?")
        asked.scroll_into_view_if_needed()
        said = shown.locator("#word-mce")
        assert not said.is_visible()
        asked.focus()
        shown.keyboard.press("Enter")
        assert said.is_visible() and "mean corruption error" in said.inner_text()
        box = said.bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= width
        assert abs(box["y"] - asked.bounding_box()["y"]) < 200, "beside what was asked"
        shown.keyboard.press("Escape")
        assert not said.is_visible()
        shown.locator("#answer").get_by_role("button", name="What is router?").click()
        assert "decides which experts" in shown.locator("#word-router").inner_text()
        shown.keyboard.press("Escape")
        shown.locator("#words summary").click()
        assert "decides which experts process a token" in shown.locator("#words").inner_text()


def test_a_table_says_that_it_scrolls(browser, written):
    with opened(browser, written, 390, "light") as shown:
        place = shown.locator("#pretrain .wide-table").first
        assert "over" in place.get_attribute("class").split()
        method = place.locator("tbody th").first
        left = method.bounding_box()["x"]
        place.locator(".scroll").evaluate("one => { one.scrollLeft = one.scrollWidth }")
        table = "document.querySelector('#pretrain .wide-table')"
        shown.wait_for_function(f"{table}.classList.contains('ended')")
        assert method.bounding_box()["x"] == pytest.approx(left, abs=1), "the method stays"
    with opened(browser, written, 1400, "light") as shown:
        assert shown.locator("#pretrain .wide-table.over:visible").count() == 0


def test_without_scripts_everything_is_there(browser, written):
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(written.resolve().as_uri())
    shown.locator("#pretrain summary", has_text="the metrics of every paper").click()
    assert shown.locator("#pretrain .pane").count() == 7
    assert all(pane.is_visible() for pane in shown.locator("#pretrain .pane").all())
    context.close()


def hostile_page(folder: Path) -> str:
    write_results(folder, {"vmoe": True, "prc": True}, [0], ["pretrain"], MEASURED_STAGES)
    names = {CLASSES[0]: EVIL["class"], card("pretrain")["name"]: EVIL["data"]}
    for path in folder.glob("artifacts/**/*.json"):
        text = path.read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        path.write_text(text, encoding="utf-8")
    run = RunSelection(methods=("vmoe", "prc"), seeds=(0,), phases=("pretrain",))
    found = read_results(run, f"{SETTINGS}# {EVIL['method']}\n", folder)
    evaluated = evaluate_claims([claim(says=EVIL["caption"])], found)
    (phase,) = found.phases.values()
    found = found._replace(phases={"pretrain": phase._replace(models=renamed(phase.models))})
    return render_report(found, evaluated)


def renamed(models: Models) -> Models:
    return {EVIL["method"] if name == "vmoe" else name: one for name, one in models.items()}


def hostile_explorer(folder: Path) -> str:
    found = explored.study()
    task = Classification(classes=(EVIL["class"], *CLASSES[1:]))
    phases = {}
    for name, phase in found.phases.items():
        card = {**phase.card, "name": EVIL["data"]}
        phases[name] = phase._replace(models=renamed(phase.models), task=task, card=card)
    return render_study_explorer(found._replace(phases=phases))


def hostile_predictions(folder: Path) -> str:
    pixels, experts = np.zeros((1, 8, 8), np.uint8), [np.zeros((2, 2, 1), np.int16)]
    tile = predicted.encode_picture_as_tile(pixels, experts, EVIL["data"])
    shown = [predicted.ShownFile(EVIL["participant"], EVIL["class"], [tile], (EVIL["caption"],))]
    caption, reason = EVIL["caption"], EVIL["reason"]
    spoken = [predicted.RoutedText(caption, [[(caption, [0])]], [EVIL["class"]], reason)]
    failures = [(EVIL["participant"], EVIL["reason"])]
    about = (EVIL["method"], EVIL["data"], [EVIL["reason"]])
    page = predicted.PredictionsPage(*about, shown, 2, failures, 2, spoken, 2)
    return predicted.render_predictions(page)


@pytest.mark.parametrize(
    ("made", "seen", "scripts"),
    [
        (hostile_page, ("class", "method", "data", "caption"), 1),
        (hostile_explorer, ("class", "method", "data"), 2),
        (hostile_predictions, tuple(EVIL), 2),
    ],
)
def test_nothing_from_outside_is_markup(browser, tmp_path, made, seen, scripts):
    path = tmp_path / "hostile.html"
    path.write_text(made(tmp_path), encoding="utf-8")
    with opened(browser, path, 1400, "light") as shown:
        shown.wait_for_function("document.readyState === 'complete'")
        if made is hostile_explorer:
            shown.wait_for_selector("main[data-drawn]")
        assert shown.evaluate("window.ran") is None and shown.locator("script").count() == scripts
        every = "[...document.querySelectorAll('*')]"
        handlers = f"{every}.filter(one => one.getAttributeNames().some(n => n.startsWith('on')))"
        assert shown.evaluate(f"{handlers}.length") == 0
        assert shown.locator("img[src=x], svg[onload], a[href^=javascript]").count() == 0
        text = shown.evaluate(
            """() => {
              const copy = document.body.cloneNode(true);
              copy.querySelectorAll('script, style').forEach(one => one.remove());
              return copy.textContent;
            }"""
        )
        assert [name for name in seen if EVIL[name] not in text] == []
